"""Probes on recorded runs: which members, tasks and seeds they score, and around which theta."""

import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from staged_run import Staged, stage
from typer.testing import CliRunner

from hpc_es.cli import app
from hpc_es.config import save
from hpc_es.config.load import from_record
from hpc_es.errors import ConfigError
from hpc_es.methods.base import Tasks
from hpc_es.paths import RunPaths
from hpc_es.recorded import probes
from hpc_es.recorded.probes import NoiseScores, StaleScores, logged_cost, noise_scores, stale_scores
from hpc_es.recorded.solo import Recorded
from hpc_es.records import Assignment, Member, Result
from hpc_es.store.journal import read_journal
from hpc_es.store.records import Planned, Reported, Started


class Script:
    """Stands for the engine: remembers what it played, and scores by a rule."""

    def __init__(self) -> None:
        self.played: list[tuple[int, Member | None, Assignment]] = []
        self.where: tuple[int, Member | None] = (0, None)

    @asynccontextmanager
    async def start(self, recorded: Recorded) -> AsyncIterator["Script"]:
        yield self

    async def become(self, version: int, member: Member | None) -> None:
        assert version >= self.where[0], "the engine goes forwards only"
        self.where = (version, member)

    async def play(self, assignment: Assignment) -> Result:
        self.played.append((*self.where, assignment))
        return Result(assignment.eval_id, float(len(self.played)), (), 0, 0.0, 0.0, 0.0)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()
    monkeypatch.setattr(probes, "Solo", script)
    monkeypatch.setattr(probes, "count_tasks", lambda config: Tasks(train=1000, eval=8))
    return script


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    """Six synchronous updates of five members."""
    root = tmp_path / "run"
    stage(root, Staged(composition=lambda update: {0: 5}, population=5, num_updates=6, success={}))
    started = next(read_journal(root))
    assert isinstance(started, Started)
    save(from_record(started.config_json), RunPaths(root).config)
    return Recorded.read(root)


@pytest.fixture
def sampled(recorded: Recorded) -> Recorded:
    """The same run with a temperature."""
    sampling = recorded.config.sampling.model_copy(update={"temperature": 1.0})
    return dataclasses.replace(recorded, config=recorded.config.model_copy(update={"sampling": sampling}))


def planned(recorded: Recorded, version: int) -> list[Assignment]:
    records = read_journal(recorded.paths.root)
    return [a for r in records if isinstance(r, Planned) and r.version == version for a in r.assignments]


def noise(recorded: Recorded, **options: Any) -> NoiseScores:
    return noise_scores(recorded, say=lambda text: None, **options)


def stale(recorded: Recorded, **options: Any) -> StaleScores:
    return stale_scores(recorded, say=lambda text: None, **options)


def test_a_noise_probe_plays_the_runs_own_members_and_varies_one_thing_at_a_time(
    sampled: Recorded, script: Script
) -> None:
    scores = noise(sampled, version=2, members=4, repeats=3)
    own = planned(sampled, 2)[:4]
    assert len(script.played) == 4 * 5
    for i, assignment in enumerate(own):
        plays = script.played[5 * i : 5 * i + 5]
        assert all((version, member) == (2, assignment.member) for version, member, _ in plays)
        first, *others = [play for _, _, play in plays]
        assert first == assignment
        same, fresh = others[:2], others[2:]
        assert all(play.tasks == assignment.tasks for play in same)
        assert len({first.sampling_seed, *(play.sampling_seed for play in others)}) == 5
        assert all(play.tasks != assignment.tasks and len(play.tasks) == 2 for play in fresh)
        assert scores.same[i] == (5 * i + 1.0, 5 * i + 2.0, 5 * i + 3.0)
        assert scores.fresh[i] == (5 * i + 1.0, 5 * i + 4.0, 5 * i + 5.0)
    batches = [{play.tasks for _, _, play in script.played[i::5]} for i in range(5)]
    assert [len(tasks) for tasks in batches] == [1] * 5, "all members play the same batches"
    assert scores.seeds == tuple(a.member.seed for a in own if a.member is not None)
    assert (scores.population, scores.num_tasks) == (5, 2)


def test_a_greedy_noise_probe_repeats_once_and_spends_the_rest_on_fresh_batches(
    recorded: Recorded, script: Script
) -> None:
    scores = noise(recorded, version=2, members=3, repeats=4)
    assert scores.greedy
    assert len(script.played) == 3 * 7
    for i, assignment in enumerate(planned(recorded, 2)[:3]):
        tasks = [play.tasks for _, _, play in script.played[7 * i : 7 * i + 7]]
        assert tasks[:2] == [assignment.tasks] * 2
        assert len(set(tasks[2:]) - {assignment.tasks}) == 5
        assert (len(scores.same[i]), len(scores.fresh[i])) == (2, 6)


def test_the_command_explains_greedy_repeats(
    recorded: Recorded, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["noise", str(recorded.paths.root), "--members", "3"]
    differ = CliRunner().invoke(app, ["probe", *command])
    assert "greedy decoding, but repeats on the same tasks differ" in differ.stdout
    said = "standard deviation of the fitness: 0.707 for a member that plays the same 2 tasks again, 7 over members"
    assert said in differ.stdout.replace("\n", " ")
    kept = recorded.paths.report / "probe-noise-v00000006.json"
    assert json.loads(kept.read_text())["repeats"] == {
        "identical": False,
        "sd_repeats": pytest.approx(0.5**0.5),
        "sd_members": pytest.approx(7.0),
    }
    assert "\N{HORIZONTAL ELLIPSIS}" not in differ.stdout, "cells are whole where there is no terminal"

    async def play(assignment: Assignment) -> Result:
        return Result(assignment.eval_id, assignment.eval_id.slot + sum(assignment.tasks), (), 0, 0.0, 0.0, 0.0)

    monkeypatch.setattr(script, "play", play)
    script.where = (0, None)
    identical = CliRunner().invoke(app, ["probe", *command])
    assert "greedy decoding: repeats on the same tasks are identical" in identical.stdout
    assert "one member on the same" not in identical.stdout
    assert json.loads(kept.read_text())["repeats"]["identical"] is True
    assert "its own batch twice, and 5 new ones" in identical.stdout
    script.where = (0, None)
    stale = CliRunner().invoke(app, ["probe", "stale", str(recorded.paths.root), "--members", "3"])
    assert "lag 0 is the same score twice and no upper bound" in " ".join(stale.stdout.split())
    assert "of lag 0" not in stale.stdout


def test_a_probe_of_the_last_version_draws_the_members_that_the_run_would_have_had(
    recorded: Recorded, script: Script
) -> None:
    noise(recorded, members=3, repeats=2)
    assert {version for version, _, _ in script.played} == {6}
    assert [a.eval_id.slot for _, _, a in script.played[::3]] == [0, 1, 2]
    assert len({member.seed for _, member, _ in script.played if member is not None}) == 3


def test_a_stale_probe_scores_logged_members_again_around_the_newer_theta(recorded: Recorded, script: Script) -> None:
    scores = stale(recorded, version=5, lags=[4, 1], members=3)
    logged = {r.result.eval_id: r.result.fitness for r in read_journal(recorded.paths.root) if isinstance(r, Reported)}
    assert [(lag.lag, lag.version) for lag in scores.lags] == [(0, 5), (1, 4), (4, 1)]
    assert len(script.played) == 9, "what the run has logged is not scored again"
    plays = iter(script.played)
    for lag in scores.lags:
        own = planned(recorded, lag.version)[:3]
        assert lag.then == tuple(logged[a.eval_id] for a in own)
        assert lag.num_logged == 3
        for assignment, now in zip(own, lag.now, strict=True):
            version, member, play = next(plays)
            assert (version, member, play.tasks) == (5, assignment.member, assignment.tasks)
            assert play.sampling_seed != assignment.sampling_seed
            assert now == script.played.index((version, member, play)) + 1.0


def test_members_without_a_result_are_scored_where_they_belong_first(recorded: Recorded, script: Script) -> None:
    """At the last version nothing was dispatched: its ceiling needs both scores."""
    scores = stale(recorded, lags=[2], members=3)
    assert [lag.num_logged for lag in scores.lags] == [0, 3]
    assert len(script.played) == 3 + 6
    assert scores.lags[0].then == (1.0, 2.0, 3.0)
    assert scores.lags[0].now == (4.0, 5.0, 6.0)


def test_scoring_at_several_versions_goes_forwards(recorded: Recorded, script: Script) -> None:
    recorded.results.clear()
    scores = stale(recorded, version=5, lags=[1, 4], members=3)
    assert [version for version, _, _ in script.played] == [1] * 3 + [4] * 3 + [5] * 12
    assert [lag.then for lag in scores.lags] == [(7.0, 8.0, 9.0), (4.0, 5.0, 6.0), (1.0, 2.0, 3.0)]
    assert [lag.num_logged for lag in scores.lags] == [0, 0, 0]


def test_a_population_smaller_than_the_default_is_scored_whole(recorded: Recorded, script: Script) -> None:
    assert len(stale(recorded, version=3, lags=[1]).lags[0].then) == 5


def test_default_lags_are_those_that_the_run_has(recorded: Recorded, script: Script) -> None:
    assert [lag.lag for lag in stale(recorded, members=3).lags] == [0, 1, 4]
    assert [lag.lag for lag in stale(recorded, version=6, lags=[6], members=3).lags] == [0, 6]


def test_the_cost_is_that_of_the_runs_own_evaluations(recorded: Recorded) -> None:
    results = [r.result for r in read_journal(recorded.paths.root) if isinstance(r, Reported)]
    cost = logged_cost(recorded)
    assert cost is not None
    assert cost.seconds_per_episode == pytest.approx(sum(r.seconds_rollout for r in results) / (2 * len(results)))
    assert cost.seconds_per_member == pytest.approx(sum(r.seconds_update + r.seconds_perturb for r in results) / 30)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"version": 7}, "version 7 does not exist: .* has versions 0 to 6"),
        ({"version": -1}, "version -1 does not exist"),
        ({"members": 6}, "--members 6 must be from 3, .* to es.population=5"),
        ({"members": 2}, "--members 2 must be from 3"),
    ],
)
def test_an_impossible_probe_is_refused(
    recorded: Recorded, script: Script, options: dict[str, int], complaint: str
) -> None:
    for probe in (noise, stale):
        with pytest.raises(ConfigError, match=complaint):
            probe(recorded, **options)
    with pytest.raises(ConfigError, match="--repeats 1 must be at least 2"):
        noise(recorded, members=3, repeats=1)
    with pytest.raises(ConfigError, match="--lags 4: members that are 4 versions old at version 3 do not exist"):
        stale(recorded, members=3, version=3, lags=[1, 4])
    with pytest.raises(ConfigError, match="--lags 0 must be at least 1"):
        stale(recorded, members=3, lags=[0])
    two = recorded.config.es.model_copy(update={"population": 2})
    with pytest.raises(ConfigError, match=r"es\.population=2 is too small for a probe"):
        stale(dataclasses.replace(recorded, config=recorded.config.model_copy(update={"es": two})))
    assert script.played == []


def test_the_command_keeps_every_score(recorded: Recorded, script: Script) -> None:
    root = recorded.paths.root
    done = CliRunner().invoke(app, ["probe", "noise", str(root), "--version", "1", "--members", "4", "--repeats", "2"])
    assert done.exit_code == 0, done.output
    assert "reliability of z" in done.stdout
    kept = json.loads((root / "report/probe-noise-v00000001.json").read_text())
    assert len(kept["scores"]["same"]) == 4
    assert kept["verdict"] in done.stdout
    script.where = (0, None)
    done = CliRunner().invoke(app, ["probe", "stale", str(root), "--lags", "1,3", "--members", "4", "--json"])
    assert done.exit_code == 0, done.output
    assert [row["lag"] for row in json.loads(done.stdout)["agreement"]] == [0, 1, 3]
    assert json.loads((root / "report/probe-stale-v00000006.json").read_text()) == json.loads(done.stdout)
    wrong = CliRunner().invoke(app, ["probe", "stale", str(root), "--lags", "one"])
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert "--lags one must be whole numbers" in wrong.stderr


# --- a real run -------------------------------------------------------------------------------------------------

CONFIG = """\
run: {name: small, num_updates: 2}
model: {path: tiny, dtype: float32}
task:
  env: sudoku
  options: {size: 4, blanks: 2, partial_credit: true, action: digit}
es: {population: 4, sigma: 0.05, alpha: 0.02, tasks_per_member: 3}
sampling: {max_tokens: 1}
eval: {num_tasks: 0}
engine: {kind: transformers, max_concurrent: 1, max_model_len: 1024, threads: 1}
checkpoint: {every: 1}
"""


@pytest.mark.slow
def test_a_greedy_probe_repeats_the_bits_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, one sequence at a time: what the run logged comes out again, and sampling seeds change nothing."""
    pytest.importorskip("transformers")
    from hpc_es.params.tiny_llama import write_tiny_llama

    monkeypatch.chdir(tmp_path)
    write_tiny_llama(tmp_path / "tiny")
    (tmp_path / "small.yaml").write_text(CONFIG)
    assert CliRunner().invoke(app, ["run", "small.yaml"]).exit_code == 0
    recorded = Recorded.read(Path("runs/small"))
    logged = [recorded.results[eval_id].fitness for eval_id in sorted(recorded.results) if eval_id.version == 1]
    scores = noise(recorded, version=1, members=4, repeats=2)
    assert [row[0] for row in scores.same] == logged
    assert all(row[0] == row[1] for row in scores.same)
    found = stale(recorded, version=2, lags=[1], members=4)
    assert [lag.num_logged for lag in found.lags] == [0, 4]
    assert found.lags[0].then == found.lags[0].now, "the ceiling of a greedy run is 1"
    assert found.lags[1].then == tuple(logged)
