"""WebShop under random play: what an action does follows from its page, however many episodes there are at once, and
however many there were before."""

import asyncio
import random
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import scripted
from builders import built_assignment

from hpc_es import envs
from hpc_es.config import Config
from hpc_es.engine.base import Completion
from hpc_es.envs.base import StepResult
from hpc_es.envs.webshop import WebShop
from hpc_es.records import Episode, EvalId
from hpc_es.worker.rollout import Player

_QUERIES = (
    "lamp",
    "men's shirt, machine wash",
    "red",
    "<r>",
    "<c> fashion",
    "<a> dry hair",
    "<q>",
    "zzz",
    " ",
    "★ “tea”",
)
_REFUSED = ("click[nothing]", "click[search]", "search[]", "buy now", "Click[next >]", "")


BOTH_CATALOGUES = pytest.mark.parametrize("of_the_original", [False, True], ids=["made up", "1,000 products"])


def _folder(of_the_original: bool, request: pytest.FixtureRequest) -> Path | None:
    """Folder of the catalogue: the original's 1,000 products if they are available, else those of the package."""
    return request.getfixturevalue("shared_data") / "webshop" if of_the_original else None


def _webshop(**options: Any) -> WebShop:
    env = envs.make("webshop", **options)
    assert isinstance(env, WebShop)
    return env


def _random_action(env: WebShop, rng: random.Random) -> str:
    if rng.random() < 0.3:
        return f"search[{rng.choice(_QUERIES)}]"
    clicks = [f"click[{name}]" for name in env.available_actions["clickables"]]
    return rng.choice([*clicks, *(click.upper().replace("CLICK", "click") for click in clicks), rng.choice(_REFUSED)])


# --- random walks ------------------------------------------------------------------------------------------------


@BOTH_CATALOGUES
def test_200_random_walks_stay_consistent(of_the_original: bool, request: pytest.FixtureRequest) -> None:
    env, again = (_webshop(data_dir=_folder(of_the_original, request), max_turns=30) for _ in range(2))
    rng, purchases = random.Random(0), 0
    for walk in range(200):
        task = rng.randrange(env.num_tasks)
        assert env.reset(task) == again.reset(task)
        for _ in range(30):
            before, available = env.observation, env.available_actions
            action = _random_action(env, rng)
            result = env.step(action)
            assert result == again.step(action), (walk, action)
            _check_step(env, task, action, before, available, result)
            purchases += result.terminated
            if result.done:
                break
    assert 20 < purchases < 200


def _check_step(
    env: WebShop, task: int, action: str, before: str, available: dict[str, Any], result: StepResult
) -> None:
    """Check that the effect of an action follows from its page."""
    argument = action[6:-1].lower() if action.startswith("click[") else None
    searches = action.startswith("search[") and action != "search[]"
    expected = searches or (argument in available["clickables"] and argument != "search")
    assert result.invalid == (not expected), action
    assert result.terminated == (argument == "buy now" and expected)
    if result.invalid:
        assert (env.observation, env.available_actions) == (before, available)
    if result.terminated:
        score = result.info["score"]
        assert 0.0 <= result.reward == score["total"] == float(env.observation.split(" [SEP] ")[-3]) <= 1.0
        assert result.success == (score["total"] == 1.0)
    else:
        assert result.reward == 0.0
        shown = env.observation.lower().split(" [SEP] ".lower())
        assert all(name.strip() in shown for name in env.available_actions["clickables"] if name)
        assert env.catalogue.goals[task]["instruction_text"].lower() in shown
        assert env.available_actions["has_search_bar"] == (env.available_actions["clickables"] == ["search"])


# --- many at once ------------------------------------------------------------------------------------------------


def test_64_episodes_at_once_share_one_catalogue_and_do_not_disturb_each_other() -> None:
    def play(task: int) -> list[tuple[str, float]]:
        env, rng, seen = _webshop(split="train"), random.Random(task), []
        barrier.wait(timeout=60)
        env.reset(task)
        for _ in range(15):
            seen.append((env.observation, (result := env.step(_random_action(env, rng))).reward))
            if result.done:
                break
        return seen

    barrier = threading.Barrier(64)
    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(play, range(64)))
    barrier = threading.Barrier(1)
    assert together == [play(task) for task in range(64)]
    assert _webshop().catalogue is _webshop(split="eval").catalogue


class _Shopper(scripted.Echo):
    """An engine that takes one of the choices by the request's seed, as slow as one that has to compute them."""

    async def generate(self, prompt, sampling, *, seed, choices=None) -> Completion:  # type: ignore[no-untyped-def]
        assert choices
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        await asyncio.sleep(0.01)
        self.in_flight -= 1
        return Completion(random.Random(seed).choice(choices), len(prompt), 1, truncated=False)


def _played(max_concurrent: int) -> tuple[list[Episode], int]:
    """64 episodes of an evaluation, and how many of them ever waited for an answer at once."""
    config = Config.model_validate(
        {
            "run": {"name": "rollout", "num_updates": 1},
            "model": {"path": "none"},
            "task": {"env": "webshop", "options": {"style": "short", "actions": "rank"}, "chat": False},
            "engine": {"kind": "transformers", "max_concurrent": max_concurrent, "max_model_len": 100_000},
        }
    )
    engine = _Shopper()
    player = Player(config, engine, lambda kind: envs.make_for(config, kind))  # type: ignore[arg-type]
    assignment = built_assignment(EvalId(0, 0), 1, "train", None, tuple(range(64)), sampling_seed=11)
    return list(asyncio.run(player.play(assignment))), engine.most


def test_a_worker_plays_64_episodes_at_once_as_it_plays_them_one_by_one() -> None:
    together, most = _played(64)
    alone, least = _played(1)
    assert (most > 32, least) == (True, 1)
    facts = [[(e.task, e.reward, e.success, e.turns, e.ended, e.tokens_in) for e in each] for each in (together, alone)]
    assert facts[0] == facts[1]
    assert {episode.ended for episode in together} == {"terminated", "truncated"}
    assert any(0 < episode.reward < 1 for episode in together)
    assert sum(episode.invalid_actions for episode in together) == 0


# --- many after each other ---------------------------------------------------------------------------------------


def _short_episodes(env: WebShop, count: int, rng: random.Random) -> None:
    for _ in range(count):
        env.reset(rng.randrange(env.num_tasks))
        env.step(f"search[{rng.choice(_QUERIES)} {rng.random()}]")
        while not env.step(_random_action(env, rng)).done:
            pass


@pytest.mark.slow
@BOTH_CATALOGUES
def test_memory_does_not_grow_over_10_000_episodes(of_the_original: bool, request: pytest.FixtureRequest) -> None:
    env, rng = _webshop(data_dir=_folder(of_the_original, request), max_turns=5), random.Random(0)
    _short_episodes(env, 2_000, rng)  # caches fill
    filled = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _short_episodes(env, 10_000, rng)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - filled < 4 * 1024  # KiB
