"""Images in messages: who is shown them, who refuses them, and that a model sees the page with the weights it has."""

import asyncio
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
import scripted
from builders import built_assignment
from PIL import Image
from tiny_vision import NUM_IMAGE_TOKENS, write_tiny_vision

from hpc_es import envs
from hpc_es.config.schema import Config, EngineConfig, ModelConfig, SamplingConfig
from hpc_es.engine.base import Completion, ImagePrompt
from hpc_es.envs.base import Env, Message, Observation, StepResult
from hpc_es.envs.manifest import count_tasks
from hpc_es.errors import ConfigError, ContextFull, EngineError, EnvError
from hpc_es.records import Episode, EvalId, Member
from hpc_es.worker.rollout import Player
from hpc_es.worker.trajectories import Trajectory

GREEDY = SamplingConfig(temperature=0, max_tokens=12)
MEMBER = Member(seed=3, sign=1, sigma=0.1)


def picture(colour: str, scale: int = 1) -> bytes:
    """The tiny model scales it down: it sees the same at every scale."""
    file = io.BytesIO()
    Image.new("L", (100 * scale, 140 * scale), colour).save(file, "PNG")
    return file.getvalue()


class Shows(Env):
    """Two turns, each with an image of its own, and all of them in the prompt."""

    num_tasks = 4
    instant = True
    shows_images = True
    history = None

    def __init__(self, choices: tuple[str, ...] | None = None, image: Any = picture("black")) -> None:  # noqa: B008
        self._choices, self._image = choices, image

    def reset(self, task: int) -> Observation:
        return Observation((Message("user", "first", images=(self._image,)),), self._choices)

    def step(self, text: str) -> StepResult:
        if text == "seen":
            return StepResult(None, 1.0, terminated=True, truncated=False)
        return StepResult(Observation((Message("user", "second", images=(picture("white"),)),)), 0.0, False, False)


class Template(scripted.Letters):
    """Shows the chat itself."""

    chat_template = "..."

    def apply_chat_template(self, chat, add_generation_prompt, return_dict):
        return {"input_ids": self.encode(json.dumps(chat))}


class Seeing(scripted.Echo):
    """An engine that notes what it is shown."""

    tokenizer = Template()
    takes_images = True

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[ImagePrompt] = []

    async def generate(self, prompt: ImagePrompt, sampling, *, seed, choices=None) -> Completion:
        self.shown.append(prompt)
        return Completion("seen" if len(self.shown) == 2 else "hm", 100, 1, truncated=False)


def settings(**task: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "images", "num_updates": 1},
            "model": {"path": "none"},
            "task": {"env": "test_images:Shows", **task},
            "eval": {"num_tasks": 0},
            "es": {"tasks_per_member": 4},
        }
    )


def play(engine, env: Env, config: Config, keep=None) -> tuple[Episode, ...]:
    assignment = built_assignment(EvalId(0, 0), 1, "train", None, (0,), sampling_seed=1)
    return asyncio.run(Player(config, engine, lambda kind: env, keep).play(assignment))


def test_images_reach_the_engine_in_the_order_of_their_places() -> None:
    engine = Seeing()
    (episode,) = play(engine, Shows(), settings())
    assert [prompt.images for prompt in engine.shown] == [(picture("black"),), (picture("black"), picture("white"))]
    chat = json.loads("".join(map(chr, engine.shown[1].tokens)))
    assert chat[2] == {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "second"}]}
    assert chat[1] == {"role": "assistant", "content": "hm"}
    assert (episode.reward, episode.tokens_in) == (1.0, 200)


def test_trajectories_say_how_large_an_image_is_and_do_not_hold_it() -> None:
    kept: list[Trajectory] = []
    play(Seeing(), Shows(), settings(), kept.extend)
    messages = [message for turn in kept[0].turns for message in turn.messages]
    assert [message.content for message in messages] == ["[image, 1 kB]\nfirst", "[image, 1 kB]\nsecond"]
    assert not any(message.images for message in messages)


def test_a_text_engine_refuses_images_and_the_episode_is_not_to_blame() -> None:
    engine = Seeing()
    engine.takes_images = False
    with pytest.raises(ConfigError, match=r"shows an image, .* takes text alone: .*engine\.kind=endpoint"):
        play(engine, Shows(), settings())


def test_an_image_that_is_not_a_file_is_a_fault_of_the_environment() -> None:
    with pytest.raises(EnvError, match="images that are not bytes"):
        play(Seeing(), Shows(image="page.png"), settings())


def test_images_need_the_chat_template_and_are_not_ranked_about() -> None:
    with pytest.raises(ConfigError, match=r"task\.chat=true"):
        play(Seeing(), Shows(), settings(chat=False))
    with pytest.raises(EnvError, match="choices about an image"):
        play(Seeing(), Shows(choices=("a", "b")), settings())


@pytest.mark.parametrize("kind", ["transformers", "lab"])
def test_a_run_whose_engine_cannot_see_is_refused_before_it_starts(kind: str) -> None:
    config = settings()
    count_tasks(config)
    blind = config.model_copy(update={"engine": EngineConfig(kind=kind)})
    with pytest.raises(ConfigError, match=rf"shows images, but engine\.kind={kind} takes only text"):
        count_tasks(blind)


# --- a real vision-language model in vLLM ------------------------------------------------------------------------


class Looking:
    def __init__(self, engine: Any, runner: asyncio.Runner, num_image_tokens: int) -> None:
        self.engine, self.runner, self.num_image_tokens = engine, runner, num_image_tokens

    def prompt(self, *colours: str, words: str = "hi") -> ImagePrompt:
        parts = [{"type": "image"}] * len(colours)
        chat = [{"role": "user", "content": [*parts, {"type": "text", "text": words}]}]
        tokens = self.engine.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
        return ImagePrompt(list(tokens["input_ids"]), tuple(map(picture, colours)))

    def look(self, prompt: ImagePrompt) -> Completion:
        return self.runner.run(self.engine.generate(prompt, GREEDY, seed=1))

    def perturb(self, member: Member | None) -> None:
        self.runner.run(self.engine.perturb(member))


@pytest.fixture(scope="module", params=["idefics3", "qwen3_5"])
def looking(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Looking]:
    from tiny_qwen import write_tiny_qwen

    from hpc_es.engine.vllm import VllmEngine

    folder = tmp_path_factory.mktemp("vision") / "model"
    if request.param == "idefics3":
        model, num_image_tokens = ModelConfig(path=str(write_tiny_vision(folder)), dtype="float32"), NUM_IMAGE_TOKENS
    else:
        model, num_image_tokens = ModelConfig(path=str(write_tiny_qwen(request.param, folder)), dtype="bfloat16"), 2
    engine = EngineConfig(max_model_len=512, max_concurrent=4, kv_cache_mib=32, block_size=32)
    with asyncio.Runner() as runner:
        started = runner.run(VllmEngine.start(model, engine, threads=1))
        yield Looking(started, runner, num_image_tokens)
        runner.run(started.close())


@pytest.mark.slow
@pytest.mark.vllm
def test_a_model_in_vllm_sees_its_images(looking: Looking) -> None:
    assert looking.engine.takes_images
    looking.perturb(None)
    black = looking.look(looking.prompt("black"))
    assert looking.look(looking.prompt("white")).text != black.text
    assert looking.look(looking.prompt("black")) == black
    assert black.tokens_in >= len(looking.prompt("black")) - 1 + looking.num_image_tokens
    two = looking.look(looking.prompt("black", "white"))
    assert two.text != looking.look(looking.prompt("white", "black")).text


@pytest.mark.slow
@pytest.mark.vllm
def test_an_image_is_encoded_again_with_the_weights_of_every_member(looking: Looking) -> None:
    image = looking.prompt("gray")
    looking.perturb(None)
    centre = looking.look(image)
    looking.perturb(MEMBER)
    again = looking.look(image)
    unknown = looking.look(ImagePrompt(image.tokens, (picture("gray", scale=2),)))  # nothing of it can be cached
    assert again == unknown
    assert again.text != centre.text


@pytest.mark.slow
@pytest.mark.vllm
def test_an_image_that_cannot_be_shown_is_reported(looking: Looking) -> None:
    for damaged in (b"no image", picture("black")[:-30]):
        with pytest.raises(EnvError, match="must be a PNG or JPEG file"):
            looking.look(ImagePrompt(looking.prompt("black").tokens, (damaged,)))
    with pytest.raises(EngineError, match="chat template of the model make a place"):
        looking.look(ImagePrompt([1, 2, 3], (picture("black"),)))
    with pytest.raises(ContextFull):
        looking.look(looking.prompt("black", words="x" * 490))
    looking.look(looking.prompt("black"))  # it goes on


@pytest.mark.slow
@pytest.mark.vllm
def test_docvqa_is_played_by_a_model_that_sees_the_page(looking: Looking) -> None:
    config = settings().model_copy(update={"engine": EngineConfig(max_model_len=512), "sampling": GREEDY})
    player = Player(config, looking.engine, lambda kind: envs.make("docvqa", page="image", max_turns=2))
    assignment = built_assignment(EvalId(0, 0), 1, "train", None, (0, 1), sampling_seed=1)
    episodes = looking.runner.run(player.play(assignment))
    assert [(episode.turns, episode.ended, episode.invalid_actions) for episode in episodes] == [
        (2, "truncated", 2)
    ] * 2
