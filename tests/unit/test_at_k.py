"""pass@k, mean@k and max@k against all choices of k repeats, one by one."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import built_assignment
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from staged_run import Staged, stage, sync, write_facts

from hpc_es.analysis.figures.at_k import plot_at_k
from hpc_es.analysis.statistics.at_k import at_k, curve, max_at_k, mean_at_k, pass_at_k
from hpc_es.analysis.statistics.intervals import bootstrap_mean
from hpc_es.envs.base import TaskFacts
from hpc_es.errors import ConfigError, NothingToShow
from hpc_es.paths import RunPaths
from hpc_es.records import Episode, EvalId, Result
from hpc_es.store import Run, read
from hpc_es.store.journal import read_journal
from hpc_es.store.later import EvalJournal
from hpc_es.store.records import Planned, Reported, Started

REWARDS = st.tuples(st.integers(1, 4), st.integers(1, 7)).flatmap(
    lambda shape: st.lists(
        st.lists(st.sampled_from([-1.5, 0.0, 0.25, 1.0]), min_size=shape[1], max_size=shape[1]),
        min_size=shape[0],
        max_size=shape[0],
    )
)
"""[tasks, repeats]."""


@given(REWARDS, st.data())
@settings(max_examples=60, deadline=None)
def test_estimates_are_the_mean_over_all_choices_of_k_repeats(rewards: list[list[float]], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(rewards[0])))
    chosen = np.array([list(itertools.combinations(row, k)) for row in rewards])  # [tasks, choices, k]
    assert max_at_k(rewards, k).mean == pytest.approx(chosen.max(axis=2).mean())
    assert mean_at_k(rewards, k).mean == pytest.approx(chosen.mean())
    solved = np.array(rewards) == 1.0
    assert pass_at_k(solved, k).mean == pytest.approx((chosen == 1.0).any(axis=2).mean())


@given(st.integers(1, 40), st.data())
@settings(max_examples=40, deadline=None)
def test_pass_at_k_is_the_formula_of_chen_et_al(num_repeats: int, data: st.DataObject) -> None:
    solved, k = data.draw(st.integers(0, num_repeats)), data.draw(st.integers(1, num_repeats))
    row = [True] * solved + [False] * (num_repeats - solved)
    expected = 1 - math.comb(num_repeats - solved, k) / math.comb(num_repeats, k)
    assert pass_at_k([row], k).mean == pytest.approx(expected, abs=1e-12)


def test_estimates_have_no_bias() -> None:
    """Estimates from 8 repeats how often 4 fresh attempts succeed; the plug-in 1 - (1 - c/n)^k is too low."""
    rng = np.random.default_rng(0)
    rates = rng.uniform(0, 0.4, 4_000)
    solved = rng.uniform(size=(4_000, 8)) < rates[:, None]
    truth = (1 - (1 - rates) ** 4).mean()
    assert pass_at_k(solved, 4).mean == pytest.approx(truth, abs=0.01)
    assert (1 - (1 - solved.mean(axis=1)) ** 4).mean() < truth - 0.02


def test_the_interval_is_over_tasks() -> None:
    rng = np.random.default_rng(1)
    solved = rng.uniform(size=(30, 8)) < rng.uniform(size=(30, 1))
    by_hand = [1 - math.comb(8 - c, 4) / math.comb(8, 4) for c in solved.sum(axis=1).tolist()]
    found = pass_at_k(solved, 4)
    assert found.interval == pytest.approx(bootstrap_mean(by_hand))
    assert found.interval.low < found.mean < found.interval.high
    assert mean_at_k(solved, 4).interval == bootstrap_mean(solved)


def test_a_curve_goes_as_far_as_there_are_repeats_and_climbs() -> None:
    rng = np.random.default_rng(2)
    rewards = rng.uniform(size=(10, 12))
    points = curve(max_at_k, rewards)
    assert [point.k for point in points] == [1, 2, 4, 8]
    assert all(one.mean < other.mean for one, other in itertools.pairwise(points))
    assert points[0].mean == pytest.approx(rewards.mean())
    assert len({point.mean for point in curve(mean_at_k, rewards)}) == 1
    assert [point.k for point in curve(pass_at_k, np.ones((3, 32)))] == [1, 2, 4, 8, 16, 32]


def test_too_few_repeats_are_named_with_how_many_are_needed() -> None:
    for estimator in (pass_at_k, mean_at_k, max_at_k):
        with pytest.raises(ConfigError, match="k=8 attempts need at least 8 repeats of every task, but there are 4"):
            estimator(np.ones((3, 4)), 8)
        with pytest.raises(ConfigError, match="k=0 must be at least 1"):
            estimator(np.ones((3, 4)), 0)
        with pytest.raises(ConfigError, match=r"must be \[tasks, repeats\]"):
            estimator(np.ones(3), 1)


# --- of runs -----------------------------------------------------------------------------------------------------


def staged(root: Path, repeats: int) -> Run:
    """Version 0 solves 2 of 12 tasks in its first repeat, version 4 solves 4; every repeat one more."""
    success = {0: 2, 2: 3, 4: 4}
    return stage(root, Staged(composition=sync(4), num_updates=4, success=success, num_tasks=12, repeats=repeats))


def test_of_a_run_the_first_and_the_last_version_are_estimated(tmp_path: Path) -> None:
    run = staged(tmp_path, repeats=4)
    table = at_k(run)
    assert table["version"].unique().tolist() == [0, 4]
    assert set(table["num_tasks"]) == {12}
    assert set(table["num_repeats"]) == {4}
    last = table[(table["version"] == 4) & (table["of"] == "success")]
    solved = np.array([[task < 4 + repeat for repeat in range(4)] for task in range(12)])
    assert last[last["name"] == "pass@k"]["mean"].tolist() == pytest.approx(
        [pass_at_k(solved, k).mean for k in (1, 2, 4)]
    )
    assert last[last["name"] == "pass@k"]["mean"].iloc[-1] == pytest.approx(7 / 12)
    assert set(last[last["name"] == "mean@k"]["mean"]) == {solved.mean()}
    assert at_k(run, 2)["version"].unique().tolist() == [2]
    success, reward = plot_at_k(run).axes
    styles = [(line.get_linestyle(), float(line.get_ydata()[-1])) for line in success.lines]
    expected = [("--", 5 / 12), (":", 3.5 / 12), ("-", 7 / 12), (":", 5.5 / 12)]
    assert styles == [(style, pytest.approx(height)) for style, height in expected]
    assert len(reward.lines) == 4
    assert success.get_ylabel() == "success on held-out tasks"
    write_facts(tmp_path, [TaskFacts(str(task), reachable=task > 2) for task in range(12)])
    assert plot_at_k(run).axes[0].get_ylabel() == "success on held-out tasks (at most 75.0%)"
    assert len(plot_at_k(run, version=2).axes[0].lines) == 2


def test_evaluations_of_other_tasks_change_nothing_where_the_run_has_repeats_of_its_own(tmp_path: Path) -> None:
    run = staged(tmp_path, repeats=2)
    before = at_k(run)
    config = json.loads(run.attrs["config"])
    config["task"]["options"] = {"blanks": 40}
    play_later(tmp_path, "other", config, versions=(0, 3, 4), repeats=8)
    run = read(tmp_path)
    assert at_k(run).equals(before)
    assert set(at_k(run, 3)["source"]) == {"other"}


def test_without_repeats_of_its_own_one_other_protocol_is_shown(tmp_path: Path) -> None:
    config = json.loads(staged(tmp_path, repeats=1).attrs["config"])
    for name, blanks, versions, repeats in (("easy", 1, (0, 4), 2), ("hard", 9, (0, 2), 4)):
        config["task"]["options"] = {"blanks": blanks}
        play_later(tmp_path, name, config, versions, repeats)
    table = at_k(read(tmp_path))
    assert set(zip(table["source"], table["version"], strict=True)) == {("easy", 0), ("easy", 4)}


def test_the_ceiling_is_that_of_the_tasks_that_were_played(tmp_path: Path) -> None:
    run = staged(tmp_path, repeats=2)
    write_facts(tmp_path, [TaskFacts(str(task), reachable=task < 12) for task in range(24)])
    assert "at most" not in plot_at_k(run).axes[0].get_ylabel()


def play_later(root: Path, name: str, config: dict[str, Any], versions: tuple[int, ...], repeats: int) -> None:
    """evals/NAME.hpcj: 12 tasks, of which the first half succeeds."""
    first = next(iter(read_journal(root)))
    assert isinstance(first, Started)
    started = replace(first, config_json=json.dumps(config))
    episode = Episode(0, 1.0, True, 1, 0, 1, 1, 0.1, 0.1, "terminated")
    later = EvalJournal.open(RunPaths(root), name, started)
    for version in versions:
        plan = tuple(
            built_assignment(EvalId(version, repeat), 0, "eval", None, tuple(range(12)), repeat)
            for repeat in range(repeats)
        )
        later.append(Planned(1.0, version, plan))
        for batch in plan:
            played = tuple(
                replace(episode, task=task, success=task < 6, reward=float(task < 6)) for task in batch.tasks
            )
            later.append(Reported(1.0, "later", Result(batch.eval_id, 0.5, played, 5, 0.0, 0.0, 0.5), 0.0, 1.0, 1))
    later.close()


def test_without_repeats_the_figure_says_so(tmp_path: Path) -> None:
    with pytest.raises(NothingToShow, match="has played its held-out tasks more than once"):
        plot_at_k(staged(tmp_path / "once", repeats=1))
    with pytest.raises(NothingToShow, match="version 3 has not played its held-out tasks more than once, only 0, 2, 4"):
        at_k(staged(tmp_path / "often", repeats=2), 3)
