"""The paired verdict on two runs: the same tasks or none, and no claim beyond what the tasks show."""

import json
from dataclasses import replace as replace_field
from pathlib import Path

import numpy as np
import pytest
from builders import built_assignment
from fake_run import started, write_later
from msgspec.structs import replace
from staged_run import Staged, stage, write_facts
from typer.testing import CliRunner

from hpc_es.analysis.statistics.compare import Policy, compare, outcomes_by_task, parse_side, policy
from hpc_es.cli import app
from hpc_es.envs.base import TaskFacts
from hpc_es.errors import ConfigError
from hpc_es.records import Episode, EvalId, Result
from hpc_es.store.read import Run, read
from hpc_es.store.records import Planned, Reported

NUM_TASKS = 40


def make(root: Path, solved: int, *, seed: int = 0, num_tasks: int = NUM_TASKS, **es: object) -> Run:
    """A run of 8 synchronous updates that solves so many of its held-out tasks in the end."""
    staged = Staged(
        composition=lambda update: {0: 4}, success={0: 4, 4: 8, 8: solved}, num_tasks=num_tasks, seed=seed, es=dict(es)
    )
    return stage(root, staged)


def sides(tmp_path: Path, a: int, b: int) -> tuple[list[Policy], list[Policy]]:
    return [policy(make(tmp_path / "a", a))], [policy(make(tmp_path / "b", b))]


def test_a_clear_difference_has_a_verdict_either_way(tmp_path: Path) -> None:
    a, b = sides(tmp_path, 30, 10)
    found = compare(a, b)
    assert found.verdict == found.success.verdict == "A better"
    assert compare(b, a).verdict == "B better"
    assert found.success.difference == pytest.approx(0.5)
    assert (found.success.mean_a, found.success.mean_b) == (0.75, 0.25)
    assert (found.label_a, found.label_b) == ("a@8", "b@8")
    assert compare(b, a).success.low == pytest.approx(-found.success.high, abs=0.03)


def test_a_small_difference_is_not_claimed_and_its_size_is_priced(tmp_path: Path) -> None:
    found = compare(*sides(tmp_path, 12, 10)).success
    assert found.verdict.startswith("no difference shown; it would take about ")
    spread = np.std([1.0] * 2 + [0.0] * (NUM_TASKS - 2), ddof=1)
    assert found.tasks_needed == int(np.ceil((2.8 * spread / 0.05) ** 2))
    assert found.detectable == pytest.approx(2.8 * spread / np.sqrt(NUM_TASKS))
    assert found.tasks_needed > NUM_TASKS


def test_equal_runs_show_no_difference(tmp_path: Path) -> None:
    found = compare(*sides(tmp_path, 10, 10))
    assert (found.verdict, found.reward.p_value, found.reward.tasks_needed) == ("no difference", 1.0, None)
    assert (found.reward.low, found.reward.high) == (0.0, 0.0)


def test_several_runs_are_paired_by_seed(tmp_path: Path) -> None:
    a = [policy(make(tmp_path / f"a{seed}", 20 + seed, seed=seed)) for seed in (1, 2)]
    b = [policy(make(tmp_path / f"b{seed}", 5 * seed, seed=seed)) for seed in (2, 1)]
    found = compare(a, b)
    assert found.success.num_seeds == 2
    assert found.success.by_seed == (pytest.approx((21 - 5) / 40), pytest.approx((22 - 10) / 40))
    with pytest.raises(ConfigError, match=r"A has the run.seeds \[1, 2\], B has \[1, 3\]"):
        compare(a, [b[1], policy(make(tmp_path / "b3", 10, seed=3))])
    with pytest.raises(ConfigError, match=r"the runs of A have the run.seeds \[1, 1\]"):
        compare([a[0], a[0]], b)


def test_two_versions_of_one_run_are_compared(tmp_path: Path) -> None:
    run = make(tmp_path / "a", 30)
    found = compare([policy(run, 8)], [policy(run, 4)])
    assert found.differences == ("version: 8 -> 4",)
    assert found.success.difference == pytest.approx(22 / 40)
    assert (found.costs_a.updates, found.costs_b.updates) == (8, 4)
    assert (found.costs_a.evaluations, found.costs_b.evaluations) == (32, 16)
    assert found.costs_a.tokens > found.costs_b.tokens > 0
    assert found.costs_a.wall_clock_s > found.costs_b.wall_clock_s > 0
    assert found.costs_a.worker_seconds > found.costs_b.worker_seconds > 0
    assert (compare([policy(run, 4)], [policy(run, 0)]).costs_b.evaluations) == 0


def test_settings_that_differ_are_named(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a", 30), make(tmp_path / "b", 30, shaping="centred_ranks")
    assert compare([policy(a)], [policy(b)]).differences == ('es.shaping: "zscore" -> "centred_ranks"',)


def test_other_tasks_are_refused_with_the_differences(tmp_path: Path) -> None:
    a, b = sides(tmp_path, 30, 10)
    few = policy(make(tmp_path / "few", 10, num_tasks=24))
    with pytest.raises(ConfigError, match="a@8 on 40 tasks, few@8 on 24 tasks; --num-tasks 24 compares the first"):
        compare(a, [few])
    assert compare(a, [few], num_tasks=24).reward.num_tasks == 24
    with pytest.raises(ConfigError, match="--num-tasks 25 is more than the number of tasks played"):
        compare(a, [few], num_tasks=25)
    config = a[0].run.config
    for section, key, value, complaint in (
        ("task", "env", "webshop", "env: webshop and sudoku"),
        ("task", "options", {"size": 4}, "size: 4 and \\(not given\\)"),
        ("eval", "options", {"split": "train"}, "split: train and \\(not given\\)"),
    ):
        other = {**config, section: {**config.get(section, {}), key: value}}
        changed = make_like(a[0], other)
        with pytest.raises(ConfigError, match=complaint):
            compare([changed], b)


def test_the_same_options_on_other_data_are_other_tasks(tmp_path: Path) -> None:
    a, b = sides(tmp_path, 30, 10)
    write_facts(tmp_path / "a", [TaskFacts(f"goal {task}") for task in range(NUM_TASKS)])
    compare(a, b)  # nothing is known of b's
    write_facts(tmp_path / "b", [TaskFacts(f"goal {task if task < 5 else task + 1}") for task in range(NUM_TASKS)])
    with pytest.raises(ConfigError, match="were evaluated on different tasks \\(task 5: goal 5 and goal 6\\)"):
        compare(a, b)


def make_like(other: Policy, config: dict[str, object]) -> Policy:
    """The same policy of a run with another configuration."""

    class Changed:
        attrs = other.run.attrs
        folder = None

        def __init__(self) -> None:
            self.config = config

    return Policy(Changed(), other.version, other.seed, other.outcomes)  # type: ignore[arg-type]


def test_a_version_that_was_not_evaluated_is_named(tmp_path: Path) -> None:
    run = make(tmp_path / "a", 30)
    with pytest.raises(ConfigError, match="a was not evaluated at version 5, only at 0, 4, 8"):
        policy(run, 5)
    assert policy(run).version == 8


def test_a_later_evaluation_counts_where_the_run_made_none_or_a_smaller_one(tmp_path: Path) -> None:
    run = make(tmp_path / "a", 30)
    for version, count in ((5, 12), (8, 12), (4, 60)):
        eval_id, tasks = EvalId(version, 0, 0, "eval"), tuple(range(count))
        episodes = tuple(Episode(task, 0.125, False, 1, 0, 1, 1, 0.0, 0.0, "terminated") for task in tasks)
        plan = Planned(0.0, version, (built_assignment(eval_id, 0, "eval", None, tasks, 1),))
        report = Reported(1.0, "later", Result(eval_id, 0.125, episodes, 5, 0.0, 0.0, 0.0), 0.0, 1.0, 1)
        first = replace(started(1, 0), base_digest=7, config_json=json.dumps(run.config))
        write_later(tmp_path / "a", f"later{version}", [first, plan, report])
    run = read(tmp_path / "a")
    assert len(outcomes_by_task(run, 5)) == 12
    assert len(outcomes_by_task(run, 8)) == NUM_TASKS
    assert len(outcomes_by_task(run, 4)) == 60
    assert set(outcomes_by_task(run, 4)["reward"]) == {0.125}


def test_an_evaluation_with_other_decoding_does_not_stand_in_for_one_of_the_run(tmp_path: Path) -> None:
    run = make(tmp_path / "a", 30)
    eval_id, tasks = EvalId(6, 0, 0, "eval"), tuple(range(60))
    episodes = tuple(Episode(task, 0.125, False, 1, 0, 1, 1, 0.0, 0.0, "terminated") for task in tasks)
    plan = Planned(0.0, 6, (built_assignment(eval_id, 0, "eval", None, tasks, 1),))
    report = Reported(1.0, "later", Result(eval_id, 0.125, episodes, 5, 0.0, 0.0, 0.0), 0.0, 1.0, 1)
    config = json.dumps({**run.config, "sampling": {"temperature": 0.7}})
    write_later(tmp_path / "a", "warm", [replace(started(1, 0), base_digest=7, config_json=config), plan, report])
    with pytest.raises(ConfigError, match="a was not evaluated at version 6, only at 0, 4, 8"):
        policy(read(tmp_path / "a"), 6)


def test_repeats_of_a_task_are_averaged_before_they_are_compared(tmp_path: Path) -> None:
    """Four repeats that solve 10, 11, 12 and 13 tasks are 40 tasks, not 160."""
    staged = Staged(composition=lambda update: {0: 4}, success={0: 4, 8: 10}, num_tasks=NUM_TASKS)
    once, often = (stage(tmp_path / f"{repeats}", replace_field(staged, repeats=repeats)) for repeats in (1, 4))
    found = compare([policy(often)], [policy(once)]).success
    assert (found.num_tasks, found.mean_a, found.mean_b) == (NUM_TASKS, 11.5 / 40, 10 / 40)
    assert found.p_value == 2 / 2**3  # three tasks differ: solved in 3, 2 and 1 of 4 repeats
    assert set(outcomes_by_task(often, 8)["success"]) == {0, 0.25, 0.5, 0.75, 1}


def test_the_ceiling_stands_beside_the_verdict(tmp_path: Path) -> None:
    (a,), b = sides(tmp_path, 30, 10)
    assert compare([a], b).ceiling is None
    write_facts(tmp_path / "a", [TaskFacts(str(task), reachable=task != 3) for task in range(NUM_TASKS)])
    found = compare([a], b)
    assert found.ceiling is not None
    assert found.ceiling.share == 39 / 40
    assert compare([a], b, num_tasks=3).ceiling is None
    done = CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b")])
    assert "success can be 97.5% at most: 39 of 40 held-out tasks can be solved at all" in done.stdout


@pytest.mark.parametrize("text", ["", "a,", "a@", "a@x", "@4", "a@-1"])
def test_a_side_that_names_no_run_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be a run folder, or RUN@VERSION"):
        parse_side(text)


def test_the_command_prints_the_verdict(tmp_path: Path) -> None:
    make(tmp_path / "a", 30), make(tmp_path / "b", 10)
    assert parse_side("x/a@4,b") == [(Path("x/a"), 4), (Path("b"), None)]
    done = CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b")])
    assert done.exit_code == 0, done.output
    assert "success: A better" in done.stdout
    assert "the result may differ for another seed" in done.stdout
    assert CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "none")]).exit_code == 2
    wrong = CliRunner().invoke(app, ["compare", str(tmp_path / "a@5"), str(tmp_path / "b")])
    assert (wrong.exit_code, wrong.stdout) == (2, "")
