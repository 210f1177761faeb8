"""The journal is the model: base checkpoint + commits give any theta_v, bit for bit.

What has to be copied out of a journal for that is a few kilobytes per update: the first record (base digest, versions),
the commits, and the digests that prove them. They form a journal of their own, which `read_model` reads like a run.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpc_es.errors import StoreError
from hpc_es.records import Commit
from hpc_es.store.journal import read_file, read_journal, write_file
from hpc_es.store.records import AnyRecord, Committed, Digested, Started


@dataclass(frozen=True)
class Model:
    """`commits[i]` turns theta_i into theta_{i+1}; `digests[v]` is the digest of theta_v, where it was recorded."""

    base_digest: int
    config_json: str
    commits: tuple[Commit, ...]
    digests: dict[int, int]


def commits_only(records: Iterable[AnyRecord]) -> Iterator[AnyRecord]:
    """The first record, the commits and their digests."""
    begun = False
    for record in records:
        if isinstance(record, Committed | Digested) or (isinstance(record, Started) and not begun):
            begun = True
            yield record


def model_of(records: Iterable[AnyRecord]) -> Model:
    """Errors: StoreError when the records do not form one unbroken line of versions on one base."""
    start: Started | None = None
    commits: list[Commit] = []
    digests: dict[int, int] = {}
    for record in records:
        match record:
            case Started():
                start = start or record
                if record.base_digest != start.base_digest:
                    raise StoreError(f"the run has two base models: {start.base_digest:#x}, {record.base_digest:#x}")
                digests[0] = start.base_digest
            case Committed(commit=commit):
                if commit.version != len(commits) + 1:
                    raise StoreError(f"commit {commit.version} follows commit {len(commits)}: one is missing")
                commits.append(commit)
            case Digested(version=version, digest=digest):
                if digests.setdefault(version, digest) != digest:
                    raise StoreError(f"theta_{version} has two digests: {digests[version]:#x} and {digest:#x}")
    if start is None:
        raise StoreError("there is no model here: the journal is empty")
    return Model(start.base_digest, start.config_json, tuple(commits), digests)


def write_model(path: Path, records: Iterable[AnyRecord]) -> None:
    """Copy out of a run's records what is the model. Errors: StoreError."""
    write_file(path, commits_only(records))


def read_model(path: Path) -> Model:
    """Model from a file that `write_model` wrote, or from a run folder. Errors: StoreError, JournalDamaged."""
    return model_of(read_journal(path) if path.is_dir() else read_file(path, whole=True))
