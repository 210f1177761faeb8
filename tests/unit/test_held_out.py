"""Held-out tasks with repeats, horizons and a ceiling: the task is the unit, and what is not known is not shown."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from staged_run import Staged, stage, sync, write_facts

from hpc_es.analysis.figures import plots
from hpc_es.analysis.figures.curves import plot_learning_curve
from hpc_es.analysis.statistics import conditions, held_out
from hpc_es.analysis.statistics.episodes import lengths
from hpc_es.analysis.statistics.horizon import MAX_GROUPS, horizons, success_by_horizon
from hpc_es.analysis.statistics.intervals import wilson
from hpc_es.analysis.statistics.progress import evaluated, outcome
from hpc_es.analysis.statistics.summary import render, summary
from hpc_es.envs.base import TaskFacts
from hpc_es.errors import NothingToShow
from hpc_es.store import Run, read

NUM_TASKS = 12


def staged(root: Path, **options: Any) -> Run:
    """Version 0 solves 2 of 12 tasks and version 4 solves 6; every repeat one more."""
    options = {"composition": sync(4), "num_updates": 4, "success": {0: 2, 4: 6}, "num_tasks": NUM_TASKS, **options}
    return stage(root, Staged(**options))


def with_facts(run: Run, facts: list[TaskFacts]) -> Run:
    assert run.folder is not None
    write_facts(run.folder, facts)
    return run


# --- repeats -----------------------------------------------------------------------------------------------------


def test_repeats_are_numbered_in_the_order_of_the_plan(tmp_path: Path) -> None:
    played = held_out.episodes(staged(tmp_path, repeats=3), 4)
    assert played["task"].tolist() == [*range(NUM_TASKS)] * 3
    assert played["repeat"].tolist() == [0] * NUM_TASKS + [1] * NUM_TASKS + [2] * NUM_TASKS
    expected = [[task < 6 + repeat for repeat in range(3)] for task in range(NUM_TASKS)]
    assert held_out.by_repeat(played, "success").tolist() == expected
    assert held_out.by_task(played)["success"].tolist() == pytest.approx(np.mean(expected, axis=1).tolist())


def test_an_evaluation_with_repeats_counts_tasks_and_its_errors_are_over_tasks(tmp_path: Path) -> None:
    run = staged(tmp_path, repeats=3)
    shares = np.array([1.0] * 6 + [2 / 3, 1 / 3] + [0.0] * 4)
    assert evaluated(run)["num_tasks"].tolist() == [NUM_TASKS] * 2
    assert evaluated(run)["success_rate"].tolist() == pytest.approx([3 / 12, 7 / 12])
    assert evaluated(run)["standard_error"].iloc[-1] == pytest.approx(shares.std(ddof=1) / math.sqrt(NUM_TASKS))
    found = outcome(run)
    assert (found.num_tasks, found.final) == (NUM_TASKS, pytest.approx(7 / 12))
    assert found.standard_error == pytest.approx(shares.std() / math.sqrt(NUM_TASKS))
    assert found.standard_error < math.sqrt(7 / 12 * 5 / 12 / NUM_TASKS)
    difference = summary(run).difference
    assert difference is not None
    assert (difference.num_tasks, difference.mean) == (NUM_TASKS, pytest.approx(4 / 12))


def test_bars_of_a_curve_are_those_errors(tmp_path: Path) -> None:
    run = staged(tmp_path, repeats=3)
    bars = plot_learning_curve(run).axes[1].collections[0].get_segments()
    errors = held_out.success_errors(run)
    assert [float(top - bottom) / 2 for (_, bottom), (_, top) in bars] == pytest.approx(errors.tolist())


# --- the ceiling -------------------------------------------------------------------------------------------------


def test_a_ceiling_is_shown_beside_every_success_rate(tmp_path: Path) -> None:
    run = staged(tmp_path)
    text = "11 of 12 held-out tasks can be solved at all"
    assert held_out.ceiling(run) is None
    assert "can be solved at all" not in shown(run)
    assert "success 50.0% (25.4% to 74.6%)" in shown(run)
    with_facts(run, [TaskFacts(str(task), reachable=task != 11) for task in range(NUM_TASKS)])
    assert str(held_out.ceiling(run)) == text
    assert text in shown(run)
    assert "Of these tasks 91.7 % can be solved at all." in conditions.markdown(conditions.table(run))
    right = plot_learning_curve(run).axes[1]
    assert "the ceiling, 91.7%" in right.get_ylabel()
    assert [11 / 12, 11 / 12] in [list(line.get_ydata()) for line in right.lines]
    assert "ceiling" not in plot_learning_curve(run, measure="fitness").axes[1].get_ylabel()
    assert "can be solved at all" not in conditions.markdown(conditions.table(run, "fitness"), "fitness")


def test_where_all_can_be_solved_or_nothing_is_known_there_is_no_ceiling(tmp_path: Path) -> None:
    run = with_facts(staged(tmp_path), [TaskFacts(str(task), reachable=task < 9) for task in range(10)])
    assert held_out.ceiling(run, range(9)) is None
    assert held_out.ceiling(run, range(NUM_TASKS)) is None
    some = held_out.ceiling(run, [0, 9])
    assert some == held_out.Ceiling(1, 2)
    alone = tmp_path / "copied.h5"
    alone.write_bytes((tmp_path / "run.h5").read_bytes())
    assert held_out.ceiling(read(alone)) is None


def shown(run: Run) -> str:
    from rich.console import Console

    console = Console(width=160)
    with console.capture() as capture:
        console.print(render(summary(run)))
    return capture.get()


# --- horizons ----------------------------------------------------------------------------------------------------


def test_success_by_horizon_has_wilsons_intervals(tmp_path: Path) -> None:
    facts = [TaskFacts(str(task), horizon=5 if task < 4 else 10 if task < 10 else None) for task in range(NUM_TASKS)]
    run = with_facts(staged(tmp_path), facts)
    table = success_by_horizon(run, 4)
    assert table[["first", "last", "num_tasks"]].to_numpy().tolist() == [[5, 5, 4], [10, 10, 6]]
    assert table["success"].tolist() == pytest.approx([1, 2 / 6])
    assert tuple(table.loc[1, ["low", "high"]]) == pytest.approx(wilson(2, 6))
    assert horizons(run)["version"].tolist() == [0, 0, 4, 4]
    first, last = plots.plot_horizon(run).axes
    assert [float(y) for y in first.lines[0].get_ydata()] == pytest.approx([2 / 4, 0])
    assert [float(y) for y in last.lines[0].get_ydata()] == pytest.approx([1, 2 / 6])
    with pytest.raises(NothingToShow, match="version 3 was not evaluated, only 0, 4"):
        success_by_horizon(run, 3)


def test_many_horizons_are_put_together(tmp_path: Path) -> None:
    run = staged(tmp_path, num_tasks=40)
    with_facts(run, [TaskFacts(str(task), horizon=task + 1) for task in range(40)])
    table = success_by_horizon(run, 4)
    assert table["num_tasks"].tolist() == [40 / MAX_GROUPS] * MAX_GROUPS
    assert (table["first"].iloc[0], table["last"].iloc[0], table["horizon"].iloc[0]) == (1, 5, 3)


def test_of_older_runs_only_sudokus_with_an_option_tell_their_horizon(tmp_path: Path) -> None:
    run = staged(tmp_path)
    with pytest.raises(NothingToShow, match=r"the folder of this run has no tasks\.json"):
        plots.plot_horizon(run)
    run.attrs["config"] = run.attrs["config"].replace(
        '{"env": "sudoku"}', '{"env": "sudoku", "options": {"blanks": 7}}'
    )
    assert horizons(run)[["horizon", "num_tasks"]].to_numpy().tolist() == [[7, NUM_TASKS]] * 2
    with_facts(run, [TaskFacts(str(task)) for task in range(NUM_TASKS)])
    with pytest.raises(NothingToShow, match="the task does not know its horizon"):
        plots.plot_horizon(run)
    with pytest.raises(NothingToShow, match="no policy has been evaluated"):
        plots.plot_horizon(staged(tmp_path / "other", success={}))


# --- lengths -----------------------------------------------------------------------------------------------------


def test_lengths_are_those_of_each_cohort_with_and_without_success(tmp_path: Path) -> None:
    run = staged(tmp_path, fitness=lambda version, noise: 0.5 + noise)
    table = lengths(run).set_index(["update", "success"])
    consumed = run.evaluations[(run.evaluations["kind"] == "train") & (run.evaluations["consumed_version"] == 1)]
    won = consumed[consumed["fitness"] > 0.5]
    assert 0 < len(won) < len(consumed) == 4
    assert table.loc[(2, True), "num_episodes"] == 2 * len(won)  # each member plays two tasks
    assert table.loc[(2, True), "turns_mean"] == pytest.approx(float(won["turns"].mean()) / 2)
    lost = consumed[consumed["fitness"] <= 0.5]
    assert table.loc[(2, False), "tokens_out_high"] == pytest.approx(
        np.quantile(np.repeat(lost["tokens_out"].to_numpy(float) / 2, 2), 0.9)
    )
    turns = plots.plot_lengths(run).axes[0]
    assert [line.get_label() for line in turns.lines] == ["succeeded", "did not succeed"]
    assert len(turns.collections) == 2
