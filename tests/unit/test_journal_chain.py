"""Frames and segments of a journal stand where they were written, or they are refused: nothing is missed in silence."""

import itertools
import os
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

import first_release
import pytest
from builders import Counted, built_assignment, built_commit
from fake_run import started
from msgspec.structs import replace
from test_journal import create, note, notes, run_python, write

from hpc_es.errors import JournalDamaged, StoreError
from hpc_es.head.ledger import Ledger
from hpc_es.paths import RunPaths
from hpc_es.records import EvalId, Member
from hpc_es.store.frames import END_MARK_BYTES, Frames
from hpc_es.store.journal import JournalWriter, fold_journal, is_being_written, read_file, read_journal, write_file
from hpc_es.store.records import AnyRecord, Committed, Digested, Leased, Planned, Started

TEXTS = ("a", "bb" * 20, "c", "d" * 300, "e")
HEADER = 8


def closed(root: Path, *texts: str, later: float = 0.0) -> Path:
    """One more segment, written to its end, by a head that began so many seconds later than usual."""

    def start(generation: int, sealed: int) -> Started:
        record = started(generation, sealed)
        return replace(record, time=record.time + later)

    root.mkdir(exist_ok=True)
    writer = JournalWriter.create(RunPaths(root), start)
    write(writer, *texts)
    writer.close()
    return writer.path


def frames_of(path: Path) -> list[bytes]:
    """Every frame of a file, the end mark too."""
    data = path.read_bytes()
    frames = Frames(path, data)
    starts = [*(offset for offset, _ in frames.payloads()), frames.content[0], len(data)]
    return [data[a:b] for a, b in itertools.pairwise(starts)]


def put(path: Path, frames: list[bytes]) -> None:
    path.write_bytes(path.read_bytes()[:HEADER] + b"".join(frames))


# --- frames ---------------------------------------------------------------------------------------------------------


def test_any_frame_that_is_removed_repeated_or_moved_is_refused_with_its_place(tmp_path: Path) -> None:
    path = closed(tmp_path, *TEXTS)
    whole = frames_of(path)
    places = range(len(whole))
    altered = [whole[:a] + whole[b:] for a, b in itertools.combinations(places, 2)]
    altered += [[*whole[:b], whole[a], *whole[b:]] for a in places for b in (*places, len(whole))]
    for a, b in itertools.combinations(places, 2):
        swapped = list(whole)
        swapped[a], swapped[b] = swapped[b], swapped[a]
        altered.append(swapped)
    for frames in altered:
        put(path, frames)
        with pytest.raises(JournalDamaged, match=r"journal\.1\.hpcj is damaged at offset \d+: .* restore"):
            notes(tmp_path)
    put(path, whole)
    assert notes(tmp_path) == list(TEXTS)


def test_a_frame_of_another_run_is_refused_wherever_it_stands(tmp_path: Path) -> None:
    path, other = closed(tmp_path / "run", *TEXTS), closed(tmp_path / "other", *TEXTS, later=1.0)
    whole, strangers = frames_of(path), frames_of(other)
    for place in range(1, len(whole)):
        put(path, [*whole[:place], strangers[place], *whole[place + 1 :]])
        with pytest.raises(JournalDamaged, match="another segment or run"):
            notes(tmp_path / "run")


# --- segments -------------------------------------------------------------------------------------------------------


def segments(root: Path, count: int, later: float = 0.0) -> list[Path]:
    return [closed(root, f"{number}a", f"{number}b", later=later) for number in range(count)]


Harm = Callable[[list[Path], list[Path]], object]

HARMS: dict[str, Harm] = {
    "renamed": lambda own, other: own[2].rename(own[2].with_name("journal.4.hpcj")),
    "an older one renamed": lambda own, other: own[0].rename(own[0].with_name("journal.9.hpcj")),
    "copied": lambda own, other: shutil.copy(own[2], own[2].with_name("journal.4.hpcj")),
    "swapped": lambda own, other: shutil.copy(own[1], own[0]),
    "of another run": lambda own, other: shutil.copy(other[1], own[1]),
    "the first of another run": lambda own, other: shutil.copy(other[0], own[0]),
    "the newest of another run": lambda own, other: shutil.copy(other[2], own[2]),
    "removed": lambda own, other: own[1].unlink(),
    "emptied": lambda own, other: own[0].write_bytes(b""),
    "one more of another run": lambda own, other: shutil.copy(other[3], own[0].with_name("journal.4.hpcj")),
}


@pytest.mark.parametrize("harm", HARMS)
def test_segments_that_are_not_where_they_were_written_are_refused(tmp_path: Path, harm: str) -> None:
    HARMS[harm](segments(tmp_path / "run", 3), segments(tmp_path / "other", 4, later=1.0))
    with pytest.raises(JournalDamaged, match=r"journal\.\d\.hpcj.*offset \d.*restore"):
        notes(tmp_path / "run")
    before = sorted((tmp_path / "run").iterdir())
    with pytest.raises(JournalDamaged):
        create(tmp_path / "run")
    assert sorted((tmp_path / "run").iterdir()) == before


def test_a_segment_of_the_first_release_is_sealed_by_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    root = first_release.unpack(tmp_path)
    paths = RunPaths(root)
    records = len(list(read_journal(root)))
    first = next(iter(read_journal(root)))
    JournalWriter.create(paths, lambda g, n: replace(started(g, n), base_digest=first.base_digest)).close()  # type: ignore[union-attr]
    assert len(list(read_journal(root))) == records + 1
    path = paths.segment(3)
    frames = Frames(path, path.read_bytes())
    starts = [*(offset for offset, _ in frames.payloads()), frames.end]
    data = path.read_bytes()
    swapped = data[: starts[4]] + data[starts[5] : starts[6]] + data[starts[4] : starts[5]] + data[starts[6] :]
    path.write_bytes(swapped)
    with pytest.raises(JournalDamaged, match=r"journal\.3\.hpcj .*not the segment that journal\.4\.hpcj continues"):
        list(read_journal(root))


# --- the end --------------------------------------------------------------------------------------------------------


def test_a_clean_end_of_a_journal_is_recorded_and_an_unclean_end_is_reported_once(tmp_path: Path) -> None:
    path = closed(tmp_path, "a", "b")
    said: list[str] = []
    assert notes(tmp_path, said) == ["a", "b"]
    assert said == []
    put(path, frames_of(path)[:-1])
    assert notes(tmp_path, said) == ["a", "b"]
    (text,) = said
    assert "journal.1.hpcj: no end mark at offset" in text


def test_a_live_journal_needs_no_end_mark(tmp_path: Path) -> None:
    writer = create(tmp_path)
    write(writer, "a")
    said: list[str] = []
    assert is_being_written(writer.path)
    assert notes(tmp_path, said) == ["a"]
    assert said == []
    writer.close()
    assert not is_being_written(writer.path)


def test_a_killed_writer_is_reported_by_readers_and_the_next_head_only_once(tmp_path: Path) -> None:
    script = f"""
        import time
        from pathlib import Path
        from test_journal import create, write
        write(create(Path({str(tmp_path)!r})), "a")
        print("written", flush=True)
        time.sleep(60)
    """
    process = run_python(script)
    assert process.stdout is not None
    process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    said: list[str] = []
    assert notes(tmp_path, said) == ["a"]
    assert ["no end mark" in text for text in said] == [True]
    with pytest.warns(UserWarning, match="no end mark"):
        create(tmp_path).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [record.what for record in read_journal(tmp_path) if hasattr(record, "what")] == ["a"]


def test_a_file_that_was_written_in_one_piece_is_whole_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.hpcj"
    write_file(path, [started(1, 0), note("a")])
    assert len(list(read_file(path, whole=True))) == 2
    os.truncate(path, path.stat().st_size - END_MARK_BYTES)
    with pytest.raises(JournalDamaged, match="its end mark is missing"):
        list(read_file(path, whole=True))


# --- names ----------------------------------------------------------------------------------------------------------

ODD = ("9" * 20, "9" * 200, "-1", "01", "0", "٣", "1e3", "10000000000")


@pytest.mark.parametrize("name", ODD)
def test_a_file_only_named_like_a_segment_is_ignored_with_a_warning(tmp_path: Path, name: str) -> None:
    path = closed(tmp_path, "a")
    odd = tmp_path / f"journal.{name}.hpcj"
    shutil.copy(path, odd)
    with pytest.warns(UserWarning, match=r"is ignored: a journal segment is called journal\.1\.hpcj"):
        assert notes(tmp_path) == ["a"]
    with pytest.warns(UserWarning, match="is ignored"):
        writer = create(tmp_path)
    assert writer.generation == 2


@pytest.mark.parametrize("number", [2, 3, 7])
def test_a_folder_named_like_a_segment_is_ignored_and_its_number_left_out(tmp_path: Path, number: int) -> None:
    closed(tmp_path, "a")
    RunPaths(tmp_path).segment(number).mkdir()
    with pytest.warns(UserWarning, match="is ignored: a journal segment is a file"):
        writer = create(tmp_path)
    write(writer, "b")
    assert notes(tmp_path) == ["a", "b"]


@pytest.mark.parametrize("name", ["v1", "v-0000001", "v000000001", "v" + "9" * 30, "v٠٠٠٠٠٠٠١"])
def test_a_file_only_named_like_a_checkpoint_is_ignored_with_a_warning(tmp_path: Path, name: str) -> None:
    paths = RunPaths(tmp_path)
    paths.checkpoint(3).mkdir(parents=True)
    (paths.checkpoints / name).mkdir()
    paths.checkpoint(4).write_text("a file")
    with pytest.warns(UserWarning, match="is ignored: a checkpoint is"):
        assert [version for version, _ in paths.written_checkpoints()] == [3]


# --- records that contradict each other -----------------------------------------------------------------------------

PLANNED = built_assignment(EvalId(0, 0), 1, "train", Member(7, 1, 0.5), (0,), 3)
COMMIT = built_commit(1, 0.5, (Counted(EvalId(0, 0), 7, 1, 0.5, 0, 1.0, 0.0, 0.0),))
CONTRADICTIONS: dict[str, tuple[list[AnyRecord], str]] = {
    "never planned": ([Leased(1.0, EvalId(0, 5), "w", 1)], "evaluation .* was never planned"),
    "planned twice": ([Planned(1.0, 0, (PLANNED, PLANNED))], "planned twice"),
    "committed without a result": ([Planned(1.0, 0, (PLANNED,)), Committed(1.0, COMMIT)], "which is planned"),
    "a commit is missing": ([Committed(1.0, replace(COMMIT, version=2))], "commit 2 follows commit 0"),
    "a commit that consumes nothing": ([Committed(1.0, replace(COMMIT, consumed=()))], "consumes nothing"),
    "a digest without its commit": ([Digested(1.0, 1, 5, 0.1, 0.1)], "digest of theta_1, but no commit"),
    "two digests": ([Digested(1.0, 0, 5, 0.1, 0.1)], "theta_0 has two digests"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_records_that_contradict_each_other_are_refused_with_their_place(tmp_path: Path, name: str) -> None:
    records, words = CONTRADICTIONS[name]
    writer = create(tmp_path)
    for record in records:
        writer.append(record)
    writer.close()
    with pytest.raises(StoreError, match=rf"journal\.1\.hpcj is damaged at offset \d+: .*{words}.*restore"):
        fold_journal(tmp_path, Ledger().apply)
