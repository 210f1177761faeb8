"""How a worker reaches a version, and what it does with orders of the head. The engine only counts versions."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders import built_commit
from theatre import Stage, make_config

from hpc_es.engine.base import EngineInfo
from hpc_es.errors import StoreError
from hpc_es.paths import RunPaths
from hpc_es.records import Commit, EvalId
from hpc_es.transport import messages
from hpc_es.worker.budget import Budget
from hpc_es.worker.loop import Worker


class CountingEngine:
    """Knows which version it is at, and how it came there."""

    def __init__(self) -> None:
        self.version = 0
        self.done: list[str] = []
        self.damaged: set[int] = set()

    info = EngineInfo(0, {})
    tokenizer = SimpleNamespace(chat_template="any")

    async def load(self, checkpoint: Path | None) -> None:
        version = int(checkpoint.name[1:]) if checkpoint else 0
        self.done.append(f"load {version}")
        if version in self.damaged:
            raise StoreError(f"checkpoint {version} is damaged")
        self.version = version

    async def update(self, commits: list[Commit]) -> None:
        assert [commit.version for commit in commits] == list(range(self.version + 1, commits[-1].version + 1))
        self.version = commits[-1].version
        self.done.append(f"update to {self.version}")


class Head:
    """Answers Fetch at once, and keeps what the worker says."""

    def __init__(self, worker: Worker, versions: int, deaf: int = 0) -> None:
        self.per_answer: int | None = None
        self.worker, self.versions, self.deaf = worker, versions, deaf
        self.heard: list[messages.AnyMessage] = []

    def send(self, message: messages.AnyMessage) -> None:
        self.heard.append(message)
        if isinstance(message, messages.Fetch):
            if self.deaf:
                self.deaf -= 1
                return
            wanted = range(message.first, min(message.last, self.versions) + 1)[: self.per_answer]
            self.worker.pending.keep(tuple(commit(version) for version in wanted))


def commit(version: int) -> Commit:
    return built_commit(version, 0.1, ())


def make_worker(folder: Path, checkpoints: tuple[int, ...] = (), deaf: int = 0) -> tuple[Worker, CountingEngine, Head]:
    paths = RunPaths(folder)
    for version in checkpoints:
        paths.checkpoint(version).mkdir(parents=True)
    engine = CountingEngine()
    worker = Worker(paths, make_config(transport={"backend": "none"}), "seat", engine, Budget())  # type: ignore[arg-type]
    head = Head(worker, 100, deaf)
    worker.client = head  # type: ignore[assignment]
    return worker, engine, head


def go(worker: Worker, *versions: int) -> None:
    async def travel() -> None:
        for version in versions:
            await worker.catch_up.go_to(version)

    asyncio.run(travel())


def test_a_worker_that_has_the_commits_requests_nothing(tmp_path):
    worker, engine, head = make_worker(tmp_path)
    worker.pending.keep((commit(1), commit(2)))
    go(worker, 2)
    assert engine.done == ["update to 2"]
    assert head.heard == []


def test_missing_commits_are_fetched_and_applied_in_one_pass(tmp_path):
    worker, engine, head = make_worker(tmp_path)
    worker.pending.keep((commit(3),))
    go(worker, 4)
    assert engine.done == ["update to 4"]
    assert isinstance(head.heard[0], messages.Fetch)


def test_commits_that_come_in_several_answers_are_asked_for_from_the_first_that_is_missing(tmp_path):
    worker, engine, head = make_worker(tmp_path)
    head.per_answer = 2
    go(worker, 5)
    assert engine.done == ["update to 5"]
    asked = [(fetch.first, fetch.last) for fetch in head.heard if isinstance(fetch, messages.Fetch)]
    assert asked == [(1, 5), (3, 5), (5, 5)]


def test_a_fetch_that_is_lost_is_repeated(tmp_path, monkeypatch):
    monkeypatch.setattr("hpc_es.worker.catch_up.FETCH_RETRY_S", 0.01)
    worker, engine, head = make_worker(tmp_path, deaf=2)
    go(worker, 3)
    assert engine.version == 3
    assert len(head.heard) == 3


def test_a_worker_goes_back_by_the_newest_checkpoint_before_the_version(tmp_path):
    worker, engine, _ = make_worker(tmp_path, checkpoints=(4, 8))
    go(worker, 9, 6)
    assert engine.done == ["load 8", "update to 9", "load 4", "update to 6"]


def test_a_worker_returns_to_the_base_without_a_checkpoint(tmp_path):
    worker, engine, _ = make_worker(tmp_path)
    go(worker, 2, 1, 0)
    assert engine.done == ["update to 2", "load 0", "update to 1", "load 0"]


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    worker, engine, _ = make_worker(tmp_path, checkpoints=(4, 8))
    engine.damaged = {8}
    go(worker, 9)
    assert engine.done == ["load 8", "load 4", "update to 9"]


@pytest.mark.parametrize("record", [None, messages.encode_commit(commit(1))])
def test_an_announced_commit_is_kept_or_fetched_when_its_broadcast_fails(tmp_path, record):
    worker, _, head = make_worker(tmp_path)

    async def hear() -> None:
        announce = messages.Announce(1, epoch=7, length=10, sha256=b"", record=record)
        assert await worker._handle(announce) is None
        await asyncio.gather(*worker._side_jobs)

    asyncio.run(hear())
    assert set(worker.pending.commits) == {1}
    assert len(head.heard) == (record is None)  # in no epoch, so it asks for the commit


def test_a_second_assignment_while_one_runs_is_handed_back(tmp_path):
    worker, _, head = make_worker(tmp_path)
    stage = Stage(make_config())
    assignments = [entry.assignment for entry in stage.core.ledger.evaluations.values()][:2]

    async def hear() -> None:
        forever = asyncio.create_task(asyncio.sleep(3600))
        worker._evaluation, worker._holding = forever, assignments[0].eval_id
        await worker._handle(messages.Work(assignments[0]))  # of a head that did not know that it runs
        await worker._handle(messages.Work(assignments[1]))
        forever.cancel()

    asyncio.run(hear())
    (refusal,) = head.heard
    assert isinstance(refusal, messages.HandBack)
    assert (refusal.eval_id, refusal.holding) == (assignments[1].eval_id, assignments[0].eval_id)


def test_work_that_would_not_end_in_time_is_handed_back_and_the_worker_ends(tmp_path):
    worker, _, head = make_worker(tmp_path)
    worker.budget = Budget(time.time() + 60)
    worker.budget.note(100.0)
    assignment = Stage(make_config()).core.ledger.evaluations[EvalId(0, 0)].assignment
    asyncio.run(worker._handle(messages.Work(assignment)))
    assert [type(message) for message in head.heard] == [messages.HandBack, messages.Draining]
    ended = worker._inbox.get_nowait()
    assert ended.out_of_time
    assert worker._evaluation is None


def test_a_worker_that_was_drained_is_not_to_be_started_again(tmp_path):
    worker, _, _ = make_worker(tmp_path)
    for leave, done in ((messages.Leave("x", False), False), (messages.Leave("x", False, drained=True), True)):
        ended = asyncio.run(worker._handle(leave))
        assert ended is not None
        assert ended.finished is done


def test_a_worker_that_was_refused_says_why(tmp_path):
    worker, _, _ = make_worker(tmp_path)
    with pytest.raises(Exception, match="the head refuses this worker: another model"):
        asyncio.run(worker._handle(messages.Refused("another model")))
