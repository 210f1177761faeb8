"""configs/staleness: every condition of the published study, held against its table."""

from pathlib import Path

import pytest
from repository import CONFIGS

from hpc_es import methods
from hpc_es.config import load
from hpc_es.config.schema import Config
from hpc_es.simulator.durations import parse
from hpc_es.simulator.result import SimulationResult
from hpc_es.simulator.simulate import simulate
from hpc_es.simulator.worker_count import DURATIONS, worker_count_warnings

STALENESS = CONFIGS / "staleness"
SIZES = {"16x16": (16, 16, 200), "30x32": (30, 32, 200), "30x100": (30, 100, 120)}
"""Population, tasks per member, updates."""

COHORTS: dict[str, dict[str, dict[int, int]]] = {
    "16x16": {
        "sync": {0: 16},
        "lag4-18.75": {0: 13, 4: 3},
        "lag4-50": {0: 8, 4: 8},
        "lag4-100": {4: 16},
        "lag8-18.75": {0: 13, 8: 3},
        "lag8-50": {0: 8, 8: 8},
        "lag8-100": {8: 16},
        "tail-32": {0: 8, 1: 2, 2: 1, 4: 1, 8: 3, 32: 1},
        "tail-64": {0: 8, 1: 2, 2: 1, 4: 1, 8: 2, 32: 1, 64: 1},
        "tail-128": {0: 8, 1: 2, 2: 1, 4: 1, 8: 1, 32: 1, 64: 1, 128: 1},
        "staircase": {128: 16},
    },
    "30x32": {
        "sync": {0: 30},
        "lag1-50": {0: 15, 1: 15},
        "lag1-100": {1: 30},
        "lag4-10": {0: 27, 4: 3},
        "lag4-50": {0: 15, 4: 15},
        "lag4-100": {4: 30},
        "lag8-10": {0: 27, 8: 3},
        "lag8-50": {0: 15, 8: 15},
        "lag8-100": {8: 30},
        "tail-32": {0: 15, 1: 3, 2: 2, 4: 2, 8: 6, 32: 2},
        "tail-64": {0: 15, 1: 3, 2: 2, 4: 2, 8: 4, 32: 2, 64: 2},
        "tail-128": {0: 15, 1: 3, 2: 2, 4: 2, 8: 2, 32: 2, 64: 2, 128: 2},
        "staircase": {128: 30},
    },
    "30x100": {"sync": {0: 30}, "lag4-10": {0: 27, 4: 3}, "lag8-10": {0: 27, 8: 3}},
}
"""Results by lag in the cohort of update 200 (30x100: 120); published.md and the paper's tables."""
NATURAL = [(size, "async-1") for size in SIZES]
NUM_WORKERS = 4
"""Number of workers in the published study."""


def load_preset(folder: Path, preset: str) -> Config:
    """The preset over a minimal base, as a user's file would take it."""
    base, mine = folder / "base.yaml", folder / "mine.yaml"
    base.write_text("run: {name: x, num_updates: 1}\nmodel: {path: none}\ntask: {env: lab}\n")
    mine.write_text(f"extends: [base.yaml, {STALENESS / preset}.yaml]\n")
    return load(mine).config


@pytest.mark.parametrize(("size", "name"), [(size, name) for size, names in COHORTS.items() for name in names])
def test_a_condition_has_the_published_cohort(tmp_path: Path, size: str, name: str) -> None:
    config = load_preset(tmp_path, f"{size}/{name}")
    assert (config.es.population, config.es.tasks_per_member, config.run.num_updates) == SIZES[size]
    assert methods.make(config).schedule().composition(config.run.num_updates) == COHORTS[size][name]


@pytest.mark.parametrize(("size", "name"), NATURAL)
def test_async_1_accepts_results_at_most_one_version_late(tmp_path: Path, size: str, name: str) -> None:
    config = load_preset(tmp_path, f"{size}/{name}")
    assert (config.es.population, config.es.tasks_per_member, config.run.num_updates) == SIZES[size]
    schedule = methods.make(config).schedule()
    assert (schedule.on_demand, schedule.max_lag) == (True, 1)


def played(config: Config, num_workers: int, num_updates: int | None = None) -> SimulationResult:
    """The run as the real head decides it, with evaluations as uneven as those of agents."""
    updates = {"run": config.run.model_copy(update={"num_updates": num_updates})} if num_updates else {}
    no_evaluations = {"eval": config.eval.model_copy(update={"num_tasks": 0})}
    shortened = config.model_copy(update={**updates, **no_evaluations})
    return simulate(shortened, parse(DURATIONS, population=config.es.population), num_workers=num_workers)


@pytest.mark.parametrize(("size", "name"), [(size, name) for size, names in COHORTS.items() for name in names])
def test_a_condition_plays_with_the_published_lags(tmp_path: Path, size: str, name: str) -> None:
    """Whatever the number of workers: compositions are fixed. The last cohort has every lag that is asked for."""
    config, expected = load_preset(tmp_path, f"{size}/{name}"), COHORTS[size][name]
    num_updates = config.run.num_updates if max(expected) > 30 else 2 * max(expected) + 2
    run = played(config, NUM_WORKERS, num_updates)
    compositions = [methods.make(config).schedule().composition(update) for update in range(1, num_updates + 1)]
    assert run.lags == {
        lag: count for lag in range(129) if (count := sum(cohort.get(lag, 0) for cohort in compositions))
    }
    assert run.stale[-1] == sum(count for lag, count in expected.items() if lag)
    assert run.discarded_share == 0
    assert worker_count_warnings(config, NUM_WORKERS) == []


@pytest.mark.parametrize(("size", "stale"), [("16x16", 0.1875), ("30x32", 0.1), ("30x100", 0.1)])
@pytest.mark.parametrize("launcher", ["launch", "slurm"])
def test_async_1_is_as_stale_as_published_by_itself(tmp_path: Path, size: str, stale: float, launcher: str) -> None:
    """3/16 and 3/30; in the study 114 of 120 cohorts have exactly 3 results of lag 1 (95 %)."""
    config = load_preset(tmp_path, f"{size}/async-1")
    num_workers = getattr(config, launcher).workers
    run = played(config, num_workers, 120)
    assert num_workers == NUM_WORKERS
    assert run.lag_max == 1
    assert run.lag_mean == pytest.approx(stale, rel=0.05)
    assert max(run.stale) <= 3
    assert run.stale.count(3) >= 0.9 * 120
    assert worker_count_warnings(config, num_workers) == []


@pytest.mark.parametrize("size", ["16x16", "30x32"])
def test_the_staircase_consumes_cohorts_around_theta_0_at_every_step(tmp_path: Path, size: str) -> None:
    schedule = methods.make(load_preset(tmp_path, f"{size}/staircase")).schedule()
    lags = {update: max(schedule.composition(update)) for update in range(1, 201)}
    assert [update for update in lags if update == 1 or lags[update] != lags[update - 1]] == [1, 33, 65, 129]
    assert [lags[update] for update in (1, 33, 65, 129)] == [0, 32, 64, 128]
    assert all(update - 1 - lags[update] == 0 for update in (33, 65, 129))


def test_every_preset_is_checked() -> None:
    files = {(path.parent.name, path.stem) for path in STALENESS.glob("*/*.yaml")}
    assert files == {(size, name) for size, names in COHORTS.items() for name in names} | set(NATURAL)


def test_the_random_walk_lies_over_any_condition(tmp_path: Path) -> None:
    assert load_preset(tmp_path, "random-walk").es.control == "random-walk"


@pytest.mark.parametrize("path", sorted((CONFIGS / "lab").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_laboratory_loads(path: Path) -> None:
    assert load(path).config.engine.kind == "lab"
