"""A journal that lost its end is never taken for a whole one while anything in the run folder knows better."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import first_release
import pytest
from fake_run import later_eval, started, write_later, write_run
from first_release import DIGESTS
from msgspec.structs import replace
from typer.testing import CliRunner

import hpc_es.store
from hpc_es.cli import app
from hpc_es.errors import JournalDamaged, VerifyError
from hpc_es.head.ledger import Ledger
from hpc_es.head.loop import restore
from hpc_es.launch import prepare
from hpc_es.params import Arena, checkpoint
from hpc_es.paths import RunPaths
from hpc_es.recorded.verify import replay, verify
from hpc_es.store.frames import Frames
from hpc_es.store.hdf5 import rebuild
from hpc_es.store.journal import JournalWriter, fold_journal, read_journal
from hpc_es.store.later import EvalJournal


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return first_release.unpack(tmp_path)


def remove(paths: RunPaths, *kept: str) -> None:
    """Remove every file that records the run's progress, except the named ones."""
    known: dict[str, Callable[[], object]] = {
        "run.h5": paths.hdf5.unlink,
        "rendezvous.json": paths.rendezvous.unlink,
        "checkpoints": lambda: shutil.rmtree(paths.checkpoints),
        "evals": lambda: shutil.rmtree(paths.evals),
    }
    for name, action in known.items():
        if name not in kept:
            action()


@pytest.mark.parametrize("witness", ["run.h5", "rendezvous.json", "checkpoints", "evals"])
def test_a_newest_segment_that_is_gone_is_missed_by_every_command(root: Path, witness: str) -> None:
    paths = RunPaths(root)
    paths.segment(3).unlink()
    remove(paths, witness)
    config = (root / "config.yaml").read_bytes()
    for command in (["verify"], ["status"], ["replay", "--out", "model"], ["run"]):
        done = CliRunner().invoke(app, [command[0], str(root), *command[1:]])
        assert isinstance(done.exception, JournalDamaged | SystemExit), command
        assert done.exit_code == 1, command
        for words in ("hpcj", "offset", "its end is lost. Restore", "remove", witness):
            assert words in done.output, (command, words)
    assert [generation for generation, _ in paths.segments()] == [1, 2]
    assert (root / "config.yaml").read_bytes() == config


def test_the_remedy_is_enough_to_continue_with_the_rest(root: Path) -> None:
    paths = RunPaths(root)
    path = paths.segment(3)
    offsets = [offset for offset, _ in Frames(path, path.read_bytes()).payloads()]
    path.write_bytes(path.read_bytes()[: offsets[-8]])
    with pytest.raises(JournalDamaged) as caught:
        verify(root)
    for name in str(caught.value).partition(", or remove ")[2].partition(" to resume from")[0].split(", "):
        shutil.rmtree(name) if Path(name).is_dir() else Path(name).unlink()
    assert verify(root).ok
    assert Path(root) / "config.yaml"
    prepare.write_folder(prepare.began_config(paths))  # type: ignore[arg-type]


def test_run_h5_of_another_run_is_not_believed(tmp_path: Path) -> None:
    root, other = tmp_path / "run", tmp_path / "other"
    write_run(root), other.mkdir()
    JournalWriter.create(RunPaths(other), lambda g, n: replace(started(g, n), run_id="other")).close()
    shutil.copy(rebuild(other), root / "run.h5")
    with pytest.raises(JournalDamaged, match="one of them is from another run"):
        list(read_journal(root))


def test_the_tables_of_a_run_h5_that_knows_more_are_shown_with_a_warning(root: Path) -> None:
    whole = hpc_es.store.read(root).updates
    RunPaths(root).segment(3).unlink()
    with pytest.warns(UserWarning, match="ahead of the journal, which has lost its end"):
        assert hpc_es.store.read(root).updates.equals(whole)


def test_a_run_h5_whose_journal_is_gone_is_read_with_a_warning(root: Path) -> None:
    for _, path in RunPaths(root).segments():
        path.unlink()
    with pytest.warns(UserWarning, match="its journal is not here"):
        assert len(hpc_es.store.read(root).updates) == 6


def test_a_later_evaluation_that_lost_its_end_is_noticed_by_run_h5(tmp_path: Path) -> None:
    root = tmp_path / "run"
    write_run(root)
    path = write_later(root, "later", later_eval(2, 0.5))
    older = path.read_bytes()
    later = EvalJournal.open(RunPaths(root), "later", started(1, 0))
    later.append(*later_eval(3, 0.75)[1:])
    later.close()
    rebuild(root)
    path.write_bytes(older)
    with pytest.warns(UserWarning, match=r"later\.hpcj had \d+ bytes .* has lost its end"):
        evals = hpc_es.store.read(root).evals
    assert list(evals[evals["source"] == "later"]["reward_mean"]) == [0.5, 0.75]


# --- checkpoints under names that lie ---------------------------------------------------------------------------------


def lie(paths: RunPaths, how: str) -> None:
    if how == "renamed to an older version":
        paths.checkpoint(4).rename(paths.checkpoint(5))
    elif how == "renamed to a version that the run has not reached":
        paths.checkpoint(6).rename(paths.checkpoint(9))
    elif how == "swapped":
        paths.checkpoint(4).rename(paths.checkpoint(1))
        paths.checkpoint(6).rename(paths.checkpoint(4))
        paths.checkpoint(1).rename(paths.checkpoint(6))
    elif how == "relabelled":
        paths.checkpoint(4).rename(paths.checkpoint(5))
        manifest = paths.checkpoint(5) / checkpoint.MANIFEST
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 5}))
    else:
        arena = Arena.from_pretrained("models/lab-10k")
        for _ in range(6):
            arena.update([(5, 1e-3)])
        shutil.rmtree(paths.checkpoint(6))
        checkpoint.write(paths, arena)


@pytest.mark.parametrize(
    "how",
    [
        "renamed to an older version",
        "renamed to a version that the run has not reached",
        "swapped",
        "relabelled",
        "of another run",
    ],
)
def test_a_checkpoint_under_a_wrong_name_is_reported_and_skipped(
    root: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    paths = RunPaths(root)
    lie(paths, how)
    problems = verify(root).problems
    assert problems
    assert all("checkpoint" in problem for problem in problems)
    assert replay(root).digest() == DIGESTS[6]
    config = prepare.began_config(paths)
    assert config is not None
    prepare.write_folder(config)
    arena, ledger = Arena.from_pretrained("models/lab-10k"), Ledger()
    fold_journal(root, ledger.apply)
    assert restore(arena, arena.apply, paths, ledger) is None
    assert arena.digest() == DIGESTS[6]
    assert "set aside as" in caplog.text
    assert verify(root).problems == []


# --- what verify compares ---------------------------------------------------------------------------------------------


def test_verify_says_up_to_which_version_it_has_proven(root: Path) -> None:
    done = CliRunner().invoke(app, ["verify", str(root)])
    assert "everything is consistent, proven up to version 6" in done.output


def test_verify_and_status_notice_a_configuration_that_is_not_that_of_the_journal(root: Path) -> None:
    path = root / "config.yaml"
    path.write_text(path.read_text().replace("seed: 0", "seed: 1"))
    (problem,) = verify(root).problems
    assert "differs from the configuration with which this run started: run.seed" in problem
    done = CliRunner().invoke(app, ["status", str(root)])
    assert done.exit_code == 2
    assert "differs from the configuration with which this run started" in done.output


def test_verify_notices_a_later_evaluation_that_is_damaged_or_of_another_run(root: Path) -> None:
    path = RunPaths(root).later_eval("later")
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + b"x" + whole[101:])
    (problem,) = verify(root).problems
    assert "later.hpcj is damaged at offset" in problem
    path.unlink()
    write_later(root, "later", later_eval(2, 0.5))
    assert any("the base model has digest" in problem for problem in verify(root).problems)


def test_an_empty_folder_has_no_journal(tmp_path: Path) -> None:
    with pytest.raises(VerifyError, match="nothing has run here"):
        verify(tmp_path)


def test_a_segment_of_a_run_that_was_killed_needs_no_manual_work(tmp_path: Path) -> None:
    write_run(tmp_path)
    rebuild(tmp_path)
    writer = JournalWriter.create(RunPaths(tmp_path), started)
    writer.close()
    assert len(list(read_journal(tmp_path))) > 1
