"""The one fold of the journal: what it says of a recorded run, and what it refuses."""

from pathlib import Path

import pytest
from fake_run import BASE_DIGEST, started, write_run
from msgspec import structs

from hpc_es.errors import StoreError
from hpc_es.paths import RunPaths
from hpc_es.store.history import History
from hpc_es.store.journal import JournalWriter
from hpc_es.store.projection import Projection
from hpc_es.store.records import AnyRecord, Committed, Digested
from hpc_es.store.schema import EVALUATIONS


@pytest.fixture
def records(tmp_path: Path) -> list[AnyRecord]:
    return write_run(tmp_path / "run", 6)


def history_of(records: list[AnyRecord]) -> History:
    history = History()
    for record in records:
        history.apply(record)
    return history


def test_a_history_has_every_version_of_the_run(tmp_path: Path, records: list[AnyRecord]) -> None:
    history = History.read(tmp_path / "run")
    assert (history.version, history.base_digest) == (6, BASE_DIGEST)
    assert list(history.commits.values()) == [record.commit for record in records if isinstance(record, Committed)]
    assert set(history.digests) == set(range(7))
    members = [each for eval_id, each in history.evaluations.items() if eval_id.purpose == "train"]
    assert {each.state for each in members} <= {"accepted", "void", "discarded"}


def test_tables_have_the_states_of_the_history(records: list[AnyRecord]) -> None:
    """After every record; only a closed evaluation and one that no update consumes are written otherwise."""
    history, projection, written = History(), Projection(), dict[tuple[int, ...], str]()
    names = [column.name for column in EVALUATIONS]
    key = [names.index(name) for name in ("dispatch_version", "slot", "replacement")]
    for record in records:
        history.apply(record)
        projection.add(record)
        for row in projection.take().rows["evaluations"].values():
            cells = list(row)
            written[tuple(int(cells[place]) for place in key)] = str(cells[names.index("status")])
        for eval_id, evaluation in history.evaluations.items():
            if eval_id.purpose == "train":
                assert written[eval_id.version, eval_id.table_slot, eval_id.replacement] == evaluation.state


def test_a_contradiction_is_refused(records: list[AnyRecord]) -> None:
    commits = [record for record in records if isinstance(record, Committed)]
    with pytest.raises(StoreError, match="commit 2 follows commit 0: an update is missing"):
        history_of([record for record in records if record is not commits[0] and not isinstance(record, Digested)])
    digested = next(record for record in records if isinstance(record, Digested))
    with pytest.raises(StoreError, match=f"theta_{digested.version} has two digests"):
        history_of([*records, structs.replace(digested, digest=4)])
    with pytest.raises(StoreError, match="generation 2 began on another base model"):
        history_of([records[0], structs.replace(started(2, 9), base_digest=4)])


def test_a_folder_without_a_run_has_no_history(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match="not the folder of a run that has begun"):
        History.read(tmp_path / "empty")
    JournalWriter.create(RunPaths(tmp_path), started).close()
    assert History.read(tmp_path).commits == {}
