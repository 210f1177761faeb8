"""DocVQA: its score, its files, the pages that are drawn, and the agent that reads them with real OCR in a sandbox."""

import asyncio
import io
import json
import shutil
from pathlib import Path

import pytest
import scripted
from builders import built_assignment
from hypothesis import given
from hypothesis import strategies as st
from repository import CONFIGS

from hpc_es import envs
from hpc_es.config import load
from hpc_es.config.schema import Config
from hpc_es.engine.base import Completion
from hpc_es.envs.base import Message
from hpc_es.envs.check import check_env
from hpc_es.envs.docvqa import dataset, env, pages, prompt
from hpc_es.envs.docvqa.anls import anls, distance, is_exact
from hpc_es.envs.sandbox import Execution
from hpc_es.errors import ConfigError, EnvError
from hpc_es.records import EvalId
from hpc_es.worker.rollout import Player

CONFIG = CONFIGS / "tasks" / "docvqa.yaml"
NUM_PAGES = 6

needs_tools = pytest.mark.skipif(
    shutil.which("tesseract") is None or shutil.which("bwrap") is None,
    reason="needs tesseract and bwrap: apt install tesseract-ocr bubblewrap",
)


# --- the score ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "accepted", "score"),
    [
        ("Paris", ["paris"], 1.0),
        ("  the  Ritz\n", ["The Ritz"], 1.0),
        ("kitten", ["sitting"], 1 - 3 / 7),
        ("ab", ["ax"], 0.0),  # d/n is 0.5, which no longer counts
        ("abc", ["abx"], 1 - 1 / 3),
        ("London", ["Paris"], 0.0),
        ("$12.50", ["twelve", "12.50"], 1 - 1 / 6),  # the best of those accepted
        ("", ["Paris"], 0.0),
        ("The answer is Paris, the capital of France", ["Paris"], 0.0),
    ],
)
def test_anls_is_that_of_the_challenge(answer: str, accepted: list[str], score: float) -> None:
    assert anls(answer, accepted) == pytest.approx(score)


def test_accuracy_wants_every_character_but_no_case_and_no_white_space() -> None:
    assert is_exact(" $1,744.14\n", ["1,744.14", "$1,744.14"])
    assert is_exact("EXPORT  regulations", ["Export Regulations"])
    assert not is_exact("Export Regulation", ["Export Regulations"])


@given(st.text("abc", max_size=7), st.text("abc", max_size=7))
def test_the_edit_distance_is_the_one_of_its_definition(one: str, other: str) -> None:
    def by_definition(a: str, b: str) -> int:
        if not a or not b:
            return len(a) + len(b)
        if a[0] == b[0]:
            return by_definition(a[1:], b[1:])
        return 1 + min(by_definition(a[1:], b), by_definition(a, b[1:]), by_definition(a[1:], b[1:]))

    assert distance(one, other) == by_definition(one, other)
    score = anls(one, [other])
    assert score == 0 or 0.5 < score <= 1
    assert (score == 1) == (one == other)


# --- drawn pages -------------------------------------------------------------------------------------------------


def test_the_same_seed_draws_the_same_page_and_another_draws_another() -> None:
    drawn = [pages.draw(seed) for seed in range(NUM_PAGES)]
    assert drawn == [pages.draw(seed) for seed in range(NUM_PAGES)]
    assert len({page.image for page in drawn}) == NUM_PAGES
    assert all(page.image.startswith(b"\x89PNG") for page in drawn)


def test_nothing_that_is_drawn_runs_off_the_page() -> None:
    from PIL import Image, ImageOps

    for seed in range(40):
        image = Image.open(io.BytesIO(pages.draw(seed).image))
        left, top, right, bottom = ImageOps.invert(image).getbbox()
        assert left >= pages.MARGIN - 5, seed
        assert top >= pages.MARGIN - 5, seed
        assert right <= pages.WIDTH - pages.MARGIN + 5, seed
        assert bottom <= pages.HEIGHT - pages.MARGIN, seed


def test_no_page_of_evaluation_is_seen_in_training() -> None:
    train, held_out = (dataset.Drawn(split, 200, 0) for split in ("train", "eval"))
    assert not {train.page(task) for task in range(15)} & {held_out.page(task) for task in range(15)}


# --- the challenge's files ---------------------------------------------------------------------------------------


def write_dataset(folder: Path, split: str = "val", num: int = 4, pages_in: str = "documents", **changed) -> Path:
    """DocVQA's own format, about drawn pages; `changed` replaces keys of the last question."""
    (folder / pages_in).mkdir(parents=True, exist_ok=True)
    entries = []
    for number in range(num):
        page = pages.draw(number)
        (folder / pages_in / f"page_{number}.png").write_bytes(page.image)
        entry = {"questionId": 100 + number, "question": page.question, "docId": number, "answers": list(page.accepted)}
        entries.append({**entry, "image": f"documents/page_{number}.png", "data_split": split})
    entries[-1].update(changed)
    document = {"dataset_name": "SP-DocVQA", "dataset_version": "1.0", "dataset_split": split, "data": entries}
    (folder / f"{split}_v1.0_withQT.json").write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize("pages_in", ["documents", "spdocvqa_images"])
def test_the_challenges_files_are_read_with_their_pages(tmp_path: Path, pages_in: str) -> None:
    questions = dataset.official(write_dataset(tmp_path, pages_in=pages_in), "eval")
    by_id = {questions.id(task): task for task in range(len(questions))}
    assert set(by_id) == {"100", "101", "102", "103"}
    for number in range(4):
        task, drawn = by_id[str(100 + number)], pages.draw(number)
        assert questions.page(task) == drawn.image
        assert (questions.question(task).text, questions.question(task).accepted) == (drawn.question, drawn.accepted)


def test_a_download_keeps_its_folders(tmp_path: Path) -> None:
    write_dataset(tmp_path / "spdocvqa_qas", "train")
    (tmp_path / "spdocvqa_qas" / "documents").rename(tmp_path / "spdocvqa_images")
    assert len(dataset.official(tmp_path, "train")) == 4
    with pytest.raises(ConfigError, match=r"holds no val_v1\.0\*\.json for split=eval"):
        dataset.official(tmp_path, "eval")


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"image": "documents/lost.png"}, r"data\[3\] needs the page documents/lost\.png, which is not"),
        ({"image": "../../secret.png"}, "secret.png, which is not"),
        ({"answers": []}, r"data\[3\] has answers=\[\]"),
        ({"answers": None}, "the test split has no answers"),
        ({"question": 7}, r"data\[3\] has question=7; the file is damaged"),
    ],
)
def test_faults_in_the_files_are_named(tmp_path: Path, changed: dict, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        dataset.official(write_dataset(tmp_path, **changed), "eval")


@pytest.mark.parametrize(("text", "complaint"), [('{"data": [', "cannot be read"), ("[]", "no list `data`")])
def test_a_damaged_file_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "val_v1.0.json").write_text(text)
    with pytest.raises(ConfigError, match=f"val_v1.0.json.*{complaint}"):
        dataset.official(tmp_path, "eval")


def test_a_page_that_is_gone_later_is_a_fault_and_no_wrong_answer(tmp_path: Path) -> None:
    questions = dataset.official(write_dataset(tmp_path), "eval")
    shutil.rmtree(tmp_path / "documents")
    with pytest.raises(EnvError, match="cannot be read"):
        questions.page(0)


# --- actions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "kind", "text"),
    [
        ("I read it. <bash>tesseract page.png -</bash>", "bash", "tesseract page.png -"),
        ("<bash>\nls\npwd\n", "bash", "ls\npwd"),  # the closing tag was a stop string
        ("<answer> 42 </answer>", "answer", "42"),
        ("<bash>ls</bash> Output: 42 <answer>42</answer>", "bash", "ls"),
        ("<answer>42</answer><bash>ls</bash>", "answer", "42"),
        ("I list them.\n```bash\nls -l\n```\n<answer>42</answer>", "bash", "ls -l"),
    ],
)
def test_the_first_action_of_an_answer_counts(said: str, kind: str, text: str) -> None:
    assert prompt.read(said) == prompt.Action(kind, text)


@pytest.mark.parametrize(
    "said", ["", "42", "bash ls", "<answer>  </answer>", "</bash>", "<BASH>ls</BASH>", "```bash\n```", "```\nls\n```"]
)
def test_an_answer_without_an_action_is_none(said: str) -> None:
    assert prompt.read(said) is None


def test_the_agent_is_told_how_a_command_ended() -> None:
    assert prompt.outcome(Execution("a\n", 0, "exit", 0.1)) == "Output:\na"
    assert prompt.outcome(Execution("", 0, "exit", 0.1)) == "No output."
    assert prompt.outcome(Execution("no such file\n", 2, "exit", 0.1)) == "Output:\nno such file\n(exit status 2)"
    assert "limit of time" in prompt.outcome(Execution("", -9, "time", 20.0))


# --- the environment ---------------------------------------------------------------------------------------------


@needs_tools
def test_an_agent_reads_the_page_with_ocr_and_is_scored_by_anls() -> None:
    played = envs.make("docvqa", split="eval", num_tasks=NUM_PAGES)
    for task in range(NUM_PAGES):
        page = dataset.Drawn("eval", NUM_PAGES, 0).question(task)
        first = played.reset(task)
        assert page.text in first.messages[1].content
        result = played.step("<bash>tesseract page.png - --psm 4 2>/dev/null</bash>")
        assert result.observation is not None
        text = " ".join(result.observation.messages[0].content.split()).lower()
        assert any(" ".join(each.split()).lower() in text for each in page.accepted), page
        end = played.step(f"<answer>{page.accepted[-1].upper()}</answer>")
        assert (end.reward, end.success, end.terminated) == (1.0, True, True)
    played.close()


@needs_tools
def test_files_last_within_an_episode_and_not_beyond_it() -> None:
    played = envs.make("docvqa")
    played.reset(0)
    played.step("<bash>tesseract page.png text 2>/dev/null</bash>")
    assert "page.png\ntext.txt" in played.step("<bash>ls</bash>").observation.messages[0].content
    played.reset(0)
    assert "text.txt" not in played.step("<bash>ls</bash>").observation.messages[0].content
    played.close()


@needs_tools
def test_an_answer_without_any_command_scores_nothing_and_a_near_one_is_worth_its_likeness() -> None:
    played = envs.make("docvqa")
    accepted = dataset.Drawn("train", 1024, 0).question(0).accepted
    played.reset(0)
    blind = played.step(f"<answer>{accepted[0]}</answer>")
    assert (blind.reward, blind.success, blind.terminated) == (0.0, False, True)
    played.reset(0)
    played.step("<bash>false</bash>")  # a command that fails is a command
    near = played.step(f"<answer>{accepted[0]}x</answer>")
    assert near.reward == pytest.approx(anls(accepted[0] + "x", accepted))
    assert 0.5 < near.reward < 1
    assert not near.success
    played.close()


@needs_tools
def test_turns_are_limited_and_an_answer_in_the_last_one_still_counts() -> None:
    played = envs.make("docvqa", max_turns=2)
    accepted = dataset.Drawn("train", 1024, 0).question(3).accepted
    played.reset(3)
    played.step("<bash>true</bash>")
    assert played.step(f"<answer>{accepted[0]}</answer>").success
    played.reset(3)
    assert played.step("hm").invalid
    last = played.step("<bash>true</bash>")
    assert (last.truncated, last.terminated, last.reward, last.observation) == (True, False, 0.0, None)
    played.close()


@needs_tools
def test_a_command_that_never_ends_is_an_outcome_that_the_agent_sees() -> None:
    played = envs.make("docvqa", limits={"seconds": 0.5})
    played.reset(0)
    result = played.step("<bash>sleep 60</bash>")
    assert not result.done
    assert "limit of time" in result.observation.messages[0].content
    played.close()


@needs_tools
@pytest.mark.parametrize("page", ["tool", "image"])
def test_the_contract_is_kept(page: str) -> None:
    check_env(lambda: envs.make("docvqa", page=page))


@needs_tools
def test_the_agent_finds_the_challenges_pages(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path)
    played = envs.make("docvqa", data_dir=str(folder), split="eval")
    played.reset(0)
    listed = played.step("<bash>wc -c page.png</bash>").observation.messages[0].content
    number = int(played.facts(0).id.removeprefix("question ")) - 100
    assert f"{len(pages.draw(number).image)} page.png" in listed
    played.close()


def test_a_missing_tesseract_is_a_setting_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    class Empty:
        def __enter__(self) -> "Empty":
            return self

        def __exit__(self, *error: object) -> None: ...

        def run(self, command: str) -> Execution:
            return Execution("bash: tesseract: command not found\n", 127, "exit", 0.0)

    monkeypatch.setattr(env, "Sandbox", Empty)
    env._require_tools.cache_clear()
    with pytest.raises(ConfigError, match=r"apt install tesseract-ocr.*page=image"):
        envs.make("docvqa")
    envs.make("docvqa", page="image")  # needs no sandbox
    env._require_tools.cache_clear()


@needs_tools
def test_an_episode_that_outgrows_the_context_ends_without_a_reward_and_forgets_nothing() -> None:
    class Reads(scripted.Echo):
        async def generate(self, prompt, sampling, *, seed, choices=None) -> Completion:
            self.seeds.append(len(prompt))
            return Completion("<bash>echo " + "x" * 300 + "</bash>", len(prompt), 1, truncated=False)

    config = Config.model_validate(
        {
            "run": {"name": "docvqa", "num_updates": 1},
            "model": {"path": "none"},
            "task": {"env": "docvqa", "chat": False},
            "engine": {"max_model_len": 2500},
        }
    )
    engine = Reads()
    assignment = built_assignment(EvalId(0, 0), 1, "train", None, (0,), sampling_seed=11)
    player = Player(config, engine, lambda kind: envs.make("docvqa"))
    (episode,) = asyncio.run(player.play(assignment))
    assert (episode.ended, episode.reward, episode.success) == ("context", 0.0, False)
    assert sorted(engine.seeds) == engine.seeds  # the prompt only grew
    assert episode.turns == len(engine.seeds) > 1


# --- the page as an image ----------------------------------------------------------------------------------------


def test_a_model_that_sees_is_shown_the_page_with_every_turn() -> None:
    played = envs.make("docvqa", page="image")
    questions = dataset.Drawn("train", 1024, 0)
    first = played.reset(5)
    assert first.messages[0].images == (questions.page(5),)
    again = played.step("<bash>ls</bash>")  # it has no tools
    assert again.invalid
    assert again.observation.messages[0].images == (questions.page(5),)
    assert played.step(f"<answer>{questions.question(5).accepted[0]}</answer>").reward == 1


def test_for_people_an_image_is_a_word_and_a_size() -> None:
    assert Message("user", "Look.", images=(b"x" * 34_400,)).readable == "[image, 34 kB]\nLook."
    assert Message("user", "Look.").readable == "Look."


# --- the preset --------------------------------------------------------------------------------------------------


def test_the_preset_has_the_published_settings() -> None:
    config = load(CONFIG).config
    es, sampling = config.es, config.sampling
    assert (config.run.num_updates, es.population, es.tasks_per_member, es.alpha.start) == (40, 16, 16, 5e-4)
    assert (es.sigma.kind, es.sigma.start, es.sigma.end) == ("cosine", 1e-3, 5e-4)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.presence_penalty) == (1, 1, 40, 2)
    assert (sampling.max_tokens, config.engine.max_model_len) == (512, 32768)
    assert (config.task.options["max_turns"], config.eval.repeats) == (50, 4)


@needs_tools
def test_the_preset_plays_generated_pages_on_request() -> None:
    config = load(CONFIG, ["task.options.data_dir=null"]).config
    train, held_out = (envs.make_for(config, kind) for kind in ("train", "eval"))
    assert held_out.num_tasks >= config.eval.num_tasks
    assert train.reset(0) != held_out.reset(0)
