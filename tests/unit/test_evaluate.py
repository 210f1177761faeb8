"""`hpc-es eval` on a run: any version; what is played is what is recorded and shown."""

import asyncio
from pathlib import Path

import pytest
from eval_bench import (
    LATER,
    OTHER,
    TASK_FILE,
    a_run,
    episodes,
    play,
    silent,
)

import hpc_es.store
from hpc_es.analysis.statistics.compare import policy
from hpc_es.analysis.statistics.evaluations import difference, evaluations
from hpc_es.analysis.statistics.progress import evaluated
from hpc_es.config import load
from hpc_es.errors import ConfigError, DigestMismatch, ModelError
from hpc_es.params.lab_model import write_lab_model
from hpc_es.paths import RunPaths
from hpc_es.recorded.eval_config import EvalRequest, of_run
from hpc_es.recorded.evaluate import chosen_versions, evaluate
from hpc_es.recorded.solo import Recorded, Solo
from hpc_es.records import Assignment
from hpc_es.records import Result as Played


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return a_run(tmp_path, monkeypatch)


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
        ("3:1", "needs FROM <= TO"),
        ("0:4:0", "STEP >= 1"),
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
    play(root, "0,3", EvalRequest(overrides=["sampling.temperature=1.0"], num_tasks=7, repeats=4))
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
    asked = EvalRequest(overrides=["sampling.temperature=1.0"], num_tasks=20, repeats=2)
    play(root, "1", asked, "a")
    play(root, "1", asked, "b")
    assert episodes(root, "a") == episodes(root, "b")


def test_batches_are_played_at_once_up_to_the_engines_limit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        play(root, "0", EvalRequest(overrides=[f"engine.max_concurrent={room}"], num_tasks=20), f"room{room}")
        assert most == expected


def test_a_base_model_may_have_moved_but_not_changed(root: Path) -> None:
    Path("model").rename("moved")
    with pytest.raises(ModelError, match="no such folder"):
        play(root, "1")
    evaluate(root, "1", name=LATER, base=Path("moved"), say=silent)
    write_lab_model(Path("changed"), 8, seed=1)
    with pytest.raises(DigestMismatch, match="theta_1 was rebuilt with digest"):
        evaluate(root, "1", name="other", base=Path("changed"), say=silent)


def test_other_tasks_do_not_affect_the_runs_own_results(root: Path) -> None:
    play(root, "0,4", name="own")
    before = policy(hpc_es.store.read(root))
    play(root, "0,3,4", OTHER)
    play(root, "3", EvalRequest(overrides=["sampling.temperature=1.0"], repeats=9), "warm")
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
    assert of_run(trained, EvalRequest(task=root)).task == trained.task  # the tasks of a run
    config = of_run(trained, EvalRequest(OTHER.task, ["task.options.actions=4", "eval.repeats=2"], num_tasks=6))
    assert (config.task.options, config.eval.repeats, config.eval.num_tasks) == ({"actions": 4}, 2, 6)


def test_a_task_file_may_say_no_more_than_the_task(root: Path) -> None:
    Path("small.yaml").write_text("task: {env: lab, chat: false, options: {num_tasks: 9}}\n")
    config = of_run(load(RunPaths(root).config).config, EvalRequest(Path("small.yaml")))
    assert config.eval.num_tasks == 9  # the default is 64, of which there are not so many
    assert config.sampling == load(RunPaths(root).config).config.sampling
    with pytest.raises(ConfigError, match="10 evaluation tasks were requested; lab allows 1 to 9"):
        of_run(config, EvalRequest(Path("small.yaml"), num_tasks=10))
    with pytest.raises(ConfigError, match="64 evaluation tasks were requested; lab allows 1 to 9"):
        of_run(config, EvalRequest(Path("small.yaml"), ["eval.num_tasks=64"]))


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        (
            EvalRequest(overrides=["es.sigma=1"]),
            "es.sigma cannot be set for an evaluation, only task, sampling, eval, engine",
        ),
        (EvalRequest(overrides=["model.path=x"]), "model.path cannot be set"),
        (EvalRequest(overrides=["engine.url=http://a/v1"]), "`hpc-es eval URL` evaluates an endpoint"),
        (EvalRequest(overrides=["sampling.temprature=1"]), "did you mean sampling.temperature"),
        (EvalRequest(overrides=["sampling.temperature=9"]), r"sampling.temperature=9 \(override\) must be at most 2"),
        (EvalRequest(overrides=["task.options.actoins=4"]), "no option 'actoins', did you mean 'actions'"),
        (EvalRequest(overrides=["sampling.max_tokens=64"]), "must be below engine.max_model_len=64"),
        (EvalRequest(Path("none.yaml")), "none.yaml: no such config file"),
        (EvalRequest(repeats=0), "--repeats 0 must be from 1 to 1024"),
        (EvalRequest(repeats=1025), "--repeats 1025 must be from 1 to 1024"),
        (EvalRequest(overrides=["eval.repeats=1000000000"]), "eval.repeats=1000000000 .* must be at most 1024"),
        (EvalRequest(num_tasks=0), "0 evaluation tasks were requested"),
        (EvalRequest(num_tasks=9999), "9999 evaluation tasks were requested; lab allows 1 to 4096"),
    ],
)
def test_impossible_evaluations_are_refused_before_anything_is_written(
    root: Path, asked: EvalRequest, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        play(root, "last", asked)
    assert not RunPaths(root).evals.exists()


def test_a_typo_in_a_task_file_is_named_with_its_line(root: Path) -> None:
    Path("task.yaml").write_text(TASK_FILE.replace("sampling: {temp", "sampling: {tmep"))
    with pytest.raises(ConfigError, match=r"sampling.tmeperature: unknown key \(task.yaml:5"):
        play(root, "last", OTHER)
