"""The workers that are connected right now.

Volatile on purpose: a head that restarts meets its workers anew, through their Hello.
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
    """One incarnation of a worker. `lease` is the evaluation that it works on, even if that no longer counts."""

    name: str
    seat: str
    host: str
    offer: Offer
    joined_at: float
    seen_at: float
    state: WorkerState = "ready"
    dismissal: str | None = None
    """Why it is told to exit as soon as it holds no evaluation; None: it is not."""
    lease: EvalId | None = None
    rebuilds: int = 0
    refusals: int = 0
    """Number of its messages that broke a rule."""
    allowance: Allowance = field(default_factory=events_allowance)
    num_results: int = 0
    seconds_busy: float = 0.0
    seconds_useful: float = 0.0


@dataclass
class Crew:
    """The connected workers. Only methods here change `state`, `lease` and `dismissal`, to track idle ones."""

    workers: dict[str, Worker] = field(default_factory=dict)
    num_tokens: int = 0
    _idle: dict[str, Worker] = field(default_factory=dict)
    _dismissed: dict[str, Worker] = field(default_factory=dict)
    _seats: dict[str, dict[str, Worker]] = field(default_factory=dict)

    def join(self, hello: Hello, now: float) -> Worker:
        """Add a new incarnation, or update one that says Hello again."""
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
        """Set the evaluation that a worker works on; None: nothing."""
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
        """Note a sign of life; False if the worker is unknown."""
        if name in self.workers:
            self.workers[name].seen_at = now
        return name in self.workers

    def in_seat(self, seat: str) -> list[Worker]:
        return list(self._seats.get(seat, {}).values())

    def called(self, who: str) -> list[Worker]:
        """Workers with this seat or name."""
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
        return [worker for worker in self.workers.values() if worker.seen_at < time]

    def count_result(self, name: str, result: Result) -> None:
        self.num_tokens += sum(episode.tokens_in + episode.tokens_out for episode in result.episodes)
        if (worker := self.workers.get(name)) is not None:
            worker.num_results += 1
            worker.seconds_busy += _seconds(result)
            worker.seconds_useful += _seconds(result) if result.error is None else 0.0

    def count_useless(self, name: str | None, result: Result) -> None:
        """Count a good result that will not be used."""
        if (worker := self.workers.get(name or "")) is not None:
            worker.seconds_useful -= _seconds(result)


def _seconds(result: Result) -> float:
    return result.seconds_update + result.seconds_perturb + result.seconds_rollout
