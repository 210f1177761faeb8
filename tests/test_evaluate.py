"""`hpc-es eval`: any version of a run, a model or an endpoint; what is played is what is recorded and shown."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, says
from test_solo import make_run
from typer.testing import CliRunner, Result

import hpc_es.store
from hpc_es.analysis.compare import policy
from hpc_es.analysis.evaluations import counterpart, difference, evaluations, incomplete
from hpc_es.analysis.progress import evaluated
from hpc_es.analysis.report import write_report
from hpc_es.analysis.verify import verify
from hpc_es.cli import app
from hpc_es.config import load
from hpc_es.envs.base import TaskFacts
from hpc_es.envs.lab import Lab
from hpc_es.errors import ConfigError, DigestMismatch, EngineError, EnvError, ModelError
from hpc_es.es.records import Assignment
from hpc_es.es.records import Result as Played
from hpc_es.launch.eval_config import Asked, Frozen, of_model, of_run
from hpc_es.launch.evaluate import Evaluation, chosen_versions, evaluate
from hpc_es.launch.evaluate_model import evaluate_model
from hpc_es.launch.manifest import write_tasks
from hpc_es.launch.solo import Recorded, Solo
from hpc_es.params.lab_model import write_lab_model
from hpc_es.paths import RunPaths
from hpc_es.worker.trajectories import read_trajectory_file

TASK_FILE = """\
run: {name: other, num_updates: 9}
model: {path: none, dtype: float32}
task: {env: lab, chat: false, options: {actions: 3}}
es: {tasks_per_member: 5}
sampling: {temperature: 1.0, max_tokens: 1}
eval: {num_tasks: 12, repeats: 3}
engine: {kind: lab, max_model_len: 48, threads: 1}
"""
LATER = "later"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of four updates; eval.num_tasks is 64, batches are of 3."""
    monkeypatch.chdir(tmp_path)
    Path("task.yaml").write_text(TASK_FILE)
    return make_run(tmp_path)


OTHER = Asked(task=Path("task.yaml"))


def silent(text: str) -> None:
    pass


def play(root: Path, versions: str = "last", asked: Asked | None = None, name: str = LATER) -> Evaluation:
    return evaluate(root, versions, asked, name=name, say=silent)


def episodes(root: Path, source: str = LATER) -> list[tuple[int, int, int, float]]:
    """(version, slot, task, reward), in the order of the plan."""
    frame = hpc_es.store.read(root).episodes
    frame = frame[frame["source"] == source]
    return sorted(zip(frame["dispatch_version"], -frame["slot"], frame["task"], frame["reward"], strict=True))


def dies_after(monkeypatch: pytest.MonkeyPatch, num_batches: int, error: BaseException) -> None:
    """Of the next evaluation."""
    whole, played = Solo.play, 0

    async def play(self: Solo, assignment: Assignment) -> Played:
        nonlocal played
        played += 1
        if played > num_batches:
            raise error
        return await whole(self, assignment)

    monkeypatch.setattr(Solo, "play", play)


# --- versions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "versions"),
    [
        ("last", (4,)),
        ("all", (0, 1, 2, 3, 4)),
        ("3", (3,)),
        ("4,0,2,0", (4, 0, 2)),
        ("0:4:2", (0, 2, 4)),
        ("1:3", (1, 2, 3)),
        ("0:4:3,4", (0, 3, 4)),
        ("0, last", (0, 4)),
        ("1:last:2,last", (1, 3, 4)),
    ],
)
def test_versions_are_named_as_on_the_command_line(root: Path, text: str, versions: tuple[int, ...]) -> None:
    assert chosen_versions(Recorded.read(root), text) == versions


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("5", "version 5 does not exist: .* has versions 0 to 4"),
        ("0:999999999999", "version 999999999999 does not exist"),
        ("3:1", "goes upwards"),
        ("0:4:0", "by at least 1"),
        ("first", "must be `all`, or numbers and `last`"),
        ("-1", "must be"),
        ("0,lastly", "must be"),
        ("\N{SUPERSCRIPT TWO}", "must be"),
        ("", "must be"),
        ("1,,2", "must be"),
    ],
)
def test_versions_that_are_none_are_refused(root: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        chosen_versions(Recorded.read(root), text)


# --- a run --------------------------------------------------------------------------------------------------------


def test_every_version_plays_the_same_tasks_with_the_same_seeds_and_its_own_bits(root: Path) -> None:
    done = play(root, "4,0,2")
    assert done.versions == (4, 0, 2)
    rows = hpc_es.store.read(root).evaluations
    rows = rows[rows["source"] == LATER]
    digests = Recorded.read(root).digests
    assert {v: set(of["digest"]) for v, of in rows.groupby("dispatch_version")} == {v: {digests[v]} for v in (0, 2, 4)}
    seeds = [list(of["sampling_seed"]) for _, of in rows.groupby("dispatch_version")]
    assert seeds[0] == seeds[1] == seeds[2]
    assert len(set(seeds[0])) == len(seeds[0]), "every batch has seeds of its own"
    played = episodes(root)
    tasks = {v: [task for version, _, task, _ in played if version == v] for v in (0, 2, 4)}
    assert tasks[0] == tasks[2] == tasks[4] == list(range(64))
    assert len({tuple(r for version, _, _, r in played if version == v) for v in (0, 2, 4)}) == 3


def test_repeats_have_seeds_of_their_own_that_all_versions_share(root: Path) -> None:
    play(root, "0,3", Asked(overrides=["sampling.temperature=1.0"], num_tasks=7, repeats=4))
    rows = hpc_es.store.read(root).evaluations
    seeds = rows[rows["source"] == LATER].groupby("dispatch_version")["sampling_seed"].unique()
    assert len(set(seeds[0])) == 4 * 3, "so has each of the three batches"
    assert list(seeds[0]) == list(seeds[3])
    (at_0, at_3) = evaluations(hpc_es.store.read(root), LATER)
    assert (at_0.num_tasks, at_0.num_repeats) == (7, 4)
    assert [at.k for at in at_0.pass_at] == [1, 2, 4]
    assert at_0.pass_at[0].mean == pytest.approx(at_0.success)
    paired = difference(at_3, at_0)
    assert paired is not None
    assert paired.reward.difference == pytest.approx(at_3.reward - at_0.reward)


def test_the_same_evaluation_again_plays_the_same(root: Path) -> None:
    asked = Asked(overrides=["sampling.temperature=1.0"], num_tasks=20, repeats=2)
    play(root, "1", asked, "a")
    play(root, "1", asked, "b")
    assert episodes(root, "a") == episodes(root, "b")


def test_as_many_batches_are_played_at_once_as_there_is_room_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, now, most = Solo.play, 0, 0

    async def play_counted(self: Solo, assignment: Assignment) -> Played:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001)
        result = await whole(self, assignment)
        now -= 1
        return result

    monkeypatch.setattr(Solo, "play", play_counted)
    for room, expected in ((11, 3), (2, 1)):
        most = 0
        play(root, "0", Asked(overrides=[f"engine.max_concurrent={room}"], num_tasks=20), f"room{room}")
        assert most == expected


def test_a_base_model_may_have_moved_but_not_changed(root: Path) -> None:
    Path("model").rename("moved")
    with pytest.raises(ModelError, match="no such folder"):
        play(root, "1")
    evaluate(root, "1", name=LATER, base=Path("moved"), say=silent)
    write_lab_model(Path("changed"), 8, seed=1)
    with pytest.raises(DigestMismatch, match="theta_1 was rebuilt with digest"):
        evaluate(root, "1", name="other", base=Path("changed"), say=silent)


def test_other_tasks_do_not_enter_what_the_run_is_judged_by(root: Path) -> None:
    play(root, "0,4", name="own")
    before = policy(hpc_es.store.read(root))
    play(root, "0,3,4", OTHER)
    play(root, "3", Asked(overrides=["sampling.temperature=1.0"], repeats=9), "warm")
    run = hpc_es.store.read(root)
    rows = run.evals.drop_duplicates("source").set_index("source")
    assert dict(rows["other_protocol"]) == {"own": False, LATER: True, "warm": True}
    assert rows["protocol"][LATER] == "lab actions=3, T=1 max_tokens=1"
    after = policy(run)
    assert after.version == before.version == 4
    assert after.outcomes.equals(before.outcomes)
    with pytest.raises(ConfigError, match="was not evaluated at version 3, only at 0, 4"):
        policy(run, 3)
    assert evaluated(run).empty
    own, other = (evaluations(run, source)[0] for source in ("own", LATER))
    assert difference(own, other) is None


def test_a_task_file_replaces_tasks_decoding_and_room_and_leaves_the_rest(root: Path) -> None:
    trained = load(RunPaths(root).config).config
    config = of_run(trained, OTHER)
    file = load(Path("task.yaml")).config
    assert (config.task, config.sampling) == (file.task, file.sampling)
    assert (config.eval.num_tasks, config.eval.repeats, config.eval.batch) == (12, 3, 5)
    assert (config.engine.max_model_len, config.engine.max_concurrent) == (48, trained.engine.max_concurrent)
    assert (config.run, config.model, config.es) == (trained.run, trained.model, trained.es)
    assert of_run(trained, Asked(task=root)).task == trained.task  # the tasks of a run
    config = of_run(trained, Asked(OTHER.task, ["task.options.actions=4", "eval.repeats=2"], num_tasks=6))
    assert (config.task.options, config.eval.repeats, config.eval.num_tasks) == ({"actions": 4}, 2, 6)


def test_a_task_file_may_say_no_more_than_the_task(root: Path) -> None:
    Path("small.yaml").write_text("task: {env: lab, chat: false, options: {num_tasks: 9}}\n")
    config = of_run(load(RunPaths(root).config).config, Asked(Path("small.yaml")))
    assert config.eval.num_tasks == 9  # the default is 64, of which there are not so many
    assert config.sampling == load(RunPaths(root).config).config.sampling
    with pytest.raises(ConfigError, match="10 evaluation tasks are asked for, lab has 1 to 9"):
        of_run(config, Asked(Path("small.yaml"), num_tasks=10))
    with pytest.raises(ConfigError, match="64 evaluation tasks are asked for, lab has 1 to 9"):
        of_run(config, Asked(Path("small.yaml"), ["eval.num_tasks=64"]))


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        (
            Asked(overrides=["es.sigma=1"]),
            "es.sigma cannot be set for an evaluation, only task, sampling, eval, engine",
        ),
        (Asked(overrides=["model.path=x"]), "model.path cannot be set"),
        (Asked(overrides=["engine.url=http://a/v1"]), "`hpc-es eval URL` evaluates an endpoint"),
        (Asked(overrides=["sampling.temprature=1"]), "did you mean sampling.temperature"),
        (Asked(overrides=["sampling.temperature=9"]), r"sampling.temperature=9 \(override\) must be at most 2"),
        (Asked(overrides=["task.options.actoins=4"]), "no option 'actoins', did you mean 'actions'"),
        (Asked(overrides=["sampling.max_tokens=64"]), "must be below engine.max_model_len=64"),
        (Asked(Path("none.yaml")), "none.yaml: no such config file"),
        (Asked(repeats=0), "--repeats 0 must be 1 to 1024"),
        (Asked(repeats=1025), "--repeats 1025 must be 1 to 1024"),
        (Asked(overrides=["eval.repeats=1000000000"]), "eval.repeats=1000000000 .* must be at most 1024"),
        (Asked(num_tasks=0), "0 evaluation tasks are asked for"),
        (Asked(num_tasks=9999), "9999 evaluation tasks are asked for, lab has 1 to 4096"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_anything_is_written(
    root: Path, asked: Asked, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        play(root, "last", asked)
    assert not RunPaths(root).evals.exists()


def test_a_typo_in_a_task_file_is_named_with_its_line(root: Path) -> None:
    Path("task.yaml").write_text(TASK_FILE.replace("sampling: {temp", "sampling: {tmep"))
    with pytest.raises(ConfigError, match=r"sampling.tmeperature: unknown key \(task.yaml:5"):
        play(root, "last", OTHER)


def test_a_sample_of_the_episodes_is_kept_word_by_word(root: Path) -> None:
    play(root, "0,1", Asked(OTHER.task, num_tasks=8, repeats=2, keep=7))
    kept = list(read_trajectory_file(RunPaths(root).later_eval_trajectories(LATER)))
    assert sorted((k.eval_id.version, k.episode.task) for k in kept) == [(v, t) for v in (0, 1) for t in range(7)]
    shown = invoke("episodes", root, "--eval", LATER)
    assert "14 kept episodes" in shown.stdout
    assert f"--eval {LATER} --version 1 --member -1" in shown.stdout
    assert "mean reward" in invoke("episodes", root, "--eval", LATER, "--version", 1, "--member", -1).stdout
    assert "no later evaluation 'x', only later" in invoke("episodes", root, "--eval", "x", code=2).stderr


# --- stopped, and going on ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_batches", [0, 1, 30])
def test_an_evaluation_that_was_stopped_goes_on_where_it_stopped(
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


def count_plays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the batches that are played from now on."""
    whole, counted = Solo.play, list[int]()

    async def play(self: Solo, assignment: Assignment) -> Played:
        counted.append(len(assignment.tasks))
        return await whole(self, assignment)

    monkeypatch.setattr(Solo, "play", play)
    return counted


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
    "asked", [OTHER, Asked(repeats=2), Asked(num_tasks=63), Asked(overrides=["sampling.temperature=0.5"])]
)
def test_a_name_stands_for_one_evaluation(root: Path, asked: Asked) -> None:
    play(root, "0")
    before = RunPaths(root).later_eval(LATER).read_bytes()
    with pytest.raises(ConfigError, match=r"is an evaluation of something else: .* -> .*; give this one another name"):
        play(root, "0", asked)
    assert RunPaths(root).later_eval(LATER).read_bytes() == before
    play(root, "0", Asked(overrides=["engine.threads=2"]))  # changes no bit


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
    play(root, "0,1", Asked(overrides=slow))
    play(root, "0,1", name="whole")
    assert set(done) <= set(episodes(root))
    assert episodes(root) == episodes(root, "whole")
    assert verify(root, say=silent).ok


# --- what is known of the tasks -----------------------------------------------------------------------------------


def out_of_reach(monkeypatch: pytest.MonkeyPatch, *, name: str = "word") -> None:
    """Every fourth task of the laboratory."""
    facts = staticmethod(lambda task: TaskFacts(f"{name} {task}", reachable=task % 4 != 0))
    monkeypatch.setattr(Lab, "facts", facts)


def test_the_ceiling_stands_beside_the_rates(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out_of_reach(monkeypatch)
    play(root, "0", Asked(OTHER.task, num_tasks=12))
    (found,) = evaluations(hpc_es.store.read(root), LATER)
    assert found.ceiling is not None
    assert (found.ceiling.reachable, found.ceiling.num_tasks) == (9, 12)


def test_without_its_manifest_only_the_runs_own_tasks_are_known(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out_of_reach(monkeypatch)
    write_tasks(RunPaths(root).tasks, load(RunPaths(root).config).config)
    play(root, "0", Asked(num_tasks=10), "own")
    play(root, "0", Asked(OTHER.task, num_tasks=12), "other")
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


# --- a model, an endpoint -----------------------------------------------------------------------------------------


def play_model(model: str = "model", out: str = "evals/base", asked: Asked = OTHER) -> Evaluation:
    return evaluate_model(Frozen(model), Path(out), asked, say=silent)


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
    assert play(done.root, "last", Asked(num_tasks=4)).versions == (0,)  # as of any run


def test_a_models_evaluation_goes_on_and_its_folder_stands_for_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(ConfigError, match=r"eval\.repeats: 3 -> 5; name another"):
        play_model(asked=Asked(OTHER.task, repeats=5))


def test_a_model_that_has_changed_meanwhile_does_not_go_on(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        dies_after(patch, 4, EngineError("out of memory"))
        with pytest.raises(EngineError):
            play_model()
    write_lab_model(Path("model"), 8, seed=1)
    with pytest.raises(ConfigError, match="evals/base was begun with other parameters"):
        play_model()


def test_folders_that_are_something_else_are_left_alone(root: Path) -> None:
    Path("evals/full").mkdir(parents=True)
    Path("evals/full/notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="evals/full exists already and is no evaluation"):
        play_model(out="evals/full")
    with pytest.raises(ConfigError, match="run is an evaluation, or a run, of something else"):
        play_model(out="run")
    with pytest.raises(ConfigError, match="--out bad name must consist of letters"):
        play_model(out="evals/bad name")
    with pytest.raises(ModelError, match=r"no config\.json"):
        play_model(model="evals/full", out="evals/new")
    with pytest.raises(ConfigError, match="model has no tasks of its own: --task FILE"):
        play_model(out="evals/new", asked=Asked())
    assert sorted(path.name for path in Path("evals").iterdir()) == ["full"]


def test_the_configuration_of_a_model_is_the_files_but_for_what_it_trains(root: Path) -> None:
    config = of_model(Frozen("model"), Path("evals/base"), Asked(OTHER.task, ["run.seed=3", "model.dtype=bfloat16"]))
    assert (config.run.seed, config.model.dtype, config.model.path, config.eval.every) == (3, "bfloat16", "model", 0)
    assert config.engine.kind == "lab"
    url = Frozen("m", "http://localhost:1/v1")
    config = of_model(url, Path("evals/far"), Asked(OTHER.task, ["engine.api_key_env=KEY"]))
    assert (config.engine.kind, config.engine.url, config.engine.api_key_env) == ("endpoint", url.url, "KEY")
    with pytest.raises(ConfigError, match=r"es\.alpha cannot be set"):
        of_model(url, Path("evals/far"), Asked(OTHER.task, ["es.alpha=1"]))


def test_an_endpoint_is_a_frozen_baseline_on_the_same_tasks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    Path("task.yaml").write_text("task: {env: 'scripted:Steps'}\neval: {num_tasks: 7}\nes: {tasks_per_member: 3}\n")
    with ChatServer(lambda body: says(body["messages"][-1]["content"])) as server:
        done = evaluate_model(Frozen("m", server.url), Path("evals/far"), OTHER, say=silent)
        assert play(done.root, "last", Asked(num_tasks=3)).versions == (0,)
    (found,) = evaluations(hpc_es.store.read(done.root), "run")
    assert (found.num_tasks, found.reward, found.success) == (7, 3.0, 1.0)


# --- the command --------------------------------------------------------------------------------------------------


def invoke(*arguments: Any, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def test_the_command_prints_a_table_and_the_same_as_json(root: Path) -> None:
    table = invoke("eval", root, "--versions", "0,4", "--task", "task.yaml", "--name", LATER).stdout
    assert "lab actions=3, T=1 max_tokens=1: 12 tasks x 3 repeats" in table
    assert "theta_0" in table
    assert "other tasks or decoding than the run's own" in table
    answer = json.loads(
        invoke("eval", root, "--versions", "0,4", "--task", "task.yaml", "--name", LATER, "--json").stdout
    )
    assert (answer["name"], answer["num_tasks"], answer["num_repeats"]) == (LATER, 12, 3)
    first, second = answer["evaluated"]
    assert (first["difference"], second["version"]) == (None, 4)
    assert second["difference"]["reward"]["difference"] == pytest.approx(second["reward"] - first["reward"])
    assert [at["k"] for at in second["pass_at"]] == [1, 2, 3]
    assert first["success_interval"][0] <= first["success"] <= first["success_interval"][1]


LOUD = """\
import subprocess

from hpc_es.envs.lab import Lab

class Loud(Lab):
    def reset(self, task):
        print("hello from the environment")
        subprocess.run(["echo", "hello from its program"], check=True)
        return super().reset(task)
"""


def test_json_stands_alone_on_stdout_whatever_an_environment_prints(root: Path) -> None:
    Path("loud.py").write_text(LOUD)
    Path("task.yaml").write_text(TASK_FILE.replace("env: lab", "env: 'loud:Loud'"))
    command = [sys.executable, "-m", "hpc_es", "eval", str(root), "--task", "task.yaml", "--num-tasks", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["num_tasks"] == 2
    assert "hello from the environment" in done.stderr
    assert "hello from its program" in done.stderr


def test_in_a_narrow_terminal_columns_go_below_one_another_and_no_number_is_cut(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpc_es.cli.output.WIDTH_IN_FILES", 60)
    printed = invoke("eval", root, "--versions", "0,4", "--task", "task.yaml", "--repeats", 9).stdout
    assert "\N{HORIZONTAL ELLIPSIS}" not in printed
    assert printed.count("version ") > 2
    for words in ("pass@2", "pass@4", "pass@8", "pass@9", "reward - theta_0", "solved - theta_0"):
        assert printed.count(words) == 1


def test_one_version_answers_at_the_top(root: Path) -> None:
    answer = json.loads(invoke("eval", root, "--version", 1, "--num-tasks", 5, "--json").stdout)
    assert (answer["version"], answer["num_tasks"]) == (1, 5)
    assert {"fitness", "success"} <= set(answer)
    assert (Path(answer["run"]) / "evals" / f"{answer['name']}.hpcj").is_file()


def test_greedy_repeats_are_allowed_and_said_to_be_worth_little(root: Path) -> None:
    assert "only show what batching changes" in invoke("eval", root, "--repeats", 2, "--num-tasks", 4).stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere"], "nowhere is no run folder (with config.yaml), no model folder (with config.json), and no URL"),
        (["run", "--versions", "0", "--version", "1"], "--versions 0 and --version 1 say it twice"),
        (["run", "--versions", "7"], "version 7 does not exist"),
        (["run", "--name", "../x"], "--name ../x must consist of letters"),
        (["run", "--name", ""], "--name  must consist of letters"),
        (["run", "--name", "run"], "--name run stands for what the run itself measured"),
        (["run", "--out", "x"], "--out x is for models and endpoints"),
        (["model", "--model", "x", "--task", "task.yaml"], "--model x is for runs and endpoints; model is a model"),
        (["run", "--model", "x"], "model.path=x: no such folder"),
        (["model"], "model has no tasks of its own: --task FILE"),
        (["model", "--task", "task.yaml", "--versions", "3"], "model is no run, so that it has version 0 only"),
        (["http://localhost:1/v1", "--task", "task.yaml"], "--model NAME says which of its models"),
        (["ftp://a", "--model", "m", "--task", "task.yaml"], "must be a base URL with http:// or https://"),
    ],
)
def test_a_mistake_is_said_in_a_line(root: Path, arguments: list[str], complaint: str) -> None:
    assert complaint in invoke("eval", *arguments, code=2).stderr


def test_an_endpoint_that_does_not_answer_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001, raising=False)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.01, raising=False)
    answer = invoke("eval", "http://127.0.0.1:9/v1", "--model", "m", "--task", "task.yaml", "task.chat=true", code=1)
    assert "http://127.0.0.1:9/v1 was not reached or did not answer" in answer.stderr


def test_all_recorded_evaluations_are_listed_and_compared(root: Path) -> None:
    assert "no complete evaluation" in invoke("evals", root).stdout
    invoke("eval", root, "--versions", "0,4", "--task", "task.yaml", "--name", LATER)
    invoke("eval", root, "--version", 2, "--name", "own")
    invoke("eval", "model", "--task", "task.yaml")
    listed = invoke("evals", root, "evals/model-task").stdout
    for words in (f"{root}, later\n", f"{root}, own\n", "evals/model-task, its own evaluations\n", "lab, greedy"):
        assert words in listed
    answer = json.loads(invoke("evals", root, "--against", "evals/model-task", "--json").stdout)
    rows = {(row["source"], row["version"]): row["difference"] for row in answer["evaluated"]}
    assert rows[LATER, 0]["reward"]["difference"] == 0.0
    assert rows[LATER, 4]["reward"]["num_tasks"] == 12
    assert rows["own", 2] is None  # by another protocol
    answer = json.loads(invoke("evals", root, "--against", f"{root}@2", "--json").stdout)
    assert answer["evaluated"][-1]["difference"]["success"]["p_value"] == 1.0
    assert "no evaluation of that version" in invoke("evals", root, "--against", f"{root}@3", code=2).stderr
    assert "must be one run" in invoke("evals", root, "--against", "a,b", code=2).stderr
    assert "is no run" in invoke("evals", "nowhere", code=2).stderr
