"""Evaluations that go on where they stopped, tasks that have changed meanwhile, and models and endpoints."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chat_server import ChatServer, says
from eval_bench import LATER, OTHER, a_run, count_plays, dies_after, episodes, out_of_reach, play, play_model, silent

import hpc_es.store
from hpc_es.analysis.report.build import write_report
from hpc_es.analysis.statistics.compare import policy
from hpc_es.analysis.statistics.evaluations import counterpart, difference, evaluations, incomplete
from hpc_es.config import load
from hpc_es.envs.manifest import write_tasks
from hpc_es.errors import ConfigError, EngineError, EnvError, ModelError
from hpc_es.params.lab_model import write_lab_model
from hpc_es.paths import RunPaths
from hpc_es.recorded.eval_config import EvalRequest, Frozen, of_model
from hpc_es.recorded.evaluate_model import evaluate_model
from hpc_es.recorded.solo import Solo
from hpc_es.recorded.verify import verify


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return a_run(tmp_path, monkeypatch)


# --- stopped, and going on ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_batches", [0, 1, 30])
def test_a_stopped_evaluation_resumes_where_it_stopped(
    root: Path, monkeypatch: pytest.MonkeyPatch, num_batches: int
) -> None:
    play(root, "0,2", name="whole")
    with monkeypatch.context() as patch:
        dies_after(patch, num_batches, EnvError("the shop is closed"))
        with pytest.raises(EnvError, match="the shop is closed"):
            play(root, "0,2")
    run = hpc_es.store.read(root)
    assert len(episodes(root)) <= 3 * num_batches
    assert set(episodes(root)) <= set(episodes(root, "whole"))
    assert len(evaluations(run, LATER)) == (1 if num_batches == 30 else 0)
    assert list(incomplete(run)) == [(LATER, 2 if num_batches == 30 else 0)]
    done = set(episodes(root))
    counted = count_plays(monkeypatch)
    play(root, "0,2")
    assert sum(counted) == 128 - len(done)
    assert episodes(root) == episodes(root, "whole")
    assert incomplete(hpc_es.store.read(root)) == {}


def test_a_finished_one_starts_no_engine_and_more_versions_may_be_asked_for(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(root, "0")
    counted = count_plays(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(Solo, "start", None)
        play(root, "0")
    play(root, "0,1")
    assert sum(counted) == 64
    assert [each.version for each in evaluations(hpc_es.store.read(root), LATER)] == [0, 1]


@pytest.mark.parametrize(
    "asked",
    [OTHER, EvalRequest(repeats=2), EvalRequest(num_tasks=63), EvalRequest(overrides=["sampling.temperature=0.5"])],
)
def test_a_name_stands_for_one_evaluation(root: Path, asked: EvalRequest) -> None:
    play(root, "0")
    before = RunPaths(root).later_eval(LATER).read_bytes()
    with pytest.raises(ConfigError, match=r"is a different evaluation: .* -> .*; choose another --name"):
        play(root, "0", asked)
    assert RunPaths(root).later_eval(LATER).read_bytes() == before
    play(root, "0", EvalRequest(overrides=["engine.threads=2"]))  # changes no bit


def test_killed_at_any_moment_it_loses_nothing_that_was_recorded(root: Path) -> None:
    slow = ["task.options.seconds={median: 0.02, sigma: 0}", "engine.max_concurrent=3"]
    command = [sys.executable, "-m", "hpc_es", "eval", str(root), "--name", LATER, "--versions", "0,1", *slow]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    path = RunPaths(root).later_eval(LATER)
    deadline = time.monotonic() + 60
    while not path.exists() or path.stat().st_size < 6000:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = episodes(root)
    assert 0 < len(done) < 128
    play(root, "0,1", EvalRequest(overrides=slow))
    play(root, "0,1", name="whole")
    assert set(done) <= set(episodes(root))
    assert episodes(root) == episodes(root, "whole")
    assert verify(root, say=silent).ok


def test_the_ceiling_stands_beside_the_rates(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out_of_reach(monkeypatch)
    play(root, "0", EvalRequest(OTHER.task, num_tasks=12))
    (found,) = evaluations(hpc_es.store.read(root), LATER)
    assert found.ceiling is not None
    assert (found.ceiling.reachable, found.ceiling.num_tasks) == (9, 12)


def test_without_its_manifest_only_the_runs_own_tasks_are_known(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out_of_reach(monkeypatch)
    write_tasks(RunPaths(root).tasks, load(RunPaths(root).config).config)
    play(root, "0", EvalRequest(num_tasks=10), "own")
    play(root, "0", EvalRequest(OTHER.task, num_tasks=12), "other")
    for name in ("own", "other"):
        RunPaths(root).later_eval_tasks(name).unlink()
    (own,), (other,) = (evaluations(hpc_es.store.read(root), name) for name in ("own", "other"))
    assert str(own.ceiling).startswith("7 of 10")
    assert other.ceiling is None


def test_tasks_that_have_become_others_are_not_played(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tasks(RunPaths(root).tasks, load(RunPaths(root).config).config)
    out_of_reach(monkeypatch, name="another")
    with pytest.raises(ConfigError, match="task 0 of lab was '0' when the run began and is 'another 0' now"):
        play(root, "0")
    play(root, "0", OTHER, "other")
    out_of_reach(monkeypatch, name="a third")
    with pytest.raises(ConfigError, match="the evaluation tasks of lab are not those"):
        play(root, "0,1", OTHER, "other")


def test_the_same_options_on_other_data_are_not_paired(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "another"):
        out_of_reach(monkeypatch, name=name)
        play(root, "0,4", OTHER, name)
    first, last, other, _ = evaluations(hpc_es.store.read(root))
    assert (first.source, last.source, other.source) == ("another", "another", "one")
    assert difference(last, first) is not None
    assert difference(last, other) is None


def test_a_model_is_read_as_a_run_of_version_0(root: Path) -> None:
    done = play_model()
    assert (done.root, done.source, done.versions) == (Path("evals/base"), "run", (0,))
    run = hpc_es.store.read(done.root)
    (row,) = run.evals.to_dict("records")
    assert (row["version"], row["num_tasks"], row["num_repeats"], row["other_protocol"]) == (0, 12, 3, False)
    assert run.attrs["finished"]
    assert list(run.workers["num_results"]) == [9]
    assert verify(done.root, say=silent).ok
    assert write_report(done.root, Path("report")).page.is_file()
    play(root, "0,4", OTHER)
    at_0, at_4 = evaluations(hpc_es.store.read(root), LATER)
    base = counterpart(at_4, evaluations(run), None)
    assert base is not None
    assert base.outcomes.equals(at_0.outcomes)
    assert policy(run).version == 0
    assert play(done.root, "last", EvalRequest(num_tasks=4)).versions == (0,)  # as of any run


def test_a_models_evaluation_resumes_and_its_folder_holds_only_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play_model(out="evals/whole")
    with monkeypatch.context() as patch:
        dies_after(patch, 4, EngineError("out of memory"))
        with pytest.raises(EngineError, match="out of memory"):
            play_model()
    assert len(episodes(Path("evals/base"), "run")) <= 20
    play_model()
    assert episodes(Path("evals/base"), "run") == episodes(Path("evals/whole"), "run")
    assert len(RunPaths(Path("evals/base")).segments()) == 2
    with monkeypatch.context() as patch:
        patch.setattr(Solo, "start", None)
        play_model()
    with pytest.raises(ConfigError, match=r"eval\.repeats: 3 -> 5; choose another"):
        play_model(asked=EvalRequest(OTHER.task, repeats=5))


def test_an_evaluation_does_not_resume_with_a_changed_model(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        dies_after(patch, 4, EngineError("out of memory"))
        with pytest.raises(EngineError):
            play_model()
    write_lab_model(Path("model"), 8, seed=1)
    with pytest.raises(ConfigError, match="evals/base began with other parameters"):
        play_model()


def test_folders_that_are_something_else_are_left_alone(root: Path) -> None:
    Path("evals/full").mkdir(parents=True)
    Path("evals/full/notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="evals/full already exists and is not an evaluation"):
        play_model(out="evals/full")
    with pytest.raises(ConfigError, match="run is a different evaluation or a run"):
        play_model(out="run")
    with pytest.raises(ConfigError, match="--out bad name must consist of letters"):
        play_model(out="evals/bad name")
    with pytest.raises(ModelError, match=r"no config\.json"):
        play_model(model="evals/full", out="evals/new")
    with pytest.raises(ConfigError, match="model has no tasks of its own: name them with --task FILE"):
        play_model(out="evals/new", asked=EvalRequest())
    assert sorted(path.name for path in Path("evals").iterdir()) == ["full"]


def test_the_configuration_of_a_model_is_the_files_without_training_settings(root: Path) -> None:
    config = of_model(
        Frozen("model"), Path("evals/base"), EvalRequest(OTHER.task, ["run.seed=3", "model.dtype=bfloat16"])
    )
    assert (config.run.seed, config.model.dtype, config.model.path, config.eval.every) == (3, "bfloat16", "model", 0)
    assert config.engine.kind == "lab"
    url = Frozen("m", "http://localhost:1/v1")
    config = of_model(url, Path("evals/far"), EvalRequest(OTHER.task, ["engine.api_key_env=KEY"]))
    assert (config.engine.kind, config.engine.url, config.engine.api_key_env) == ("endpoint", url.url, "KEY")
    with pytest.raises(ConfigError, match=r"es\.alpha cannot be set"):
        of_model(url, Path("evals/far"), EvalRequest(OTHER.task, ["es.alpha=1"]))


def test_an_endpoint_is_a_frozen_baseline_on_the_same_tasks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    Path("task.yaml").write_text("task: {env: 'scripted:Steps'}\neval: {num_tasks: 7}\nes: {tasks_per_member: 3}\n")
    with ChatServer(lambda body: says(body["messages"][-1]["content"])) as server:
        done = evaluate_model(Frozen("m", server.url), Path("evals/far"), OTHER, say=silent)
        assert play(done.root, "last", EvalRequest(num_tasks=3)).versions == (0,)
    (found,) = evaluations(hpc_es.store.read(done.root), "run")
    assert (found.num_tasks, found.reward, found.success) == (7, 3.0, 1.0)
