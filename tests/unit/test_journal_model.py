"""The few kilobytes that are the model, copied out of a journal."""

from pathlib import Path

import pytest
from fake_run import BASE_DIGEST, started, write_run
from msgspec import structs

from hpc_es.errors import StoreError
from hpc_es.paths import RunPaths
from hpc_es.store.journal import JournalWriter, read_journal
from hpc_es.store.model import commits_only, model_of, read_model, write_model
from hpc_es.store.records import AnyRecord, Committed, Digested, Started


@pytest.fixture
def records(tmp_path: Path) -> list[AnyRecord]:
    return write_run(tmp_path / "run", 6)


def test_a_copied_model_is_that_of_the_run_and_much_smaller(tmp_path: Path, records: list[AnyRecord]) -> None:
    write_model(tmp_path / "model.hpcj", read_journal(tmp_path / "run"))
    model = read_model(tmp_path / "model.hpcj")
    assert model == read_model(tmp_path / "run")
    assert model.base_digest == model.digests[0] == BASE_DIGEST
    assert [commit.version for commit in model.commits] == [1, 2, 3, 4, 5, 6]
    assert list(model.commits) == [record.commit for record in records if isinstance(record, Committed)]
    assert set(model.digests) == set(range(7))
    assert (tmp_path / "model.hpcj").stat().st_size < RunPaths(tmp_path / "run").segment(1).stat().st_size / 5


def test_only_records_that_make_the_model_are_copied(records: list[AnyRecord]) -> None:
    second = started(2, 100)
    kept = list(commits_only([*records, second]))
    assert {type(record) for record in kept} == {Started, Committed, Digested}
    assert second not in kept


def test_a_missing_commit_or_a_second_truth_is_refused(records: list[AnyRecord]) -> None:
    commits = [record for record in records if isinstance(record, Committed)]
    with pytest.raises(StoreError, match="commit 3 follows commit 1"):
        model_of([records[0], commits[0], commits[2]])
    digested = next(record for record in records if isinstance(record, Digested))
    with pytest.raises(StoreError, match="theta_1 has two digests"):
        model_of([records[0], commits[0], digested, structs.replace(digested, digest=4)])
    with pytest.raises(StoreError, match="two base models"):
        model_of([records[0], structs.replace(started(2, 9), base_digest=4)])
    with pytest.raises(StoreError, match="journal is empty"):
        model_of([])


def test_a_file_that_is_not_a_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"not a journal, but long enough to have a header")
    with pytest.raises(StoreError, match="is not a journal"):
        read_model(tmp_path / "x")
    with pytest.raises(StoreError, match="cannot read"):
        read_model(tmp_path / "missing")
    with pytest.raises(StoreError, match="first record of a journal is Started"):
        write_model(tmp_path / "y", [])
    JournalWriter.create(RunPaths(tmp_path), started).close()
    assert read_model(tmp_path).commits == ()


def test_a_model_that_cannot_be_written_is_an_error_of_ours(tmp_path: Path, records: list[AnyRecord]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="write"):
        write_model(tmp_path / "file" / "model.hpcj", records)
