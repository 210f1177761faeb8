"""run.h5 is derived from the journal, so that nothing that happens to the file costs information."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import pandas as pd
import pytest
from fake_run import later_eval, started, write_later, write_run
from hdf5_tables import assert_same, from_journal, tables
from small_disk import small_disk

import hpc_es.store
from hpc_es.errors import JournalDamaged, StoreError, Superseded
from hpc_es.paths import RunPaths
from hpc_es.store import pages
from hpc_es.store.hdf5 import Hdf5Writer, rebuild
from hpc_es.store.journal import JournalWriter, read_journal
from hpc_es.store.records import Noted
from hpc_es.store.schema import TABLES

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_run(tmp_path / "run")
    return tmp_path / "run"


# --- damage -----------------------------------------------------------------------------------------------------


def test_a_truncated_file_is_noticed_and_rebuilt(root: Path) -> None:
    expected = from_journal(root)
    whole = rebuild(root).read_bytes()
    for length in [0, 5, 96, 4096, len(whole) // 2, len(whole) - 1]:
        (root / "run.h5").write_bytes(whole[:length])
        os.utime(root / "run.h5", (0, 0))  # not just being written
        with pytest.warns(UserWarning, match="damaged"):
            assert_same(tables(hpc_es.store.read(root)), expected)
        rebuild(root)
        assert_same(tables(hpc_es.store.read(root)), expected)


def test_flipped_bytes_never_give_other_numbers(root: Path) -> None:
    expected = from_journal(root)
    whole = rebuild(root).read_bytes()
    rng = random.Random(1)
    start = whole.index(expected["evaluations"]["fitness"].to_numpy()[0].tobytes())
    places = [start, *(rng.randrange(len(whole)) for _ in range(25))]
    numbers = {table: [column.name for column in columns if column.dtype != "str"] for table, columns in TABLES.items()}
    noticed = []
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        (root / "run.h5").write_bytes(damaged)
        os.utime(root / "run.h5", (0, 0))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = tables(hpc_es.store.read(root))
        noticed.append(bool(caught))
        for table, columns in numbers.items():
            pd.testing.assert_frame_equal(found[table][columns], expected[table][columns])
    assert noticed[0]


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
        writer.flush(size)
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


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_costs_nothing(root: Path) -> None:
    """SIGKILL in the middle of flushes; the reader always gives the tables of the journal."""
    expected = from_journal(root)
    script = f"""
        from pathlib import Path
        from hpc_es.paths import RunPaths
        from hpc_es.store.hdf5 import Hdf5Writer
        from hpc_es.store.journal import read_journal
        paths = RunPaths(Path({str(root)!r}))
        records = list(read_journal(paths.root))
        size = paths.segment(1).stat().st_size
        print("ready", flush=True)
        while True:
            writer = Hdf5Writer(paths)
            for record in records:
                writer.add(record)
                writer.flush(size if record is records[-1] else 1)
    """
    rng, num_kills, unfinished = random.Random(0), 0, 0
    while num_kills < 5 or (not unfinished and num_kills < 40):  # on a busy machine most hit no flush
        num_kills += 1
        process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        while not (root / "run.h5").exists():
            time.sleep(0.01)
        time.sleep(0.05 + 0.4 * rng.random())
        process.send_signal(signal.SIGKILL)
        process.communicate()
        os.utime(root / "run.h5", (0, 0))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert_same(tables(hpc_es.store.read(root)), expected)
        unfinished += any("middle of a write" in str(warning.message) for warning in caught)
    assert unfinished > 0, "no kill hit a flush: the test shows nothing"
    rebuild(root)
    assert sorted(path.name for path in root.iterdir()) == ["journal.1.hpcj", "run.h5"]


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
