"""TextWorldExpress: its games as environments, and the one Java virtual machine behind them."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from hpc_es import envs
from hpc_es.config.schema import Config
from hpc_es.engine.lifetime import process_start
from hpc_es.envs import twx, twx_jvm
from hpc_es.envs.base import Observation, StepResult
from hpc_es.envs.check import check_env
from hpc_es.envs.manifest import count_tasks
from hpc_es.envs.twx import TextWorldExpress
from hpc_es.errors import ConfigError, EnvError

pytest.importorskip("textworld_express")
if shutil.which("java") is None:
    pytest.skip("no java on PATH", allow_module_level=True)

GAMES = get_args(twx.Game)
ONE_ROOM_AWAY = {"numLocations": 3, "maxDistanceApart": 1, "maxDistractorItemsPerLocation": 0, "includeDoors": 0}
ONE_ENVIRONMENT = """\
import sys
from hpc_es import envs
from hpc_es.envs import twx_jvm
env = envs.make("twx", game="simonsays")
env.reset(0)
jvm = twx_jvm._shared
print(jvm.process.pid, jvm.gateway.gateway_parameters.port, flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module", autouse=True)
def no_java_is_left() -> Iterator[None]:
    yield
    stop_java()


@pytest.fixture
def no_java() -> None:
    """Before the test."""
    stop_java()


def stop_java() -> None:
    if twx_jvm._shared is not None:
        twx_jvm._shared.stop()
        twx_jvm._shared = None


def running() -> twx_jvm._Jvm:
    assert twx_jvm._shared is not None
    return twx_jvm._shared


def walk(env: TextWorldExpress, task: int) -> Iterator[Observation | StepResult]:
    """An episode of random actions, the same each time."""
    rng = random.Random(task)
    shown: Observation | None = env.reset(task)
    while shown is not None:
        yield shown
        assert shown.choices is not None
        result = env.step(rng.choice(shown.choices))
        yield result
        shown = result.observation


def alone(game: str, task: int, max_turns: int = 20) -> list[Observation | StepResult]:
    env = TextWorldExpress(game=game, max_turns=max_turns)  # type: ignore[arg-type]
    try:
        return list(walk(env, task))
    finally:
        env.close()


@pytest.mark.parametrize("game", GAMES)
def test_every_game_keeps_the_contract(game: str) -> None:
    check_env(lambda: envs.make("twx", game=game, max_turns=12))


def test_free_text_with_a_history_keeps_the_contract() -> None:
    check_env(lambda: envs.make("twx", actions="free", history=2, max_turns=12))


def obey(env: TextWorldExpress, task: int) -> list[StepResult]:
    """Win a game of `simonsays` by obeying; return all steps."""
    results, shown = [], env.reset(task)
    while True:
        (said,) = re.findall(r"Simon says, '(.*?)'", shown.messages[-1].content)
        results.append(env.step(said))
        if results[-1].observation is None:
            return results
        shown = results[-1].observation


def test_rewards_sum_to_the_score_and_a_won_game_scores_one() -> None:
    env = TextWorldExpress(game="simonsays")
    results = obey(env, 3)
    assert sum(result.reward for result in results) == pytest.approx(1)
    assert all(result.reward > 0 for result in results)
    assert [result.success for result in results] == [False] * 4 + [True]
    assert len(results) == env.facts(3).horizon
    won = TextWorldExpress(game="simonsays", reward="success")
    assert [result.reward for result in obey(won, 3)] == [0, 0, 0, 0, 1]


def test_a_failed_game_scores_minus_one_whatever_it_had_gained() -> None:
    env = TextWorldExpress(game="simonsays")
    first = obey(env, 0)[0]
    shown = env.reset(0)
    (said,) = re.findall(r"Simon says, '(.*?)'", shown.messages[-1].content)
    gained = env.step(said)
    assert gained == first
    assert gained.observation is not None
    assert gained.observation.choices is not None
    (now,) = re.findall(r"Simon says, '(.*?)'", gained.observation.messages[-1].content)
    wrong = next(choice for choice in gained.observation.choices if choice != now)
    failed = env.step(wrong)
    assert (failed.terminated, failed.success) == (True, False)
    assert gained.reward + failed.reward == pytest.approx(-1)


def test_the_splits_are_folds_of_the_package_and_share_no_game() -> None:
    tasks = {split: TextWorldExpress(split=split) for split in ("train", "eval", "test")}  # type: ignore[arg-type]
    ids = [{env.facts(task).id for task in range(env.num_tasks)} for env in tasks.values()]
    assert [len(each) for each in ids] == [1000] * 3
    assert len(set.union(*ids)) == 3000
    assert tasks["eval"].facts(0).id == "coin seed 10000"
    few = TextWorldExpress(game_params={"numLocations": 3}, num_tasks=5)
    assert few.num_tasks == 5
    assert few.facts(2).id == "coin numLocations=3 seed 2"


def shortest(env: TextWorldExpress, task: int) -> int:
    """The least number of turns to success, by trying everything."""
    shown = env.reset(task)
    seen, ways = set(), deque([()])
    while ways:
        way = ways.popleft()
        shown = env.reset(task)
        for action in way:
            result = env.step(action)
            assert result.observation is not None
            shown = result.observation
        place = (env._state["look"], env._state["inventory"])
        if place in seen:
            continue
        seen.add(place)
        for action in shown.choices or ():
            env.reset(task)
            for before in way:
                env.step(before)
            result = env.step(action)
            if result.success:
                return len(way) + 1
            if not result.done:
                ways.append((*way, action))
    raise AssertionError("the game cannot be won")


def test_the_horizon_of_a_map_is_the_shortest_way_to_win() -> None:
    env = TextWorldExpress(game="mapreader", game_params={**ONE_ROOM_AWAY, "maxDistanceApart": 2})
    horizons = [env.facts(task).horizon for task in range(3)]
    assert set(horizons) == {4, 6}
    assert horizons == [shortest(env, task) for task in range(3)]


def test_the_horizon_of_sorting_is_to_take_and_to_put_each_thing_once() -> None:
    env = TextWorldExpress(game="sorting")
    shown = env.reset(0)
    assert shown.choices is not None
    things = [choice.removeprefix("take ") for choice in shown.choices]
    assert env.facts(0).horizon == 2 * len(things)


def test_horizons_that_the_games_do_not_tell_are_not_made_up() -> None:
    assert TextWorldExpress(game="coin").facts(0).horizon is None
    assert TextWorldExpress(game="mapreader", game_params={**ONE_ROOM_AWAY, "includeDoors": 1}).facts(0).horizon is None


def test_a_horizon_can_be_asked_for_within_an_episode() -> None:
    env = TextWorldExpress(game="sorting", max_turns=20)
    undisturbed = list(walk(env, 5))
    steps = walk(env, 5)
    seen = [next(steps), next(steps)]
    assert env.facts(6).horizon is not None
    assert [*seen, *steps] == undisturbed


def test_free_text_is_read_leniently_and_an_invalid_action_costs_a_turn() -> None:
    env = TextWorldExpress(actions="free", game_params={"numLocations": 3, "includeDoors": 0}, max_turns=3)
    shown = env.reset(0)
    assert shown.choices is None
    assert "You can: " in shown.messages[-1].content
    refused = env.step("fly to the moon")
    assert refused.invalid
    assert refused.observation is not None
    assert "Not possible here: fly to the moon" in refused.observation.messages[-1].content
    direction = re.findall(r"move \w+", shown.messages[-1].content)[0]
    moved = env.step(f"> {direction.upper()} .")
    assert not moved.invalid
    assert moved.observation is not None
    assert moved.observation.messages[-1].content.startswith(f"You chose: {direction}\n")
    last = env.step("look around")
    assert (last.truncated, last.terminated, last.invalid) == (True, False, False)


def test_with_a_history_only_the_first_prompt_tells_the_task() -> None:
    env = TextWorldExpress(history=2)
    shown = env.reset(0)
    assert [message.role for message in shown.messages] == ["system", "user"]
    assert shown.choices is not None
    then = env.step(shown.choices[0]).observation
    assert then is not None
    assert [message.role for message in then.messages] == ["user"]
    assert "You chose" not in then.messages[0].content


@pytest.mark.parametrize("game", ["coin", "sorting", "arithmetic"])
def test_games_at_once_do_not_disturb_each_other(game: Any) -> None:
    """Java keeps the objects of a sorting problem only once for all games."""
    wanted = [alone(game, task) for task in range(8)]
    players = [TextWorldExpress(game=game, max_turns=20) for _ in range(16)]
    walks = [walk(env, number // 2) for number, env in enumerate(players)]
    seen: list[list[Observation | StepResult]] = [[] for _ in walks]
    while walks_on := [number for number, each in enumerate(walks) if each is not None]:
        for number in walks_on:
            event = next(walks[number], None)
            if event is None:
                walks[number] = None  # type: ignore[call-overload]
            else:
                seen[number].append(event)
    assert seen == [wanted[number // 2] for number in range(16)]
    for env in players:
        env.close()


def test_64_episodes_at_once_share_one_java(no_java: None) -> None:
    seen: dict[int, list[Observation | StepResult]] = {}

    def play(task: int) -> None:
        seen[task] = alone("coin", task, max_turns=5)

    threads = [threading.Thread(target=play, args=(task,)) for task in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {task: alone("coin", task, max_turns=5) for task in range(64)}
    ps = ["ps", "-ww", "--ppid", str(os.getpid()), "-o", "args="]
    assert subprocess.run(ps, capture_output=True, text=True).stdout.count("py4j.GatewayServer") == 1


def test_neither_java_nor_python_keeps_anything_of_an_episode() -> None:
    alone("cookingworld", 0)
    bindings = running().gateway.java_gateway_server.getGateway().getBindings()
    before, num_games = bindings.size(), running().num_games
    for task in range(200):
        alone(GAMES[task % len(GAMES)], task)
    assert bindings.size() == before
    assert running().num_games == num_games


def test_a_java_that_dies_is_a_fault_and_the_next_episode_has_a_new_one() -> None:
    env = TextWorldExpress()
    env.reset(0)
    running().process.kill()
    with pytest.raises(EnvError, match="the Java of TextWorldExpress ended"):
        env.step("look around")
    env.close()
    assert alone("coin", 0)


def test_signals_for_the_job_do_not_reach_java() -> None:
    env = TextWorldExpress(game="simonsays")
    for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(running().process.pid, number)
    time.sleep(0.3)
    assert obey(env, 0)[-1].success
    env.close()


def test_java_ends_with_the_process_that_started_it_even_when_that_is_killed() -> None:
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", ONE_ENVIRONMENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said = [[int(number) for number in worker.stdout.readline().split()] for worker in workers if worker.stdout]
    (killed, port), (ended, other_port) = said
    assert port != other_port
    assert process_start(killed) is not None
    workers[0].kill()
    workers[1].communicate("\n")
    workers[0].communicate()
    deadline = time.monotonic() + 10
    while process_start(killed) is not None or process_start(ended) is not None:
        assert time.monotonic() < deadline, "a Java outlived its worker"
        time.sleep(0.05)


def test_a_process_that_only_counts_tasks_keeps_no_java(no_java: None) -> None:
    config = {"run": {"name": "x", "num_updates": 1}, "model": {"path": "none"}, "task": {"env": "twx"}}
    assert count_tasks(Config.model_validate(config)).train == 1000
    assert twx_jvm._shared is None


def test_a_missing_java_or_package_is_reported_with_the_remedy(no_java: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delenv("JAVA_HOME", raising=False)
        patch.setenv("PATH", "/nowhere")
        with pytest.raises(ConfigError, match=r"no java is on PATH: install it \(apt install default-jre-headless"):
            envs.make("twx")
        patch.setenv("JAVA_HOME", "/opt/java")
        with pytest.raises(ConfigError, match="JAVA_HOME=/opt/java has no bin/java"):
            envs.make("twx")
    monkeypatch.setitem(sys.modules, "textworld_express.constants", None)
    with pytest.raises(ConfigError, match=r"pip install 'hpc_es\[twx\]'"):
        envs.make("twx")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"game_params": {"rooms": 3}}, r"game=coin, game_params={'rooms': 3}: Unrecognized property name \(rooms\)"),
        ({"game_params": {"numLocations": 500}}, "less than or equal to 11"),
        ({"game": "chess"}, "option game='chess'"),
        ({"num_tasks": 1001}, "num_tasks=1001: coin has 1000 games for split train"),
        ({"split": "dev"}, "option split='dev'"),
    ],
)
def test_options_that_do_not_exist_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        envs.make("twx", **options)
