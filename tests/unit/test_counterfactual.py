"""Counterfactual replay: the same results under other settings, as directions of the update."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import small_checkpoint
from builders import Counted, built_commit, counted
from staged_run import Staged, stage
from typer.testing import CliRunner

from hpc_es.cli import app
from hpc_es.config import save
from hpc_es.config.load import from_record
from hpc_es.errors import ConfigError, VerifyError
from hpc_es.methods.es.shaping import centred_ranks, zscore
from hpc_es.noise import noise
from hpc_es.paths import RunPaths
from hpc_es.recorded.counterfactual import Drop, Range, cosine, counterfactual, direction, exact_cosine, norm_ratio
from hpc_es.records import Commit, Episode, EvalId, Member, Result
from hpc_es.store.journal import read_journal
from hpc_es.store.records import Committed, Started


def make_run(root: Path, staged: Staged) -> Path:
    stage(root, staged)
    started = next(read_journal(root))
    assert isinstance(started, Started)
    save(from_record(started.config_json), RunPaths(root).config)
    return root


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Six updates of eight members; from update 3 on, two of each cohort have lag 2."""
    staged = Staged(
        staleness={"mode": "controlled", "lag": 2, "share": 0.25},
        composition=lambda update: {0: 6, 2: 2} if update > 2 else {0: 8},
        population=8,
        num_updates=6,
    )
    return make_run(tmp_path / "run", staged)


def member(seed: int, coefficient: float, *, sign: int = 1, subspace: int = 0, partition: int = 0) -> Counted:
    return Counted(EvalId(0, seed), seed, sign, 1e-3, subspace, 0.0, 0.0, coefficient, partition)


def commit_of(*members: Counted, num_subspaces: int = 1) -> Commit:
    return built_commit(1, 5e-4, members, num_subspaces=num_subspaces)


def test_other_shaping_turns_each_update_by_the_angle_of_its_utilities(run: Path) -> None:
    found = counterfactual(run, ["es.shaping=centred_ranks"])
    assert found.changes == ('es.shaping: "zscore" -> "centred_ranks"',)
    commits = [record.commit for record in read_journal(run) if isinstance(record, Committed)]
    assert [line.update for line in found.lines] == [1, 2, 3, 4, 5, 6]
    for line, commit in zip(found.lines, commits, strict=True):
        fitness = [m.fitness for m in counted(commit)]
        a, b = np.array(zscore(fitness)), np.array(centred_ranks(fitness))
        assert line.cosine == pytest.approx(a @ b / np.sqrt((a @ a) * (b @ b)), abs=1e-6)
        assert line.norm_ratio == pytest.approx(np.sqrt((b @ b) / (a @ a)), rel=1e-6)
        assert (line.num_kept, line.num_members) == (8, 8)
    assert found.mean("cosine") == pytest.approx(np.mean([line.cosine for line in found.lines]))
    lowest = found.lowest()
    assert lowest is not None
    assert lowest.cosine == min(line.cosine for line in found.lines if line.cosine is not None)
    assert found.whole_cosine is not None
    assert lowest.cosine < found.whole_cosine < 1


def test_a_change_of_scale_changes_norms_alone(run: Path) -> None:
    found = counterfactual(run, ["es.alpha=2.5e-4"])
    assert all(line.cosine == pytest.approx(1.0) for line in found.lines)
    assert all(line.norm_ratio == pytest.approx(0.5) for line in found.lines)
    assert (found.whole_cosine, found.whole_norm_ratio) == (pytest.approx(1.0), pytest.approx(0.5))


def test_weights_by_lag_shorten_the_noise_of_stale_members(run: Path) -> None:
    found = counterfactual(run, ["es.lag_weight.kind=exponential", "es.lag_weight.rate=0.5"])
    commits = [record.commit for record in read_journal(run) if isinstance(record, Committed)]
    for line, commit in zip(found.lines, commits, strict=True):
        a = np.array([m.coefficient for m in counted(commit)])
        b = a * np.exp([-0.5 * (commit.version - 1 - m.eval_id.version) for m in counted(commit)])
        assert line.cosine == pytest.approx(a @ b / np.sqrt((a @ a) * (b @ b)), abs=1e-6)
        assert line.norm_ratio == pytest.approx(np.sqrt((b @ b) / (a @ a)), rel=1e-6)
    assert found.lines[0].norm_ratio == pytest.approx(1.0)
    assert found.lines[-1].norm_ratio is not None
    assert found.lines[-1].norm_ratio < 0.99


def test_a_baseline_by_batch_changes_mixed_cohorts_alone(run: Path) -> None:
    found = counterfactual(run, ["es.baseline=batch"])
    cosines = [line.cosine for line in found.lines]
    assert cosines[:2] == [pytest.approx(1.0, abs=1e-6)] * 2
    assert all(value is not None and value < 0.999 for value in cosines[2:])
    with pytest.raises(VerifyError, match="needs the fitness of the centre at versions"):
        counterfactual(run, ["es.baseline=centre"])


def test_meaningless_fitness_makes_another_direction(run: Path) -> None:
    found = counterfactual(run, ["es.control=random-walk"])
    assert found.whole_cosine is not None
    assert abs(found.whole_cosine) < 0.5
    assert found.whole_norm_ratio == pytest.approx(1.0, abs=0.05)


def test_without_stale_members_fresh_cohorts_stay_as_they_were(run: Path) -> None:
    found = counterfactual(run, drop=Drop.parse("stale"))
    assert [line.num_kept for line in found.lines] == [8, 8, 6, 6, 6, 6]
    assert [line.cosine for line in found.lines[:2]] == [pytest.approx(1.0)] * 2
    assert all(line.cosine is not None and line.cosine < 0.999 for line in found.lines[2:])
    assert [line.num_kept for line in counterfactual(run, drop=Drop.parse("stale:3")).lines] == [8] * 6


def cohort() -> list[tuple[Member, Result]]:
    """Four members; the later, the slower, and the fewer tokens."""
    made = []
    for slot in range(4):
        episode = Episode(0, 0.0, False, 1, 0, 100 - slot, 5, 0.0, 0.0, "terminated")
        made.append(
            (Member(slot, 1, 1e-3), Result(EvalId(slot, slot), 0.1 * slot, (episode,), 0, 0.0, 0.0, 1.0 + slot))
        )
    return made


@pytest.mark.parametrize(
    ("drop", "kept"),
    [
        ("slowest", [0, 1, 2]),
        ("slowest:0.5", [0, 1]),
        ("longest:0.5", [2, 3]),
        ("stale", [3]),
        ("stale:2", [2, 3]),
        ("stale:4", [0, 1, 2, 3]),
    ],
)
def test_a_drop_takes_out_whom_it_names(drop: str, kept: list[int]) -> None:
    assert [result.eval_id.slot for _, result in Drop.parse(drop).kept(cohort(), 4)] == kept


def test_a_random_drop_is_the_same_every_time() -> None:
    kept = Drop.parse("random:0.5").kept(cohort(), 4)
    assert len(kept) == 2
    assert kept == Drop.parse("random:0.5").kept(cohort(), 4)


@pytest.mark.parametrize("text", ["fastest", "stale:0", "stale:1.5", "slowest:1", "slowest:x", "random:", "longest:-1"])
def test_a_drop_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"must be stale or stale:LAG"):
        Drop.parse(text)


def test_a_cohort_that_is_dropped_whole_makes_no_update(tmp_path: Path) -> None:
    staged = Staged(
        staleness={"mode": "controlled", "lag": 1, "share": 1.0},
        composition=lambda update: {1: 4} if update > 1 else {0: 4},
        num_updates=3,
    )
    found = counterfactual(make_run(tmp_path / "run", staged), drop=Drop.parse("stale"))
    assert [line.num_kept for line in found.lines] == [4, 0, 0]
    assert [line.cosine for line in found.lines[1:]] == [None, None]
    assert [line.norm_ratio for line in found.lines[1:]] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ([], "nothing would change"),
        (["es.shaping=zscore"], "nothing would change"),
        (["es.population=9"], "es.population cannot be changed without new rollouts"),
        (["es.sigma=1"], "es.sigma cannot be changed without new rollouts"),
        (["es.shaping=ranks"], "es.shaping"),
        (["es.lag_weight.rate=0"], "es.lag_weight.rate"),
    ],
)
def test_questions_that_the_log_cannot_answer_are_refused(run: Path, overrides: Sequence[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        counterfactual(run, overrides)


def test_halves_of_a_mirrored_pair_are_one_noise() -> None:
    """The coefficient has the sign in it: the halves (u, -v) of one seed make (u - v) * eps."""
    pair = direction(commit_of(member(1, 3.0), member(1, -1.0, sign=-1), member(2, 2.0)))
    assert pair == {(1, 0, 0): 2.0, (2, 0, 0): 2.0}
    cancelled = direction(commit_of(member(1, 3.0), member(1, -3.0, sign=-1)))
    assert cosine(cancelled, pair) is None
    assert norm_ratio(pair, cancelled) == 0.0


def test_one_seed_in_two_subspaces_is_two_noises() -> None:
    a = direction(commit_of(member(1, 1.0, subspace=0, partition=9), num_subspaces=2))
    b = direction(commit_of(member(1, 1.0, subspace=1, partition=9), num_subspaces=2))
    assert cosine(a, b) == 0.0
    assert cosine(a, a) == 1.0
    place = Range("model.embed.weight", 0, 4096)
    assert exact_cosine(a, b, 2, [place]) == 0.0
    assert exact_cosine(a, a, 2, [place]) == pytest.approx(1.0)


def test_the_noise_itself_agrees_with_the_coefficients() -> None:
    rng = np.random.default_rng(0)
    place = Range("model.embed.weight", 800, 40_000)
    for num_subspaces in (1, 4):
        a, b = (
            direction(
                commit_of(
                    *(member(seed, c, subspace=seed % num_subspaces, partition=5) for seed, c in enumerate(values)),
                    num_subspaces=num_subspaces,
                )
            )
            for values in rng.normal(0, 1, (2, 8))
        )
        expected, exact = cosine(a, b), exact_cosine(a, b, num_subspaces, [place])
        assert exact == pytest.approx(expected, abs=0.02)
        assert exact != expected
    one = direction(commit_of(member(3, 2.0), member(4, 1.0)))
    other = direction(commit_of(member(3, 1.0)))
    x = 2.0 * noise(3, *place[:3]).astype(float) + noise(4, *place[:3])
    y = noise(3, *place[:3]).astype(float)
    assert exact_cosine(one, other, 1, [place]) == pytest.approx(x @ y / np.sqrt((x @ x) * (y @ y)))


def test_exact_cosines_come_from_the_trained_tensors_of_the_base_model(tmp_path: Path) -> None:
    model = small_checkpoint.make(tmp_path / "model")
    run = make_run(tmp_path / "run", Staged(composition=lambda update: {0: 4}, num_updates=3, model=str(model)))
    found = counterfactual(run, ["es.shaping=centred_ranks"], sample=4000)
    for line in found.lines:
        assert line.exact_cosine == pytest.approx(line.cosine, abs=0.05)
    assert found.lines == counterfactual(run, ["es.shaping=centred_ranks"], sample=4000).lines
    assert json.dumps([line.exact_cosine for line in found.lines], allow_nan=False)


def test_the_command_writes_its_table_where_there_is_a_folder_and_shows_the_ends_of_a_long_one(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Staged(num_updates=40))
    command = ["counterfactual", str(run), "--shaping", "centred_ranks"]
    wrong = CliRunner().invoke(app, [*command, "--csv", str(tmp_path / "none" / "x.csv")])
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert not (tmp_path / "none").exists()
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert len((run / "report" / "counterfactual.csv").read_text().splitlines()) == 41
    rows = [line.split()[0] for line in done.stdout.splitlines() if line.split()[0].isdigit()]
    assert rows[:4] + rows[-4:] == ["1", "2", "3", "4", "37", "38", "39", "40"]
    assert len(rows) <= 9, "the ends and the lowest cosine"
    whole = CliRunner().invoke(app, [*command, "--all"]).stdout
    assert sum(line.split()[0].isdigit() for line in whole.splitlines()) == 40
