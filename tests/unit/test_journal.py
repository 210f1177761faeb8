"""The journal: torn tails are cut, damage is refused, and every acknowledged record counts exactly once."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest
from fake_run import started, write_run
from hypothesis import given, settings
from hypothesis import strategies as st
from repository import SUPPORT
from small_disk import small_disk

from hpc_es.errors import JournalDamaged, StoreError, Superseded
from hpc_es.paths import RunPaths
from hpc_es.store import journal
from hpc_es.store.journal import JournalWriter, journal_end, read_journal
from hpc_es.store.records import Noted, Started


def note(text: str) -> Noted:
    return Noted(1.0, "info", text)


def create(root: Path) -> JournalWriter:
    return JournalWriter.create(RunPaths(root), started)


def write(writer: JournalWriter, *texts: str) -> None:
    """Each in a frame of its own."""
    for text in texts:
        writer.append(note(text))
        writer.sync()


def notes(root: Path, warnings: list[str] | None = None) -> list[str]:
    warn = (warnings if warnings is not None else []).append
    return [record.what for record in read_journal(root, warn=warn) if isinstance(record, Noted)]


def frame_starts(root: Path, *texts: str) -> list[int]:
    """Sizes of the first segment before each of the frames that are written, and before the end mark."""
    writer = create(root)
    starts = []
    for text in texts:
        starts.append(writer.size)
        write(writer, text)
    starts.append(writer.size)
    writer.close()
    return starts


# --- what goes in comes out -------------------------------------------------------------------------------------


def test_all_kinds_of_records_come_back_in_order(tmp_path: Path) -> None:
    records = write_run(tmp_path)
    encode = msgspec.msgpack.encode  # equal bits: NaN is not equal to itself
    assert [encode(record) for record in read_journal(tmp_path)] == [encode(record) for record in records]


def test_records_that_were_only_appended_are_not_durable(tmp_path: Path) -> None:
    writer = create(tmp_path)
    writer.append(note("a"))
    assert notes(tmp_path) == []
    writer.sync()
    assert notes(tmp_path) == ["a"]
    assert writer.size == writer.path.stat().st_size


def test_a_folder_without_a_journal_has_no_records(tmp_path: Path) -> None:
    assert list(read_journal(tmp_path)) == []
    assert journal_end(tmp_path) is None


# --- torn tails -------------------------------------------------------------------------------------------------


def test_a_last_frame_cut_at_any_byte_costs_only_itself(tmp_path: Path) -> None:
    *_, last, end = frame_starts(tmp_path, "a", "b", "c")
    path = RunPaths(tmp_path).segment(1)
    whole = path.read_bytes()
    for length in range(last, end):
        path.write_bytes(whole[:length])
        warnings: list[str] = []
        assert notes(tmp_path, warnings) == ["a", "b"]
        (text,) = warnings
        assert f"offset {last}" in text
        assert ("a torn tail" if length > last else "no end mark") in text


def test_a_tail_that_the_disk_filled_with_zeros_or_garbage_is_cut(tmp_path: Path) -> None:
    *_, last, _ = frame_starts(tmp_path, "a", "b")
    path = RunPaths(tmp_path).segment(1)
    whole = path.read_bytes()
    for junk in (bytes(len(whole) - last), b"\xb6\x0fJ\xf1" * 9, os.urandom(300)):
        path.write_bytes(whole[:last] + junk)
        assert notes(tmp_path) == ["a"]


def test_the_next_head_seals_a_torn_tail_away(tmp_path: Path) -> None:
    *_, last, end = frame_starts(tmp_path, "a", "b")
    path = RunPaths(tmp_path).segment(1)
    path.write_bytes(path.read_bytes()[: end - 1])
    with pytest.warns(UserWarning, match=f"a torn tail of {end - 1 - last} bytes at offset {last} was cut"):
        writer = create(tmp_path)
    write(writer, "c")
    warnings: list[str] = []
    assert notes(tmp_path, warnings) == ["a", "c"]
    assert warnings == []
    seal = [record for record in read_journal(tmp_path) if isinstance(record, Started)][1]
    assert (seal.generation, seal.predecessor, seal.predecessor_bytes) == (2, 1, last)


# --- damage -----------------------------------------------------------------------------------------------------


def test_any_flipped_byte_before_the_last_frame_is_refused_with_its_place(tmp_path: Path) -> None:
    starts = frame_starts(tmp_path, "a", "b", "c")
    path = RunPaths(tmp_path).segment(1)
    whole = path.read_bytes()
    for offset in range(starts[-2]):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(whole)
            damaged[offset] ^= flip
            path.write_bytes(damaged)
            with pytest.raises(StoreError, match=r"journal\.1\.hpcj") as caught:
                notes(tmp_path)
            if offset >= 8:  # in the first 8 bytes it may look like a format of the future
                assert isinstance(caught.value, JournalDamaged)
                frame = max(start for start in [8, *starts] if start <= offset)
                assert f"at offset {frame}:" in str(caught.value)


@pytest.fixture(scope="module")
def five_notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("five")
    frame_starts(root, *FIVE)
    return root


FIVE = ["a", "bb" * 20, "c", "d" * 300, "e"]


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_no_damage_ever_changes_or_reorders_records(five_notes: Path, data: st.DataObject) -> None:
    """Whatever is overwritten or cut: an error, or a prefix of what was written."""
    path = RunPaths(five_notes).segment(1)
    whole = path.read_bytes()
    start = data.draw(st.integers(0, len(whole) - 1))
    junk = data.draw(st.binary(min_size=1, max_size=12))
    content = whole[:start] + junk + whole[start + len(junk) :]
    path.write_bytes(content[: data.draw(st.integers(start, len(content)))])
    try:
        read = notes(five_notes)
    except StoreError:
        return
    finally:
        path.write_bytes(whole)
    assert read == FIVE[: len(read)]


def test_a_damaged_journal_is_refused_before_a_new_segment_is_made(tmp_path: Path) -> None:
    starts = frame_starts(tmp_path, "a", "b")
    path = RunPaths(tmp_path).segment(1)
    content = bytearray(path.read_bytes())
    content[starts[0] + 5] ^= 0x40  # the length of "a" now reaches far beyond the end
    path.write_bytes(content)
    with pytest.raises(JournalDamaged, match=f"at offset {starts[0]}:"):
        create(tmp_path)
    assert len(RunPaths(tmp_path).segments()) == 1


def test_damage_in_the_last_frame_of_a_sealed_segment_is_refused(tmp_path: Path) -> None:
    *_, end = frame_starts(tmp_path, "a", "b")
    create(tmp_path).close()
    path = RunPaths(tmp_path).segment(1)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(JournalDamaged, match=f"at offset {end}:"):
        notes(tmp_path)
    path.write_bytes(whole[:-1])
    with pytest.raises(JournalDamaged, match="the file ends here"):
        notes(tmp_path)


def test_a_missing_segment_is_refused(tmp_path: Path) -> None:
    write(create(tmp_path), "a")
    write(create(tmp_path), "b")
    RunPaths(tmp_path).segment(1).unlink()
    with pytest.raises(JournalDamaged, match=r"journal\.1\.hpcj is missing"):
        notes(tmp_path)


def test_a_newer_schema_is_refused_with_both_versions(tmp_path: Path) -> None:
    def future(generation: int, predecessor_bytes: int) -> Started:
        return msgspec.structs.replace(started(generation, predecessor_bytes), schema_version=7)

    JournalWriter.create(RunPaths(tmp_path), future)
    with pytest.raises(StoreError, match="schema version 7; this hpc_es reads up to 2"):
        notes(tmp_path)


def test_a_newer_file_format_is_refused(tmp_path: Path) -> None:
    write(create(tmp_path), "a")
    path = RunPaths(tmp_path).segment(1)
    path.write_bytes(path.read_bytes()[:4] + b"\x03\0\0\0" + path.read_bytes()[8:])
    with pytest.raises(StoreError, match="format 3; this hpc_es reads formats 1 to 2"):
        notes(tmp_path)


# --- several heads ----------------------------------------------------------------------------------------------


def test_an_older_head_notices_and_writes_nothing_more(tmp_path: Path) -> None:
    old = create(tmp_path)
    write(old, "a")
    new = create(tmp_path)
    size = old.path.stat().st_size
    assert old.superseded()
    assert not new.superseded()
    old.append(note("late"))
    with pytest.raises(Superseded, match=r"journal\.2\.hpcj exists"):
        old.sync()
    with pytest.raises(Superseded):
        old.append(note("later"))
    old.close()
    assert old.path.stat().st_size == size
    write(new, "b")
    assert notes(tmp_path) == ["a", "b"]


def test_records_of_an_older_head_after_its_seal_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older head was stopped between its look for a newer segment and its write."""
    old = create(tmp_path)
    write(old, "a")
    sealed = old.size
    old.append(note("late"))
    looks = iter([False, True])  # the first look is before the newer segment exists, the second after
    monkeypatch.setattr(old, "superseded", lambda: next(looks))
    write(create(tmp_path), "b")
    with pytest.raises(Superseded):  # so "late" is never acknowledged
        old.sync()
    assert old.path.stat().st_size > sealed
    assert notes(tmp_path) == ["a", "b"]
    write(create(tmp_path), "c")
    assert notes(tmp_path) == ["a", "b", "c"]


def test_records_written_before_the_newer_segment_count_even_if_unacknowledged(tmp_path: Path) -> None:
    old = create(tmp_path)
    write(old, "a")  # its head is killed before it can acknowledge
    create(tmp_path)
    assert notes(tmp_path) == ["a"]


def test_sealed_records_are_durable_before_the_seal_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(create(tmp_path), "a")
    synced: list[Path] = []
    monkeypatch.setattr(journal, "_sync_path", synced.append)

    def look(generation: int, predecessor_bytes: int) -> Started:
        assert synced == [RunPaths(tmp_path).segment(1)]
        return started(generation, predecessor_bytes)

    JournalWriter.create(RunPaths(tmp_path), look)
    assert synced[1:] == [tmp_path]  # and the folder, so that the new segment itself is found again


@pytest.mark.parametrize("length", [0, 3, 8, 20])
def test_a_segment_that_never_began_counts_as_nothing(tmp_path: Path, length: int) -> None:
    write(create(tmp_path), "a")
    stillborn = create(tmp_path)
    stillborn.path.write_bytes(stillborn.path.read_bytes()[:length])
    assert notes(tmp_path) == ["a"]
    writer = create(tmp_path)
    write(writer, "b")
    assert writer.generation == 3
    assert notes(tmp_path) == ["a", "b"]


def test_a_head_that_begins_too_late_is_ignored_and_informed(tmp_path: Path) -> None:
    """It took its generation, was stopped, and a newer head went past it before its first record."""
    write(create(tmp_path), "a")
    newer: list[JournalWriter] = []

    def stopped_and_overtaken(generation: int, predecessor_bytes: int) -> Started:
        if not newer:
            newer.append(create(tmp_path))
            write(newer[0], "b")
        return started(generation, predecessor_bytes)

    with pytest.raises(Superseded):
        JournalWriter.create(RunPaths(tmp_path), stopped_and_overtaken)
    assert newer[0].generation == 3
    write(newer[0], "c")
    assert notes(tmp_path) == ["a", "b", "c"]


def test_two_heads_that_start_together_get_different_generations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = create(tmp_path)
    listed = RunPaths.segments
    stale = iter([listed(RunPaths(tmp_path)), []])  # the second head looked before the first one's file was there
    monkeypatch.setattr(RunPaths, "segments", lambda paths: next(stale, None) or listed(paths))
    second = create(tmp_path)
    assert (first.generation, second.generation) == (1, 2)
    with pytest.raises(Superseded):
        write(first, "a")


def test_a_stopped_and_continued_process_writes_nothing_that_counts(tmp_path: Path) -> None:
    """SIGSTOP at an arbitrary moment of a process that writes as fast as it can."""
    script = f"""
        from pathlib import Path
        from test_journal import create, write
        writer = create(Path({str(tmp_path)!r}))
        for number in range(10**9):
            write(writer, str(number))
            print(number, flush=True)
    """
    process = run_python(script)
    assert process.stdout is not None
    acknowledged = [int(process.stdout.readline()) for _ in range(20)]
    process.send_signal(signal.SIGSTOP)
    write(create(tmp_path), "new")
    before = notes(tmp_path)
    process.send_signal(signal.SIGCONT)
    output, error = process.communicate(timeout=60)
    assert "Superseded" in error
    acknowledged += [int(line) for line in output.split()]
    assert notes(tmp_path) == before
    assert before[: len(acknowledged)] == [str(number) for number in acknowledged]
    assert before[-1] == "new"


# --- full disks -------------------------------------------------------------------------------------------------


def test_a_full_disk_stops_the_writer_and_the_run_resumes(tmp_path: Path) -> None:
    """The limit on file size stands for a full disk: it, too, cuts the last write short."""
    script = f"""
        import resource
        from pathlib import Path
        from test_journal import StoreError, create, note, write
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
        writer = create(Path({str(tmp_path)!r}))
        try:
            for number in range(1000):
                write(writer, f"{{number}} " + "x" * 90)
                print(number, flush=True)
        except StoreError as error:
            print("StoreError", error)
        try:
            writer.append(note("more"))
        except StoreError:
            print("refused")
        writer.close()
    """
    output, error = run_python(script).communicate(timeout=60)
    assert error == ""
    *acknowledged, reason, refused = output.splitlines()
    assert reason.startswith("StoreError cannot write")
    assert refused == "refused"
    path = RunPaths(tmp_path).segment(1)
    assert path.stat().st_size == 3000  # the last frame is torn
    write(create(tmp_path), "on we go")
    assert [text.split(" x")[0] for text in notes(tmp_path)] == [*acknowledged, "on we go"]


def test_a_tmpfs_that_is_full_stops_the_writer_and_the_run_resumes(tmp_path: Path) -> None:
    with small_disk(tmp_path) as disk:
        writer = create(disk)
        written = []
        with pytest.raises(StoreError, match="No space left on device"):  # noqa: PT012
            for number in range(10_000):
                write(writer, f"{number} " + "x" * 2000)
                written.append(number)
        with pytest.raises(StoreError):
            writer.sync()
        writer.close()
        with pytest.raises(StoreError, match="No space left"):
            create(disk)  # still full: the new segment counts as nothing
        (disk / "ballast").unlink()
        write(create(disk), "on")
        assert [text.split(" ")[0] for text in notes(disk)] == [*map(str, written), "on"]


def test_a_failed_fsync_stops_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = create(tmp_path)
    write(writer, "a")

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        writer.append(note("b"))
        with pytest.raises(StoreError, match=r"cannot sync .*Input/output error"):
            writer.sync()
    with pytest.raises(StoreError):  # although the disk would work again: the pages may be gone
        writer.sync()
    writer.close()


# --- helpers ----------------------------------------------------------------------------------------------------


def run_python(script: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{SUPPORT}:{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
