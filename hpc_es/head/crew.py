"""The workers that are currently connected.

This state is not in the journal: after a restart of the head, every worker sends Hello again.
"""

from dataclasses import dataclass, field
from typing import Literal

from hpc_es.allowance import Allowance
from hpc_es.head.checks import events_allowance
from hpc_es.records import EvalId, Result
from hpc_es.transport.backends import Offer
from hpc_es.transport.messages import Hello

WorkerState = Literal["ready", "joining", "draining", "rebuilding"]
"""joining: theta is being sent to the worker."""


@dataclass
class Worker:
    """One incarnation of a worker: one process from its start to its exit."""

    name: str
    seat: str
    host: str
    offer: Offer
    joined_at: float
    seen_at: float
    state: WorkerState = "ready"
    dismissal: str | None = None
    """Why the worker must exit as soon as it holds no evaluation; None if it stays."""
    lease: EvalId | None = None
    """The evaluation that the worker runs, even if its result will no longer be counted."""
    rebuilds: int = 0
    refusals: int = 0
    """Number of its invalid messages."""
    allowance: Allowance = field(default_factory=events_allowance)
    num_results: int = 0
    seconds_busy: float = 0.0
    seconds_useful: float = 0.0


@dataclass
class Crew:
    """The connected workers, and which of them are idle.

    Only methods of this class change `state`, `lease` and `dismissal` of a worker, so that the index of idle workers is
    always right.
    """

    workers: dict[str, Worker] = field(default_factory=dict)
    num_tokens: int = 0
    _idle: dict[str, Worker] = field(default_factory=dict)
    _dismissed: dict[str, Worker] = field(default_factory=dict)
    _seats: dict[str, dict[str, Worker]] = field(default_factory=dict)

    def join(self, hello: Hello, now: float) -> Worker:
        """Add a new incarnation, or update one that has sent Hello again."""
        worker = self.workers.get(hello.worker)
        if worker is None:
            offer = Offer(hello.collective, hello.gpu)
            worker = Worker(hello.worker, hello.seat, hello.host, offer, joined_at=now, seen_at=now)
            self.workers[hello.worker] = worker
            self._seats.setdefault(hello.seat, {})[hello.worker] = worker
        worker.seen_at = now
        self.mark(worker, "draining" if hello.draining or worker.dismissal else "ready")
        return worker

    def leave(self, name: str) -> Worker | None:
        self._idle.pop(name, None)
        self._dismissed.pop(name, None)
        worker = self.workers.pop(name, None)
        if worker is not None:
            self._seats[worker.seat].pop(name)
        return worker

    def mark(self, worker: Worker, state: WorkerState) -> None:
        worker.state = state
        self._sort(worker)

    def give(self, worker: Worker, lease: EvalId | None) -> None:
        """Set the evaluation that a worker runs; None if it runs none."""
        worker.lease = lease
        self._sort(worker)

    def dismiss(self, worker: Worker, reason: str) -> None:
        """Give a worker no more evaluations, and let it exit after its current one."""
        worker.dismissal = reason
        self._dismissed[worker.name] = worker
        self.mark(worker, "draining")

    def _sort(self, worker: Worker) -> None:
        if worker.state == "ready" and worker.lease is None:
            self._idle[worker.name] = worker
        else:
            self._idle.pop(worker.name, None)

    def seen(self, name: str, now: float) -> bool:
        """Record that a message came from a worker; False if the worker is unknown."""
        if name in self.workers:
            self.workers[name].seen_at = now
        return name in self.workers

    def in_seat(self, seat: str) -> list[Worker]:
        return list(self._seats.get(seat, {}).values())

    def by_name_or_seat(self, who: str) -> list[Worker]:
        """Workers with this name or in this seat."""
        by_name = self.workers.get(who)
        return [by_name] if by_name is not None else self.in_seat(who)

    def dismissed_and_done(self) -> list[Worker]:
        """Dismissed workers that hold no evaluation."""
        return [worker for worker in self._dismissed.values() if worker.lease is None]

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def first_idle(self) -> Worker | None:
        """The worker that has been idle longest; None if none is idle."""
        return next(iter(self._idle.values()), None)

    def silent_since(self, time: float) -> list[Worker]:
        """Workers whose last message came before `time`."""
        return [worker for worker in self.workers.values() if worker.seen_at < time]

    def count_result(self, name: str, result: Result) -> None:
        self.num_tokens += sum(episode.tokens_in + episode.tokens_out for episode in result.episodes)
        if (worker := self.workers.get(name)) is not None:
            worker.num_results += 1
            worker.seconds_busy += _seconds(result)
            worker.seconds_useful += _seconds(result) if result.error is None else 0.0

    def count_useless(self, name: str | None, result: Result) -> None:
        """Count a valid result that will not be used."""
        if (worker := self.workers.get(name or "")) is not None:
            worker.seconds_useful -= _seconds(result)


def _seconds(result: Result) -> float:
    return result.seconds_update + result.seconds_perturb + result.seconds_rollout
