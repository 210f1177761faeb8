"""A head core and its workers in one process: no sockets, no arena, and a clock that tests set.

Fitness and digests are pure functions of what is evaluated, as they are in reality, so any history of crashes must
end with the same commits. A crash of the head loses what was not synced and every message in flight.
"""

import hashlib
from collections import deque
from dataclasses import dataclass, field

import msgspec
from builders import counted
from toy import nudge

from hpc_es import methods, results
from hpc_es.config.schema import Config
from hpc_es.head.core import Core
from hpc_es.head.events import CheckpointSaved, GroupUp, Received, Tick, Trained, TrainingFailed, Updated
from hpc_es.head.instructions import Append, Exit, Instruction, OpenGroup, SaveCheckpoint, Send, Train, Update
from hpc_es.head.ledger import Ledger
from hpc_es.methods.base import Tasks
from hpc_es.records import Assignment, Commit, Episode, EvalId, Result, Weights
from hpc_es.store import records as journal
from hpc_es.store.records import SCHEMA_VERSION
from hpc_es.transport import messages
from hpc_es.transport.backends import Offer

BASE_DIGEST = 0xBA5E


def make_config(**changes: object) -> Config:
    values = {
        "run": {"name": "stage", "num_updates": 3, "seed": 7},
        "model": {"path": "none"},
        "task": {"env": "sudoku"},
        "es": {"population": 4, "tasks_per_member": 2},
        "eval": {"every": 2, "num_tasks": 3},
        "checkpoint": {"every": 2},
    }
    for section, keys in changes.items():
        values[section] = {**values.get(section, {}), **keys}  # type: ignore[dict-item]
    return Config.model_validate(values)


def hashed(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def fitness_of(assignment: Assignment) -> float:
    return hashed(assignment.member, assignment.tasks, assignment.sampling_seed) % 1000 / 1000


def digest_after(commits: list[Commit]) -> int:
    digest = BASE_DIGEST
    for commit in commits:
        if isinstance(commit.body, Weights):
            digest = commit.body.digest
        else:
            digest = hashed(digest, [(member.seed, member.coefficient) for member in counted(commit)])
    return digest


@dataclass
class StageWorker:
    name: str
    seat: str
    current: Assignment | None = None
    unacked: dict[EvalId, Result] = field(default_factory=dict)
    wrong_digest: bool = False
    errors: int = 0
    """Number of evaluations that fail before one succeeds."""
    gone: bool = False


class Stage:
    """`to_head` and `to_workers` are messages in flight; tests move them one at a time."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.records: list[journal.AnyRecord] = []
        self.workers: dict[str, StageWorker] = {}
        self.to_head: deque[messages.AnyMessage] = deque()
        self.to_workers: deque[tuple[str, messages.AnyMessage]] = deque()
        self.arena_jobs: deque[Instruction] = deque()
        self.now = 0.0
        self.generation = 0
        self.failing_trainers = 0
        """Number of trainers that exit without having trained."""
        self.trained: list[tuple[int, tuple[EvalId, ...]]] = []
        """(version, cohort) of every finished training."""
        self.exit: Exit | None = None
        self.start_head()

    # --- the head --------------------------------------------------------------------------------------------

    def start_head(self) -> None:
        """A new head: what was in flight is lost, the records are not."""
        self.generation += 1
        self.to_head.clear()
        self.to_workers.clear()
        self.arena_jobs.clear()
        started = journal.Started(self.now, SCHEMA_VERSION, "stage", self.generation, 0, "{}", BASE_DIGEST, {}, "host")
        self.records.append(started)
        self.records = msgspec.msgpack.decode(
            msgspec.msgpack.encode(self.records), type=list[journal.AnyRecord]
        )  # what a journal does to them
        ledger = Ledger()
        for record in self.records:
            ledger.apply(record)
        method = methods.make(self.config, Tasks(100, self.config.eval.num_tasks))
        self.core = Core(self.config, ledger, method, config_digest="digest", offer=Offer("gloo"))
        self.perform(self.core.start(self.now))
        if ledger.version not in ledger.digests:
            self.handle(Updated(ledger.version, self.true_digest(ledger.version), 0.0, 0.0))
        for worker in self.workers.values():
            self.hello(worker)
            self.resend(worker)

    def true_digest(self, version: int) -> int:
        commits = self.core.ledger.commits
        return digest_after([commits[v] for v in range(1, version + 1)])

    def handle(self, event: object) -> None:
        self.perform(self.core.handle(event, self.now))  # type: ignore[arg-type]
        self.core.ledger.validate()

    def perform(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Append(record=record):
                    self.records.append(record)
                case Send(worker=worker, message=message):
                    self.to_workers.append((worker, message))
                case Update() | Train() | SaveCheckpoint() | OpenGroup():
                    self.arena_jobs.append(instruction)
                case Exit():
                    self.exit = instruction

    def do_arena_job(self) -> None:
        match self.arena_jobs.popleft():
            case Update(commit=commit):
                self.handle(Updated(commit.version, self.true_digest(commit.version), 1.0, 0.1))
            case Train(version=version, cohort=cohort):
                self.handle(self.train(version, cohort))
            case SaveCheckpoint(version=version):
                self.handle(CheckpointSaved(version))
            case OpenGroup(epoch=epoch):
                self.handle(GroupUp(epoch))

    def train(self, version: int, cohort: tuple[tuple[Assignment, Result], ...]) -> Trained | TrainingFailed:
        """The trainer's theta_version, a pure function of theta_{version-1} and a cohort."""
        if self.failing_trainers:
            self.failing_trainers -= 1
            return TrainingFailed(version, "the trainer was killed")
        self.trained.append((version, tuple(result.eval_id for _, result in cohort)))
        fitness = [result.fitness for _, result in cohort]
        digest = hashed(self.true_digest(version - 1), version, fitness)
        return Trained(version, digest, 1.0, 0.1, {"step": nudge(fitness)})

    # --- workers ---------------------------------------------------------------------------------------------

    def add_worker(self, seat: str) -> StageWorker:
        worker = StageWorker(f"{seat}.{len(self.workers)}", seat)
        self.workers[worker.name] = worker
        self.hello(worker)
        return worker

    def busy_worker(self, seat: str) -> StageWorker:
        """A worker that has just been given its first evaluation."""
        worker = self.add_worker(seat)
        while worker.current is None:
            self.move(self.moves()[0])
        return worker

    def hello(self, worker: StageWorker) -> None:
        if not worker.gone:
            holding = worker.current.eval_id if worker.current else next(reversed(worker.unacked), None)
            self.to_head.append(
                messages.Hello(worker.name, worker.seat, "host", 1, BASE_DIGEST, {}, holding, collective="gloo")
            )

    def kill_worker(self, name: str) -> None:
        self.workers[name].gone = True

    def rewards(self, assignment: Assignment) -> list[float]:
        """Reward of every task of an evaluation."""
        return [fitness_of(assignment)] * len(assignment.tasks)

    def finish_evaluation(self, worker: StageWorker) -> None:
        assignment, worker.current = worker.current, None
        assert assignment is not None
        version = assignment.version
        digest = self.true_digest(version) ^ worker.wrong_digest
        error = None
        if worker.errors:
            worker.errors -= 1
            error = "the environment raised"
        rewards = self.rewards(assignment)
        episodes = tuple(
            Episode(task, reward, False, 1, 0, 5, 1, 0.1, 0.0, "terminated")
            for task, reward in zip(assignment.tasks, rewards, strict=True)
            if error is None
        )
        text = f"context of {assignment.eval_id}" if assignment.purpose == "propose" and error is None else ""
        result = Result(assignment.eval_id, results.fitness_of(episodes), episodes, digest, 0.0, 0.0, 1.0, error, text)
        worker.unacked[result.eval_id] = result
        self.resend(worker)

    def resend(self, worker: StageWorker) -> None:
        for result in worker.unacked.values():
            if not worker.gone:
                self.to_head.append(messages.Report(worker.name, result, 1.0, 0.0))

    def deliver_to_worker(self) -> None:
        name, message = self.to_workers.popleft()
        worker = self.workers.get(name)
        if worker is None or worker.gone:
            return
        match message:
            case messages.Work(assignment=assignment) if worker.current is None:
                worker.current = assignment
            case messages.Work(assignment=assignment):
                assert worker.current is not None
                if (holding := worker.current.eval_id) != assignment.eval_id:
                    self.to_head.append(messages.HandBack(name, assignment.eval_id, "another is running", holding))
            case messages.Ack(eval_id=eval_id):
                worker.unacked.pop(eval_id, None)
            case messages.Unknown():
                self.hello(worker)
            case messages.Rebuild():
                worker.wrong_digest = False
                worker.current = None
                self.hello(worker)
            case messages.Leave() | messages.Refused():
                worker.gone = True

    # --- running -----------------------------------------------------------------------------------------------

    def moves(self) -> list[str]:
        """All moves that are possible next."""
        possible = []
        if self.to_head:
            possible.append("to_head")
        if self.to_workers:
            possible.append("to_workers")
        if self.arena_jobs:
            possible.append("arena")
        possible += [f"finish {w.name}" for w in self.workers.values() if w.current is not None and not w.gone]
        return possible

    def move(self, what: str) -> None:
        self.now += 0.01
        if what == "to_head":
            self.handle(Received(self.to_head.popleft()))
        elif what == "to_workers":
            self.deliver_to_worker()
        elif what == "arena":
            self.do_arena_job()
        else:
            self.finish_evaluation(self.workers[what.removeprefix("finish ")])

    def run(self, max_moves: int = 5000) -> Exit:
        """Run until the head exits; the clock advances only when nothing else can happen."""
        for _ in range(max_moves):
            if self.exit is not None:
                return self.exit
            possible = self.moves()
            if possible:
                self.move(possible[0])
            else:
                self.now += 10.0
                self.handle(Tick())
                for worker in self.workers.values():
                    self.resend(worker)
                    if not worker.gone:
                        self.to_head.append(messages.Heartbeat(worker.name))
        raise AssertionError(f"no end after {max_moves} moves; version {self.core.ledger.version}")

    def commits(self) -> list[Commit]:
        return [record.commit for record in self.records if isinstance(record, journal.Committed)]
