"""run.h5 is derived from the journal, so that nothing that happens to the file costs information."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import h5py
import msgspec
import pandas as pd
import pytest
from fake_run import fake_records, later_eval, started, write_later, write_run
from hdf5_tables import as_first_release, assert_same, from_journal, tables
from small_disk import small_disk

import hpc_es.store
from hpc_es.errors import JournalDamaged, StoreError, Superseded
from hpc_es.paths import RunPaths
from hpc_es.store import hdf5_tables, pages
from hpc_es.store.hdf5 import Hdf5Writer, rebuild, rebuild_if_damaged
from hpc_es.store.journal import JournalWriter, read_journal
from hpc_es.store.records import Noted

PAGE = 4096

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_run(tmp_path / "run")
    return tmp_path / "run"


# --- damage -----------------------------------------------------------------------------------------------------


def test_a_truncated_file_is_noticed_and_rebuilt(root: Path) -> None:
    expected = from_journal(root)
    whole = rebuild(root).read_bytes()
    for length in [0, 4096, len(whole) // 2, len(whole) - 1]:
        (root / "run.h5").write_bytes(whole[:length])
        os.utime(root / "run.h5", (0, 0))  # not just being written
        with pytest.warns(UserWarning, match="damaged"):
            assert_same(tables(hpc_es.store.read(root)), expected)
        rebuild(root)
        assert_same(tables(hpc_es.store.read(root)), expected)


def damaged(whole: bytes, num_pages: int = 15) -> Iterator[tuple[str, bytes]]:
    """Altered copies of a file, as crashes, disks and people make them."""
    rng, pages = random.Random(1), range(0, len(whole), PAGE)
    for start in rng.sample(pages, num_pages):
        yield f"page at {start} zeroed", whole[:start] + bytes(min(PAGE, len(whole) - start)) + whole[start + PAGE :]
    for _ in range(3):
        first, second = sorted(rng.sample(pages[:-1], 2))
        between = whole[first + PAGE : second]
        swapped = whole[second : second + PAGE] + between + whole[first : first + PAGE]
        yield f"pages at {first} and {second} swapped", whole[:first] + swapped + whole[second + PAGE :]
    for place in rng.sample(range(len(whole)), 5):
        yield f"bit at {place} flipped", whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :]
    for length in rng.sample(range(len(whole)), 1):
        yield f"cut at {length}", whole[:length]


def test_a_damaged_file_never_gives_other_tables(root: Path, tmp_path: Path) -> None:
    """Texts included; beside its journal it is replaced by it, alone it is refused with the remedy."""
    expected = from_journal(root)
    whole, alone = rebuild(root).read_bytes(), tmp_path / "alone.h5"
    num_refused = 0
    for what, content in damaged(whole):
        for path in (root / "run.h5", alone):
            path.write_bytes(content)
            os.utime(path, (0, 0))  # not just being written
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert_same(tables(hpc_es.store.read(root)), expected)
        try:
            assert_same(tables(hpc_es.store.read(alone)), expected)
            refusal = ""
        except StoreError as error:
            refusal, num_refused = str(error), num_refused + 1
        assert bool(refusal) == ("damaged" in refusal and "journal" in refusal), what
        assert bool(refusal) == any("built from the journal" in str(warning.message) for warning in caught), what
    assert num_refused > 12  # the other pages hold nothing


def test_a_page_that_is_damaged_while_the_head_writes_is_rebuilt_with_a_warning(root: Path) -> None:
    records, rng = list(read_journal(root)), random.Random(2)
    size = RunPaths(root).segment(1).stat().st_size
    warned: list[str] = []
    writer = Hdf5Writer(RunPaths(root), warn=warned.append)
    for number, record in enumerate(records):
        writer.add(record)
        writer.flush(size if number == len(records) - 1 else number)
        if number % 10 == 0:
            whole = bytearray((root / "run.h5").read_bytes())
            start = PAGE * rng.randrange(len(whole) // PAGE) if number % 20 else 0
            whole[start : start + PAGE] = bytes(PAGE)
            (root / "run.h5").write_bytes(whole)
    assert len(warned) >= len(records) // 20
    assert all("is rebuilt from the journal" in text for text in warned)
    assert_same(tables(hpc_es.store.read(root)), from_journal(root))


def test_a_finished_run_gets_its_file_back(root: Path) -> None:
    warned: list[str] = []
    whole = rebuild(root).read_bytes()
    rebuild_if_damaged(root, warn=warned.append)
    assert warned == []
    (root / "run.h5").write_bytes(whole[:8192] + bytes(PAGE) + whole[8192 + PAGE :])
    rebuild_if_damaged(root, warn=warned.append)
    assert "rebuilt from the journal" in warned[0]
    assert_same(tables(hpc_es.store.read(root)), from_journal(root))


def test_a_file_of_another_run_is_not_believed(root: Path, tmp_path: Path) -> None:
    """Also where generation and length of the two journals are the same."""
    other = tmp_path / "other"
    other.mkdir()
    first = msgspec.structs.replace(started(1, 0), run_id="fakt")
    writer = JournalWriter.create(RunPaths(other), lambda generation, sealed: first)
    for record in fake_records(seed=1):
        writer.append(record)
    writer.close()
    path = rebuild(root)
    shutil.copy2(rebuild(other), path)
    with (
        pytest.warns(UserWarning, match="of another run, fakt"),
        pytest.raises(JournalDamaged, match=f"one of them is from another run.*or remove {path}"),
    ):
        hpc_es.store.read(root)
    path.unlink()
    with pytest.warns(UserWarning, match="missing"):
        assert_same(tables(hpc_es.store.read(root)), from_journal(root))


# --- files of the first release ---------------------------------------------------------------------------------


def test_a_file_of_the_first_release_is_read(root: Path, tmp_path: Path) -> None:
    expected = from_journal(root)
    path = as_first_release(rebuild(root))
    alone = shutil.copy2(path, tmp_path / "alone.h5")
    assert_same(tables(hpc_es.store.read(alone)), expected)
    assert_same(tables(hpc_es.store.read(root)), expected)


def test_beside_its_journal_a_file_of_the_first_release_is_not_asked(root: Path) -> None:
    """Its texts have no checksums."""
    expected = from_journal(root)
    path = as_first_release(rebuild(root))
    whole = path.read_bytes()
    place = whole.index(b"engine fault")
    path.write_bytes(whole[:place] + b"Engine Fault" + whole[place + 12 :])
    os.utime(path, (0, 0))
    assert_same(tables(hpc_es.store.read(root)), expected)


def test_reading_a_file_of_the_first_release_has_an_end(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hdf5_tables, "_OLD_FILE_SECONDS", 0.01)
    alone = shutil.copy2(as_first_release(rebuild(root)), tmp_path / "alone.h5")
    with pytest.raises(StoreError, match=r"did not end within .* could be rebuilt from the journal"):
        hpc_es.store.read(alone)


# --- other programs ---------------------------------------------------------------------------------------------


def test_other_programs_read_the_file_and_write_to_it(root: Path, tmp_path: Path) -> None:
    path, expected = rebuild(root), from_journal(root)
    with h5py.File(path, "r", locking=False) as file:
        assert list(file["updates"]["fitness_mean"][:]) == list(expected["updates"]["fitness_mean"])
    with h5py.File(path, "a", locking=False) as file:
        file.attrs["note"] = "my best run"
        file["updates"]["alpha"].resize((9,))
    os.utime(path, (0, 0))
    with h5py.File(path, "r", locking=False) as file:
        assert file.attrs["note"] == "my best run"
    with pytest.warns(UserWarning, match="another program wrote to it"):
        assert_same(tables(hpc_es.store.read(root)), expected)
    with pytest.raises(StoreError, match="another program wrote to it"):
        hpc_es.store.read(shutil.copy2(path, tmp_path / "alone.h5"))


def test_a_file_behind_the_journal_is_not_believed(root: Path) -> None:
    rebuild(root)
    second = JournalWriter.create(RunPaths(root), started)
    with pytest.warns(UserWarning, match="behind"):
        assert hpc_es.store.read(root).attrs["generation"] == 2
    second.close()


def test_a_torn_tail_does_not_make_the_file_behind(root: Path) -> None:
    rebuild(root)
    with RunPaths(root).segment(1).open("ab") as file:
        file.write(b"torn")
    assert len(hpc_es.store.read(root).updates) == 4


def test_a_damaged_journal_leaves_the_tables_readable(root: Path) -> None:
    rebuild(root)
    expected = tables(hpc_es.store.read(root))
    path = RunPaths(root).segment(1)
    content = bytearray(path.read_bytes())
    content[2000] ^= 1
    path.write_bytes(bytes(content) + b"?")
    with pytest.warns(UserWarning, match="damaged at offset"):
        assert_same(tables(hpc_es.store.read(root)), expected)
    (root / "run.h5").unlink()
    with pytest.warns(UserWarning, match="missing"), pytest.raises(JournalDamaged):
        hpc_es.store.read(root)


def test_a_writer_builds_the_file_again_when_somebody_deleted_or_replaced_it(root: Path) -> None:
    records = list(read_journal(root))
    size = RunPaths(root).segment(1).stat().st_size
    writer = Hdf5Writer(RunPaths(root))

    def replace() -> None:
        write_later(root, "later", later_eval(1, 0.5))
        rebuild(root)  # has rows that the writer knows nothing of

    def damage() -> None:
        (root / "run.h5").write_bytes((root / "run.h5").read_bytes()[:3000])

    quarter = len(records) // 4
    for part, harm in enumerate(((root / "run.h5").unlink, damage, replace, lambda: None)):
        for record in records[part * quarter : (part + 1) * quarter if part < 3 else None]:
            writer.add(record)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            writer.flush(size)
        assert [str(warning.message) for warning in caught if "is rebuilt from the journal" not in str(warning)] == []
        assert bool(caught) == (part == 2)  # only damage is worth a word
        harm()
    assert_same(tables(hpc_es.store.read(root)), from_journal(root))


def test_an_older_head_leaves_the_file_of_a_newer_one_alone(root: Path) -> None:
    old = Hdf5Writer(RunPaths(root))
    for record in read_journal(root):
        old.add(record)
    old.flush(1)
    JournalWriter.create(RunPaths(root), started).close()
    content = rebuild(root).read_bytes()
    old.add(Noted(1.0, "info", "late"))
    with pytest.raises(Superseded):
        old.flush(2)
    assert (root / "run.h5").read_bytes() == content


@pytest.mark.parametrize("num_writes", [1, 7, 60])
def test_a_writer_killed_in_the_middle_of_a_write_costs_nothing(root: Path, num_writes: int) -> None:
    """SIGKILL after so many pages of an update, the last of them half written."""
    expected = from_journal(root)
    script = f"""
        import os, signal
        from pathlib import Path
        from hpc_es.paths import RunPaths
        from hpc_es.store.hdf5 import Hdf5Writer
        from hpc_es.store.journal import read_journal
        paths = RunPaths(Path({str(root)!r}))
        records = list(read_journal(paths.root))
        writer = Hdf5Writer(paths)
        for record in records[:20]:
            writer.add(record)
        writer.flush(1)
        left, pwrite = {num_writes}, os.pwrite
        def dies(file, data, offset):
            global left
            left -= 1
            if left == 0:
                pwrite(file, data[: len(data) // 2], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return pwrite(file, data, offset)
        os.pwrite = dies
        for record in records[20:]:
            writer.add(record)
        writer.flush(paths.segment(1).stat().st_size)
    """
    process = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert process.returncode == -signal.SIGKILL
    os.utime(root / "run.h5", (0, 0))
    with pytest.warns(UserWarning, match="damaged"):
        assert_same(tables(hpc_es.store.read(root)), expected)
    rebuild(root)
    assert sorted(path.name for path in root.iterdir()) == ["journal.1.hpcj", "run.h5"]
    assert_same(tables(hpc_es.store.read(root)), expected)


@pytest.mark.slow
def test_a_reader_beside_a_writer_sees_what_some_flush_left(tmp_path: Path) -> None:
    """Every flush falls into a read, and the next one waits until that read is over, however busy the machine is."""
    root = tmp_path / "run"
    write_run(root, 12)
    expected = from_journal(root)["evaluations"]
    copy = root / "copy.h5"  # no journal stands beside this name: only the file is read
    script = f"""
        import os
        from pathlib import Path
        from hpc_es.paths import RunPaths
        from hpc_es.store.hdf5 import Hdf5Writer
        from hpc_es.store.journal import read_journal
        paths = RunPaths(Path({str(root)!r}))
        writer = Hdf5Writer(paths)
        for number, record in enumerate(read_journal(paths.root)):
            writer.add(record)
            if number > 20 and number % 3 == 0:
                writer.flush(number)
                if not Path({str(copy)!r}).exists():
                    Path({str(copy)!r}).hardlink_to(paths.hdf5)
                os.read(0, 4096)
    """
    lengths = []
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdin=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None
        while not copy.exists():
            assert process.poll() is None
            time.sleep(0.01)
        while process.poll() is None:
            found = hpc_es.store.read(copy).evaluations
            lengths.append(len(found))
            identity = ["dispatch_version", "slot", "seed", "time_planned"]
            pd.testing.assert_frame_equal(found[identity], expected[identity][: len(found)])
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(b".")
    assert process.returncode == 0
    assert len(set(lengths)) > 3
    assert lengths == sorted(lengths)


def test_with_locking_on_a_second_writer_is_refused(root: Path) -> None:
    records = list(read_journal(root))
    writer = Hdf5Writer(RunPaths(root), locking=True)
    for record in records[:20]:
        writer.add(record)
    writer.flush(1)
    with pages.BufferedPages(root / "run.h5", lock=True):
        writer.add(records[20])
        with pytest.raises(StoreError, match="cannot write"):
            writer.flush(2)


# --- full disks -------------------------------------------------------------------------------------------------


def test_a_full_disk_stops_run_h5_and_not_the_run(tmp_path: Path) -> None:
    with small_disk(tmp_path) as disk:
        root = disk / "run"
        records = write_run(root)
        writer = Hdf5Writer(RunPaths(root))
        for record in records:
            writer.add(record)
        with pytest.raises(StoreError, match="No space left"):
            writer.flush(1)
        writer.add(records[-1])
        writer.flush(1)  # too early to try again
        assert sorted(path.name for path in root.iterdir()) == ["journal.1.hpcj"]
        (disk / "ballast").unlink()


def test_a_disk_that_fills_up_during_a_flush_is_survived(tmp_path: Path) -> None:
    """In a process of its own; the limit on file size stands for the full disk."""
    root = tmp_path / "run"
    write_run(root)
    script = f"""
        import resource
        from pathlib import Path
        from hpc_es.errors import StoreError
        from hpc_es.paths import RunPaths
        from hpc_es.store.hdf5 import Hdf5Writer
        from hpc_es.store.journal import read_journal
        paths = RunPaths(Path({str(root)!r}))
        writer = Hdf5Writer(paths)
        records = list(read_journal(paths.root))
        for record in records[:20]:
            writer.add(record)
        writer.flush(1)
        room = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (paths.hdf5.stat().st_size + 100, room[1]))
        for record in records[20:]:
            writer.add(record)
        try:
            writer.flush(2)
        except StoreError as error:
            print("StoreError", paths.hdf5.exists())
        resource.setrlimit(resource.RLIMIT_FSIZE, room)
        writer.flush(2)
        print("waits", paths.hdf5.exists())
        writer.flush(paths.segment(1).stat().st_size, last=True)
        print("done", paths.hdf5.exists())
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60
    )
    assert process.stdout.splitlines() == ["StoreError False", "waits False", "done True"]
    assert (process.returncode, process.stderr) == (0, "")
    assert_same(tables(hpc_es.store.read(root)), from_journal(root))
