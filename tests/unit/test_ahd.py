"""ahd: instances and values equal the published ones; programs fail as outcomes; sandboxes fail as faults."""

import gzip
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpc_es import envs
from hpc_es.envs.ahd import evaluate as evaluating
from hpc_es.envs.ahd import instances, reference, tasks
from hpc_es.envs.ahd.evaluate import Evaluated, evaluate
from hpc_es.envs.ahd.tasks import evaluation
from hpc_es.envs.check import check_env
from hpc_es.envs.sandbox import Limits, Sandbox
from hpc_es.errors import ConfigError, EnvError

LIMITS = Limits(seconds=20, cpu_seconds=1.5)


@pytest.fixture(scope="module")
def golden(shared_data: Path) -> dict[str, Any]:
    with gzip.open(shared_data / "ahd" / "ahd_golden.json.gz") as file:
        return json.load(file)


def value(golden: dict[str, Any], task: str, name: str, what: str) -> Any:
    return next(
        each["value"]
        for each in golden["own"]
        if (each["task"], each["name"]) == (task, name) and each["what"].startswith(what)
    )


def source(golden: dict[str, Any], task: str, name: str) -> str:
    return golden["sources"][f"{task}/{name}"]["source"]


def test_instances_equal_the_published_files_bit_for_bit(shared_data: Path) -> None:
    recorded = json.loads((shared_data / "ahd" / "ahd_instances.json").read_text())
    recorded = {key: each for key, each in recorded.items() if isinstance(each, dict) and "shape" in each}
    assert len(recorded) == 30
    for key, each in recorded.items():
        problem, name = key.split(".")
        split = name.rstrip("0123456789")
        drawn = instances.load(problem, split, int(name[len(split) :]))
        assert (list(drawn.shape), str(drawn.dtype)) == (each["shape"], each["dtype"])
        assert hashlib.sha256(drawn.tobytes()).hexdigest() == each["sha256_of_bytes"], key


@pytest.mark.parametrize("problem", ["tsp_constructive", "kp_constructive", "asp_constructive"])
@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_search_values_of_constructive_tasks_equal_the_golden_ones(
    problem: str, count: int, golden: dict[str, Any]
) -> None:
    rows = [each for each in golden["own"] if each["task"] == problem and each["what"].startswith("search")]
    assert len(rows) >= count
    for each in rows[-count:]:
        done = evaluate(source(golden, problem, each["name"]), evaluation(problem))
        if each["value"] is None:
            assert done.invalid
        else:
            assert done.objective == pytest.approx(each["value"], rel=1e-9), each["name"]


@pytest.mark.parametrize(
    ("problem", "size", "names"),
    [
        ("tsp_constructive", 20, ("near_minus_home", "stays")),
        ("kp_constructive", 50, ("index_0", "ignores_capacity", "negative_index")),
    ],
)
def test_final_values_equal_the_golden_ones_on_all_test_instances(
    problem: str, size: int, names: tuple[str, ...], golden: dict[str, Any]
) -> None:
    sign = -1 if problem == "kp_constructive" else 1
    for name in names:
        right = value(golden, problem, name, f"final: 1000 test instances N={size}")
        done = evaluate(source(golden, problem, name), evaluation(problem, "final", size))
        assert done.num_failures == right["failure_count"]
        if right["mean"] is not None:
            found = sign * np.array(done.objectives)
            assert [found.mean(), found.std(), found.min(), found.max()] == pytest.approx(
                [right["mean"], right["std"], right["min"], right["max"]], rel=1e-9
            )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["constant", "sum", "changes", "not_a_number"])
def test_large_admissible_sets_have_the_golden_sizes(name: str, golden: dict[str, Any]) -> None:
    right, _ = value(golden, "asp_constructive", name, "own fast evaluator: n=21")
    assert (
        evaluate(source(golden, "asp_constructive", name), evaluation("asp_constructive", size=21)).objective == -right
    )


@pytest.mark.parametrize(
    ("problem", "name", "size"),
    [
        ("tsp_aco", "inverse_squared", 20),
        pytest.param("tsp_aco", "inverse", 20, marks=pytest.mark.slow),
        pytest.param("cvrp_aco", "inverse", 20, marks=pytest.mark.slow),
        pytest.param("cvrp_aco", "savings", 20, marks=pytest.mark.slow),
        pytest.param("bpp_offline_aco", "demand", 500, marks=pytest.mark.slow),
        pytest.param("bpp_offline_aco", "pair_fills", 500, marks=pytest.mark.slow),
    ],
)
def test_ant_colonies_agree_with_the_golden_values_within_their_spread(
    problem: str, name: str, size: int, golden: dict[str, Any]
) -> None:
    right = value(golden, problem, name, "spread")
    task = evaluation(problem, "final", size, effort=10, num_instances=4)
    program = source(golden, problem, name)
    found = [evaluate(program, task, seed=seed).objectives for seed in range(6)]
    error = np.std(np.mean(found, axis=1), ddof=1) / np.sqrt(6)
    assert np.mean(found) == pytest.approx(right["mean"], abs=4 * np.hypot(error, right["se"]))


def test_a_colony_is_reproducible_and_its_seed_matters() -> None:
    task = evaluation("tsp_aco", effort=5)
    one, two, other = (evaluate(reference.INVERSE_DISTANCE, task, seed=seed).objectives for seed in (1, 1, 2))
    assert one == two != other


def test_waiting_at_the_depot_costs_as_published_unless_it_is_switched_off() -> None:
    program = reference.GREEDY["cvrp_aco"]
    published, without = (
        evaluate(program, evaluation("cvrp_aco", "final", 20, effort=10, waiting=waiting, num_instances=8)).objective
        for waiting in (True, False)
    )
    assert without < published - 1


def test_the_template_has_the_golden_values_of_its_coefficients(golden: dict[str, Any]) -> None:
    values = golden["tsp_coefficients"]["values"]
    for key in ("-0.2,-0.4,-0.4", "-0.2,-0.4,0"):
        done = evaluate(reference.tsp_template(*map(float, key.split(","))), evaluation("tsp_constructive"))
        assert done.objective == pytest.approx(values[key], rel=1e-9)


def test_no_program_beats_the_optima_and_bounds(golden: dict[str, Any]) -> None:
    done = evaluate(reference.BEST_RATIO, evaluation("kp_constructive", "final", 50))
    chosen = -np.array(done.objectives)[golden["optima"]["indices"]]
    assert np.all(chosen <= np.array(golden["optima"]["kp_test50_W12.5"]) + 1e-9)
    assert -done.objective < reference.BEST["kp_constructive", 50].value
    for items in instances.load("bpp_offline_aco", "test", 500)[:4]:
        assert 190 < reference.bins_needed(items.tolist(), 150) < 215


HEAD = "def select_next_node(current_node, destination_node, unvisited_nodes, distance_matrix):\n"
FORGED = """
import base64, os, zlib
data = base64.b64encode(zlib.compress((b"\\1" + bytes(200)) * 8))  # eight tours that never leave node 0
for descriptor in range(1, 9):
    try: os.write(descriptor, data)
    except OSError: pass
os._exit(0)
"""
INVALID = {
    "wrong name": "def next_node(a, b, c, d):\n    return c[0]",
    "too few parameters": "def select_next_node(current_node):\n    return 1",
    "exception": HEAD + "    return 1 // 0",
    "not a number": HEAD + "    return float('nan')",
    "outside": HEAD + "    return 1000",
    "negative": HEAD + "    return -1",
    "nothing": HEAD + "    return None",
    "syntax": "def select_next_node(:",
    "endless loop": HEAD + "    while True: pass",
    "endless import": "while True: pass",
    "too slow": "import time\n" + HEAD + "    time.sleep(1000)",
    "exit": HEAD + "    raise SystemExit",
    "hard exit": "import os\nos._exit(0)",
    "killed": "import os\nos.kill(os.getpid(), 9)",
    "memory": HEAD + "    return bytearray(10 ** 10)",
    "grows": "x = [0]\nwhile True: x = x + x",
    "forks": "import os\nwhile True: os.fork()",
    "output": "import os\nwhile True: os.write(1, b'x' * 65536)",
    "recursion": "def f(): return f()\nf()",
    "network": "import socket\nsocket.create_connection(('1.1.1.1', 80), 1)",
    "host files": "open('/etc/passwd').read()",
    "too long": HEAD + "    return 1\n" + "#" * evaluating.MAX_PROGRAM,
    "surrogate": HEAD + "    return '\udcff'",
    "own answer": FORGED,
    "patched numpy": "import numpy as np\nnp.isin = lambda a, b: np.zeros(len(a), bool)\n" + HEAD + "    return 0",
}


@pytest.mark.parametrize("what", INVALID)
def test_a_failing_or_hostile_program_is_invalid_and_never_an_error(what: str) -> None:
    task = evaluation("tsp_constructive", num_instances=8)
    limits = LIMITS.model_copy(update={"seconds": 3.0}) if what == "too slow" else LIMITS
    done = evaluate(INVALID[what], task, limits=limits)
    assert done.invalid
    assert np.isnan(done.objective)


@pytest.mark.parametrize("bad", ["float('nan')", "float('inf')", "0"])
def test_values_that_no_ant_can_use_are_handled(bad: str) -> None:
    program = f"def heuristics(distance_matrix):\n    return distance_matrix * {bad}"
    done = evaluate(program, evaluation("tsp_aco", effort=2))
    assert bool(done.invalid) == (bad != "0")


def test_a_patched_scorer_changes_no_score() -> None:
    cheat = "import numpy as np\nnp.linalg.norm = lambda *a, **k: 0 * a[0].sum(axis=-1)\n" + HEAD
    done = evaluate(cheat + "    return unvisited_nodes[0]", evaluation("tsp_constructive"))
    assert done.invalid or done.objective > 20


def test_a_sandbox_that_fails_is_a_fault_and_never_a_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise EnvError("the sandbox has ended")

    env = envs.make("ahd")
    env.reset(0)
    monkeypatch.setattr(Sandbox, "run", fail)
    with pytest.raises(EnvError, match="the sandbox has ended"):
        env.step(f"```python\n{reference.NEAREST_NODE}\n```")


def test_evaluations_side_by_side_give_the_same_values() -> None:
    def objective(b: float) -> float:
        return evaluate(reference.tsp_template(-0.2, b), evaluation("tsp_constructive", num_instances=4)).objective

    weights = [-0.2, -0.4, -0.6, -0.8]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(objective, weights)) == [objective(b) for b in weights]


def test_the_environment_rewards_the_objective_and_keeps_the_contract() -> None:
    env = envs.make("ahd", problem="tsp_constructive", size=50)
    env.reset(0)
    step = env.step(f"{{nearest}}\n```python\n{reference.NEAREST_NODE}\n```")
    assert (step.reward, step.success, step.terminated) == (pytest.approx(-7.0043697989867315, rel=1e-9), True, True)
    env.reset(0)
    refused = env.step("I do not know.")
    assert (refused.reward, refused.invalid, refused.info["invalid"]) == (-37.5, True, "no program")
    assert check_env(lambda: envs.make("ahd", problem="kp_constructive")) == 1


@pytest.mark.parametrize("problem", tasks.SIZES)
def test_an_invalid_program_gets_less_than_a_plain_one(problem: str) -> None:
    for size in tasks.SIZES[problem][:1]:
        env = envs.make("ahd", problem=problem, size=size, split="eval", num_instances=2)
        env.reset(0)
        valid = env.step(f"```python\n{reference.GREEDY[problem]}\n```")
        env.reset(0)
        assert valid.success
        assert valid.reward > env.step("").reward


def test_an_unknown_size_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="size=30 must be one of 20, 50"):
        envs.make("ahd", size=30)
    with pytest.raises(ConfigError, match="there are train 50, val 20"):
        instances.load("tsp_aco", "train", 7)


def test_the_mean_is_over_valid_instances() -> None:
    assert Evaluated((1.0, float("nan"), 3.0)).objective == 2.0
