"""No bit changes by accident: every staleness schedule with every method setting keeps its recorded digests."""

import json
from pathlib import Path

import pytest
from digest_runs import LIST, METHODS, SCHEDULES, digests_of_schedule, make_model

RECORDED: dict[str, dict[str, str]] = json.loads(LIST.read_text())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("digests"))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_runs_have_the_recorded_digests(schedule: str, model: Path) -> None:
    found = digests_of_schedule(schedule, model)
    changed = [name for name in found if found[name] != RECORDED[name]]
    assert not changed, f"bits have changed, first in {changed[0]}: {found[changed[0]]}, not {RECORDED[changed[0]]}"


def test_the_list_is_complete() -> None:
    assert list(RECORDED) == [f"{schedule}, {method}" for schedule in SCHEDULES for method in METHODS]


@pytest.mark.parametrize(
    ("schedule", "lags"),
    [
        ("sync", "0"),
        ("lag1-50", "0 1"),
        ("lag4-50", "0 4"),
        ("lag4-100", "0 4"),
        ("lag8-25", "0 8"),
        ("tail", "0 1 3"),
        ("staircase", "0 1 2"),
        ("staircase-isolated", "0 1 2"),
        ("natural-discard", "0 1"),
        ("natural-hold", "0 1 2"),
    ],
)
def test_the_recorded_runs_consume_results_of_every_lag_of_their_schedule(schedule: str, lags: str) -> None:
    assert RECORDED[f"{schedule}, plain"]["lags"] == lags


def test_results_that_come_too_late_are_discarded_in_the_recorded_runs() -> None:
    assert {RECORDED[f"natural-discard, {method}"]["discarded"] for method in METHODS} == {"2"}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("method", ["null updates", "null updates, adam", "linear sigma, cosine alpha to 0"])
def test_null_updates_are_among_the_recorded_runs_and_leave_theta_as_it_was(schedule: str, method: str) -> None:
    run = RECORDED[f"{schedule}, {method}"]
    theta, null = run["theta"].split(), list(map(int, run["null"].split()))
    assert null
    assert [v for v in range(1, len(theta)) if theta[v] == theta[v - 1]] == null
