"""Files of the first release stay readable: journal format 1, run.h5, checkpoints and evaluations."""

import json
import subprocess
import sys
from pathlib import Path

import first_release
import pytest
from first_release import DIGESTS, NUM_VERSIONS

import hpc_es.store
from hpc_es.params.arena import Arena
from hpc_es.paths import RunPaths
from hpc_es.recorded.verify import replay, verify
from hpc_es.store.journal import file_frames, read_file
from hpc_es.store.later import EvalJournal
from hpc_es.store.records import Noted, Started


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return first_release.unpack(tmp_path)


def cli(*arguments: object) -> str:
    command = [sys.executable, "-m", "hpc_es", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_verified_to_its_last_version(run: Path) -> None:
    report = verify(run)
    assert report.problems == []
    assert [line.digest for line in report.versions] == list(DIGESTS[: NUM_VERSIONS + 1])


@pytest.mark.parametrize("version", [0, 3, 6])
def test_any_version_is_replayed(run: Path, version: int) -> None:
    assert replay(run, version).digest() == DIGESTS[version]


def test_its_tables_are_read_from_its_hdf5_file_and_the_same_from_its_journal(run: Path) -> None:
    stored = hpc_es.store.read(run)
    assert len(stored.updates) == NUM_VERSIONS
    assert list(stored.evals["source"]) == ["run", "run", "run", "run", "later", "later"]
    (run / "run.h5").unlink()
    with pytest.warns(UserWarning, match="built from the journal"):
        rebuilt = hpc_es.store.read(run)
    for table in ("evaluations", "updates", "episodes", "evals", "workers", "events"):
        assert getattr(stored, table).equals(getattr(rebuilt, table)), table


def test_its_later_evaluation_resumes_in_todays_format(run: Path) -> None:
    path = RunPaths(run).later_eval("later")
    before = list(read_file(path))
    first = before[0]
    assert isinstance(first, Started)
    later = EvalJournal.open(RunPaths(run), "later", first)
    assert later.earlier == tuple(before)
    later.append(Noted(1.0, "info", "one more"))
    later.close()
    assert file_frames(path).version == 2
    assert list(read_file(path)) == [*before, Noted(1.0, "info", "one more")]


def test_its_status_and_its_report_are_shown(run: Path) -> None:
    status = json.loads(cli("status", run, "--json"))
    assert (status["version"], status["generation"], status["state"]) == (6, 3, "no head answers")
    cli("report", run)
    assert any((run / "report").iterdir())


@pytest.mark.slow
def test_it_is_resumed_to_the_bits_that_the_first_release_would_have_had(run: Path) -> None:
    cli("run", run)
    report = verify(run)
    assert report.problems == []
    assert [line.digest for line in report.versions] == list(DIGESTS)
    assert Arena.from_pretrained("models/lab-10k").digest() == DIGESTS[0]
