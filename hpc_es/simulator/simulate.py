"""Simulate a run under a virtual clock: the real head core, with workers that only take time.

The simulation covers workers that start, catch up, evaluate, report, are preempted and come back; the head's arena,
which does one job at a time; and messages in transit. All decisions are made by `head/core.py` itself, and the real
ledger folds its records; there are no sockets, no parameters and no files. Fitness is a pure function of the member's
seed.

Invariant: an evaluation costs one event, and the cost per event does not grow with the number of workers, so even for
ten thousand workers only the core's decisions take time.

Heartbeats are not simulated: live workers never become silent. When a worker vanishes without a message, the head gets
a Goodbye `transport.heartbeat_timeout` later, which the core treats like silence.
"""

import heapq
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, get_args

from pydantic import ValidationError

from hpc_es import methods
from hpc_es.allowance import Allowance
from hpc_es.config.schema import Config
from hpc_es.errors import ConfigError, RunFailed
from hpc_es.head.core import Core
from hpc_es.head.events import CheckpointSaved, Event, Received, Tick, Trained, Updated
from hpc_es.head.instructions import Append, Exit, Instruction, SaveCheckpoint, Send, Train, Update
from hpc_es.head.ledger import Ledger
from hpc_es.methods.base import Tasks
from hpc_es.records import Assignment, Episode, EvalId, Purpose, Result
from hpc_es.results import fitness_of
from hpc_es.simulator.durations import Durations, uniform
from hpc_es.simulator.result import SecondsTally, SimulationResult
from hpc_es.store import records as journal
from hpc_es.transport import messages

NEVER_S = 1e15
TICK_S = 0.5
MAX_LOSSES = 100
"""Evaluations lost per worker and member without a commit before the simulation gives up."""

_KEYS_OF_MODE = {"sync": (), "natural": ("max_lag", "overdue"), "controlled": ("lag", "share"), "staircase": ()}


@dataclass(frozen=True)
class Preemption:
    """Preempts workers after an exponential lifetime; their jobs wait in the queue before they start again."""

    lifetime_s: float
    """Mean lifetime, counted from the moment a worker is connected."""
    requeue_s: float = 60.0
    """Seconds from the preemption to the next launch; the start itself takes further time."""
    silent: bool = False
    """Whether workers are killed without warning; otherwise a worker hands back its work and says goodbye within its
    grace time."""


def simulate(
    config: Config, durations: Durations, *, num_workers: int, preemption: Preemption | None = None
) -> SimulationResult:
    """Simulate the whole run of `config`. Errors: RunFailed when it cannot finish."""
    return Simulation(config, durations, num_workers, preemption).run()


def with_mode(config: Config, mode: str) -> Config:
    """The configuration in another mode: config (its own), sync, natural:MAX_LAG[:hold|discard], controlled:LAG:SHARE,
    or staircase. Errors: ConfigError."""
    if mode == "config":
        return config
    name, *values = mode.split(":")
    keys = _KEYS_OF_MODE.get(name)
    if keys is None or len(values) > len(keys):
        raise ConfigError(
            f"the mode {mode!r} is unknown: must be config (its own), sync, natural:MAX_LAG, natural:MAX_LAG:hold, "
            "controlled:LAG:SHARE, or staircase. For a tail, or a staircase with other steps, use a preset file: "
            "extend CONFIG by it (extends: [CONFIG, configs/staleness/16x16/tail-32.yaml]) and simulate the mode config"
        )
    staleness = {"mode": name, **dict(zip(keys, values, strict=False))}
    try:
        return Config.model_validate({**config.model_dump(), "staleness": staleness})
    except ValidationError as error:
        problems = "; ".join(f"{problem['loc'][-1]}: {problem['msg']}" for problem in error.errors())
        raise ConfigError(f"the mode {mode!r} is not possible: {problems}") from None


def mode_name(config: Config) -> str:
    """The configuration's mode in the format of `with_mode`."""
    values = config.staleness.model_dump()
    return ":".join(str(values[key]) for key in ("mode", *_KEYS_OF_MODE.get(values["mode"], ())))


@dataclass
class _Worker:
    """One incarnation of a worker."""

    name: str
    number: int
    incarnation: int
    version: int = 0
    """Version of the worker's arena."""
    holding: EvalId | None = None
    started: float = 0.0
    gone: bool = False


class Simulation:
    """A simulated run. Events are (time, number, function, argument); the number orders events of the same time."""

    def __init__(
        self, config: Config, durations: Durations, num_workers: int, preemption: Preemption | None = None
    ) -> None:
        without_timeout = config.transport.model_copy(update={"heartbeat_timeout": NEVER_S})
        self.config = config.model_copy(update={"transport": without_timeout})
        self.heartbeat_timeout = config.transport.heartbeat_timeout
        self.durations, self.num_workers, self.preemption = durations, num_workers, preemption
        ledger = Ledger()
        ledger.apply(journal.Started(0.0, journal.SCHEMA_VERSION, config.run.name, 1, 0, "{}", _digest(0), {}, ""))
        tasks = Tasks(config.es.tasks_per_member, config.eval.num_tasks)
        self.core = Core(self.config, ledger, methods.make(self.config, tasks), config_digest="")
        self.core.joins = Allowance(10**9, 0)  # no limit, because simulated workers do not flood the head
        self.tally = SecondsTally()
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._num_scheduled = self._num_handled = self._num_preemptions = self._losses_in_a_row = 0
        self._workers: dict[str, _Worker] = {}
        self._num_holding = 0
        self._arena_free_at = 0.0
        self._checkpoints = [0]
        self._exit: Exit | None = None

    # --- time -------------------------------------------------------------------------------------------------

    def run(self) -> SimulationResult:
        """Simulate until the core exits. Errors: RunFailed when the run cannot finish, or when no event is left."""
        began = time.perf_counter()
        self._perform(self.core.start(0.0))
        for number in range(self.num_workers):
            self._at(self.durations.start(number, 0), self._join, (number, 0))
        while self._exit is None:
            if not self._events:
                raise RunFailed(self._stuck("no event is left"))
            moment, _, function, argument = heapq.heappop(self._events)
            self._pass_time(moment)
            function(argument)
        if not self._exit.finished:
            raise RunFailed(self._stuck(self._exit.reason))
        return self.tally.result(
            mode=mode_name(self.config),
            num_workers=self.num_workers,
            population=self.config.es.population,
            now=self.now,
            num_preemptions=self._num_preemptions,
            num_events=self._num_handled,
            compute_s=time.perf_counter() - began,
        )

    def _at(self, moment: float, function: Callable[[Any], None], argument: Any) -> None:
        self._num_scheduled += 1
        heapq.heappush(self._events, (moment, self._num_scheduled, function, argument))

    def _pass_time(self, moment: float) -> None:
        seconds, self.now = moment - self.now, moment
        tally, ledger = self.tally, self.core.ledger
        idle = seconds * (len(self._workers) - self._num_holding)
        tally.connected += seconds * len(self._workers)
        tally.holding += seconds * self._num_holding
        if ledger.version >= self.config.run.num_updates:
            tally.end += idle
        elif ledger.version not in ledger.digests and len(tally.pending) >= self.config.es.population:
            tally.arena += idle
        else:
            tally.waiting += idle

    def _stuck(self, what: str) -> str:
        ledger = self.core.ledger
        num_queued = ledger.num_queued(get_args(Purpose))
        return (
            f"the simulated run ends at version {ledger.version} of {self.config.run.num_updates}, after "
            f"{self.now:g} s: {what} ({len(self._workers)} workers connected, {num_queued} evaluations queued, "
            f"{self._num_holding} held)"
        )

    # --- the head ---------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        self._num_handled += 1
        self._perform(self.core.handle(event, self.now))

    def _perform(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Send(worker=name, message=messages.Work(assignment=assignment)):
                    self._work(name, assignment)
                case Send(worker=name, message=messages.Leave(finished=False)):
                    self._dismiss(name)
                case Append(record=record):
                    if isinstance(record, journal.Committed):
                        self._losses_in_a_row = 0
                    self.tally.add(record)
                case Update(commit=commit):
                    seconds = self.durations.head_update(commit.version)
                    updated = Updated(commit.version, _digest(commit.version), 1.0, seconds)
                    self._in_arena(seconds, self._handle, updated)
                case Train(version=version):
                    seconds = self.durations.head_update(version)  # nothing is known of the trainer's time
                    self._at(self.now + seconds, self._handle, Trained(version, _digest(version), 1.0, seconds))
                case SaveCheckpoint(version=version):
                    self._in_arena(self.durations.checkpoint(version), self._checkpoint_saved, version)
                case Exit():
                    self._exit = instruction

    def _in_arena(self, seconds: float, function: Callable[[Any], None], argument: Any) -> None:
        """Schedule a job of the arena, which has one thread, after all earlier jobs."""
        self._arena_free_at = max(self._arena_free_at, self.now) + seconds
        self._at(self._arena_free_at, function, argument)

    def _checkpoint_saved(self, version: int) -> None:
        self._checkpoints = [0, *[*self._checkpoints[1:], version][-self.config.checkpoint.keep :]]
        self._handle(CheckpointSaved(version))

    # --- workers ------------------------------------------------------------------------------------------------

    def _join(self, who: tuple[int, int]) -> None:
        number, incarnation = who
        seat = f"seat-{number}"
        worker = _Worker(f"{seat}.{incarnation}", number, incarnation)
        self._workers[worker.name] = worker
        if self.preemption is not None:
            u = uniform(self.durations.seed, "lifetime", number, incarnation)
            self._at(self.now + self.preemption.lifetime_s * -math.log(u), self._preempt, worker)
        self._handle(Received(messages.Hello(worker.name, seat, "", 0, _digest(0), {})))

    def _work(self, name: str, assignment: Assignment) -> None:
        """Simulate one evaluation, from its lease until its result arrives."""
        worker = self._workers.get(name)
        if worker is None:
            return  # the worker has vanished, and the head does not know yet
        eval_id, durations = assignment.eval_id, self.durations
        worker.holding, worker.started = eval_id, self.now + durations.dispatch(eval_id)
        self._num_holding += 1
        update = self._catch_up(worker, eval_id)
        rollout = durations.evaluation(eval_id, assignment.purpose)
        episodes = _episodes(assignment)
        result = Result(eval_id, fitness_of(episodes), episodes, _digest(eval_id.version), update, 0.0, rollout)
        finished = worker.started + update + rollout
        arrives = finished + durations.report(eval_id)
        report = messages.Report(name, result, arrives - worker.started, arrives - finished)
        self._at(arrives, self._report, (worker, report))
        lease_ends = self.now + self.config.transport.lease_timeout
        if arrives > lease_ends:
            self._at(lease_ends + TICK_S, self._handle, Tick())

    def _catch_up(self, worker: _Worker, eval_id: EvalId) -> float:
        """Bring the worker's arena to the version, as real workers do; return the seconds it takes."""
        version = eval_id.version
        newest = max(saved for saved in self._checkpoints if saved <= version)
        replaying_takes = (newest - worker.version) * self.durations.usual_catch_up
        load = worker.version > version or replaying_takes > self.durations.costs.load
        num_missed = version - (newest if load else worker.version)
        worker.version = version
        return self.durations.catch_up(eval_id, num_missed, load=load)

    def _report(self, arrival: tuple[_Worker, messages.Report]) -> None:
        worker, report = arrival
        if worker.gone:
            return
        worker.holding = None
        self._num_holding -= 1
        self._handle(Received(report))

    def _preempt(self, worker: _Worker) -> None:
        if worker.gone:
            return
        assert self.preemption is not None
        self._num_preemptions += 1
        holding = worker.holding
        self._vanish(worker, self.preemption.requeue_s)
        goodbye = Received(messages.Goodbye(worker.name, "preempted"))
        if self.preemption.silent:
            self._at(self.now + self.heartbeat_timeout, self._handle, goodbye)
            return
        if holding is not None:
            self._handle(Received(messages.HandBack(worker.name, holding, "preempted")))
        self._handle(goodbye)

    def _dismiss(self, name: str) -> None:
        """The head told a worker to exit because its lease ran out; its launcher restarts it."""
        worker = self._workers.get(name)
        if worker is not None:
            self._vanish(worker, 0.0)

    def _vanish(self, worker: _Worker, requeue_s: float) -> None:
        worker.gone = True
        del self._workers[worker.name]
        if worker.holding is not None:
            self._num_holding -= 1
            self._losses_in_a_row += 1
            self.tally.lose(self.now - worker.started)
        if self._losses_in_a_row > MAX_LOSSES * (self.num_workers + self.config.es.population):
            raise RunFailed(self._stuck("evaluations keep outlasting workers or transport.lease_timeout"))
        incarnation = worker.incarnation + 1
        back_at = self.now + requeue_s + self.durations.start(worker.number, incarnation)
        self._at(back_at, self._join, (worker.number, incarnation))


def _episodes(assignment: Assignment) -> tuple[Episode, ...]:
    """Episodes with a reward only for the first task, which gives members different fitness, so that the head's checks
    accept it."""
    reward = uniform(0, assignment.member.seed) if assignment.member else 0.5
    first, *others = assignment.tasks
    return (_episode(first, reward), *map(_unrewarded, others))


def _episode(task: int, reward: float) -> Episode:
    return Episode(task, reward, False, 1, 0, 0, 0, 0.0, 0.0, "terminated")


@lru_cache(maxsize=4096)
def _unrewarded(task: int) -> Episode:
    return _episode(task, 0.0)


def _digest(version: int) -> int:
    """A stand-in for the digest of a version, the same for head and workers."""
    return version + 1
