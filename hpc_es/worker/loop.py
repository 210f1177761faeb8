"""A worker as a process: one engine, one assignment at a time, many episodes at once.

Consumes assignments, commit records (by broadcast, announcement or request) and orders of the head; produces
results, each resent until it is acknowledged. It waits for the head's next message; an evaluation runs beside that, so
announcements and orders are heard at any time. Invariant: theta moves only between evaluations, and only when an
assignment needs another version.
"""

import asyncio
import logging
import os
import signal
import time
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path

from hpc_es import envs, methods
from hpc_es.config.load import config_digest, load
from hpc_es.config.schema import Config
from hpc_es.engine import start_engine
from hpc_es.engine.base import Engine
from hpc_es.errors import ConfigError, EnvError, HeadSilent, TransportError
from hpc_es.noise.reference import TABLE_CRC32
from hpc_es.params import check_memory
from hpc_es.params.catch_up import full_work
from hpc_es.paths import RunPaths
from hpc_es.place import Place
from hpc_es.records import Assignment, EvalId, Result
from hpc_es.results import fitness_of
from hpc_es.traces import Trace, write_trace
from hpc_es.transport import limits, messages
from hpc_es.transport.backends import NOTHING, own_offer
from hpc_es.transport.collective import WorkerCollective, sha256
from hpc_es.transport.control import HeadClient
from hpc_es.transport.secrets import load_secrets
from hpc_es.version import __version__
from hpc_es.worker import seat as seats
from hpc_es.worker.arrival import Arrival
from hpc_es.worker.budget import Budget
from hpc_es.worker.catch_up import CatchUp, Pending
from hpc_es.worker.lookout import SILENCE_S, AskAboutHead, no_scheduler, pauses, verdict
from hpc_es.worker.rollout import Performance, Player
from hpc_es.worker.trajectories import TrajectoryFile

log = logging.getLogger(__name__)

FAREWELL_S = 2.0
"""How long a leaving worker waits for the acknowledgement of what it has reported."""
LOOKOUT_S = 5.0
"""How often the worker looks whether its head is silent."""
MAX_QUESTIONS = 5
"""How often a worker that has lost its head asks the scheduler, until it gets an answer."""


@dataclass(frozen=True)
class Ended:
    """Why the worker stops."""

    reason: str
    finished: bool
    """Whether the run is finished or this worker was drained."""
    out_of_time: bool = False
    """Its job should be queued again."""


def run_worker(
    run_dir: Path,
    seat: str,
    *,
    local: bool = False,
    ends_at: float | None = None,
    ask_about_head: AskAboutHead = no_scheduler,
) -> int:
    """Run a worker until the run ends. Exit code 0: the run is finished or this worker was drained, 3: dismissed or
    stopped before that, 4: its job is nearly over (SIGUSR2, or no time for another evaluation) and should be queued
    again.

    `local`: this machine's CPUs serve all workers of the run. `ends_at`: when the job ends, in seconds since the epoch.
    `ask_about_head` is called while the head is silent (see lookout.py). Errors: ConfigError when the head refuses this
    worker, TransportError when there is no head for too long, ModelError, EngineError.
    """
    paths = RunPaths(run_dir.resolve())  # an environment may change the working directory
    config = load(paths.config).config
    load_secrets(paths)  # wrong keys are reported before a model is loaded
    threads = config.engine.threads or _share_of_cpus(config, local)
    ended = asyncio.run(_work(paths, config, seat, threads, Budget(ends_at), ask_about_head))
    log.info("worker ends: %s", ended.reason)
    if ended.finished:
        return 0
    return 4 if ended.out_of_time else 3


async def _work(
    paths: RunPaths,
    config: Config,
    seat: str,
    threads: int,
    budget: Budget,
    ask_about_head: AskAboutHead,
) -> Ended:
    model, optimiser = config.model, config.es.optimiser.kind
    if Path(model.path).exists():  # the name of an endpoint's model is no path
        model = model.model_copy(update={"path": str(Path(model.path).resolve())})
    check_memory(model.path, include=model.include, exclude=model.exclude, optimiser=optimiser)
    if config.es.rank and own_offer().gpu:
        raise ConfigError(
            f"es.rank={config.es.rank} is not implemented on GPUs yet, and this worker has one: use es.rank=0, or hide "
            "the GPUs (CUDA_VISIBLE_DEVICES=)"
        )
    engine = await start_engine(
        model, config.engine, threads=threads, optimiser=optimiser, traces=methods.wants_traces(config)
    )
    try:
        return await Worker(paths, config, seat, engine, budget, ask_about_head).run()
    finally:
        await engine.close()


def _share_of_cpus(config: Config, local: bool) -> int:
    """Threads for one engine."""
    usable = len(os.sched_getaffinity(0))
    return max(1, usable // config.launch.workers if local else min(usable, Place.here().cpus or usable))


class Worker:
    def __init__(
        self,
        paths: RunPaths,
        config: Config,
        seat: str,
        engine: Engine,
        budget: Budget,
        ask_about_head: AskAboutHead = no_scheduler,
    ) -> None:
        self.paths, self.config, self.seat, self.engine = paths, config, seat, engine
        self.budget = budget
        self._ask_about_head = ask_about_head
        self._draining = self._has_joined = False
        self._began = 0.0
        self.place = Place.here()
        attempt = f".{self.place.attempt}" if self.place.job else ""
        self.name = f"{seat}{attempt}.{uuid.uuid4().hex[:8]}"
        kept = TrajectoryFile(paths.trajectory_file(self.name), self.name)
        self._traces = methods.wants_traces(config)
        self.player = Player(config, engine, lambda kind: envs.make_for(config, kind), kept.append)
        self.pending = Pending(engine, self._fetch)
        usual_work = full_work(config.es.population, config.es.subspaces)
        self.catch_up = CatchUp(
            engine,
            paths,
            known=self.pending.commits,
            obtain=self.pending.obtain,
            usual_work=usual_work,
            trains=methods.find(config.method).trains,
        )
        self._evaluation: asyncio.Task[None] | None = None
        self._holding: EvalId | None = None
        self._side_jobs: set[asyncio.Task[None]] = set()
        self._probed = 0
        self._inbox: asyncio.Queue[messages.AnyMessage | Ended | BaseException] = asyncio.Queue()
        self._offer = NOTHING if config.transport.backend == "none" else own_offer()
        self._collective = WorkerCollective(config.transport.collective_timeout, config.transport.interface)
        self._arrival = Arrival(engine, config.transport, self._tell_arrived)
        self._in_collective = (
            asyncio.Lock()
        )  # calls of the collective block; they run one by one, in the order of the head's messages

    async def run(self) -> Ended:
        """Work until the head sends Leave, or a signal arrives. Errors: as in run_worker."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._inbox.put_nowait, messages.Leave(number.name, False))

        loop.add_signal_handler(signal.SIGUSR2, self._last_call)
        self._beside(self._watch_head())

        def deliver(item: messages.AnyMessage | BaseException) -> None:
            loop.call_soon_threadsafe(self._inbox.put_nowait, item)

        self.client = HeadClient(
            self.paths,
            self.name,
            heartbeat_s=self.config.transport.heartbeat,
            head_timeout_s=self.config.transport.head_timeout,
            make_hello=lambda generation: self._hello(),
            make_heartbeat=lambda: messages.Heartbeat(self.name),
            on_message=deliver,
            on_lost=deliver,
            largest=limits.to_head(self.config),
        )
        try:
            while True:
                item = await self._inbox.get()
                if isinstance(item, HeadSilent):
                    self._beside(self._decide_about(item))
                    continue
                if isinstance(item, BaseException):
                    raise item
                if isinstance(item, Ended):
                    return item
                ended = await self._handle(item)
                if ended is not None:
                    return ended
        finally:
            await self._abandon("the worker ends")
            await self._arrival.end()
            await asyncio.to_thread(self.client.flush, FAREWELL_S)
            self.client.send(messages.Goodbye(self.name, "the worker ends"))
            self.client.close()
            self._collective.leave()

    async def _handle(self, message: messages.AnyMessage) -> Ended | None:
        match message:
            case messages.Unknown():
                self.client.send(self._hello())
            case messages.Welcome():
                if not self._has_joined:
                    self._has_joined = True
                    seats.note(self.paths, self.seat, "working", worker=self.name)
            case messages.Refused(reason=reason):
                raise ConfigError(f"the head refuses this worker: {reason}")
            case messages.Work(assignment=assignment, context=context):
                self._begin(assignment, context)
            case messages.Announce():
                self._announced(message)
            case messages.Records(commits=commits):
                self.pending.keep(commits)
            case messages.OpenEpoch():
                self._beside(self._join(message))
            case messages.OpenTransfer():
                self._take_theta(message)
            case messages.Rebuild(version=version):
                log.error("the head found other bits at version %d: rebuilding the arena", version)
                await self._abandon("the arena is being rebuilt")
                await self._arrival.end()
                await self.engine.load(None)
                self.client.send(self._hello())
            case messages.Leave(reason=reason, finished=finished, drained=drained):
                return Ended(reason, finished or drained)
        return None

    def _hello(self) -> messages.Hello:
        facts = {
            **self.engine.info.facts,
            **self.place.facts,
            "hpc_es": __version__,
            "config": config_digest(self.config),
            "noise table": f"{TABLE_CRC32:08x}",
        }
        return messages.Hello(
            worker=self.name,
            seat=self.seat,
            host=self.place.node,
            pid=os.getpid(),
            base_digest=self.engine.info.base_digest,
            facts=facts,
            holding=self._holding,
            draining=self._draining,
            collective=self._offer.backend,
            gpu=self._offer.gpu,
            version=self.engine.version,
        )

    # --- commits --------------------------------------------------------------------------------------------

    def _announced(self, announce: messages.Announce) -> None:
        if announce.record is not None:
            self.pending.keep((messages.decode_commit(announce.record),))
        else:
            self._beside(self._receive(announce))

    async def _receive(self, announce: messages.Announce) -> None:
        try:
            async with self._in_collective:
                data = await asyncio.to_thread(self._collective.receive, announce.epoch, announce.length)
        except TransportError as error:
            log.warning("version %d did not come by broadcast: %s", announce.version, error)
        else:
            if sha256(data) == announce.sha256:
                self.pending.keep((messages.decode_commit(data),))
                return
            log.warning("version %d came damaged by broadcast", announce.version)
        self._fetch(announce.version, announce.version)

    def _fetch(self, first: int, last: int) -> None:
        self.client.send(messages.Fetch(self.name, first, last))

    def _take_theta(self, call: messages.OpenTransfer) -> None:
        if self._evaluation is None or self._evaluation.done():
            self._arrival.begin(call).add_done_callback(self._surface)
        else:
            self._tell_arrived(call, "an evaluation is running")

    def _tell_arrived(self, call: messages.OpenTransfer, trouble: str) -> None:
        self.client.send(messages.Arrived(self.name, call.number, not trouble, trouble))

    async def _join(self, opening: messages.OpenEpoch) -> None:
        try:
            async with self._in_collective:
                await asyncio.to_thread(self._collective.join, opening)
        except TransportError as error:
            self.client.send(messages.EpochReady(self.name, opening.epoch, ok=False, detail=str(error)))
        else:
            self.client.send(messages.EpochReady(self.name, opening.epoch, ok=True))

    # --- evaluations ----------------------------------------------------------------------------------------

    def _begin(self, assignment: Assignment, context: str) -> None:
        if assignment.eval_id == self._holding:
            return
        if self._evaluation is not None and not self._evaluation.done():
            refusal = messages.HandBack(self.name, assignment.eval_id, "another evaluation is running", self._holding)
            self.client.send(refusal)
            return
        if self._draining or not self.budget.fits():
            self.client.send(messages.HandBack(self.name, assignment.eval_id, "no time is left for it"))
            self._last_call()
            return
        self._began = time.monotonic()
        self._holding = assignment.eval_id
        self._evaluation = asyncio.create_task(self._evaluate(assignment, context))
        self._evaluation.add_done_callback(self._surface)

    async def _evaluate(self, assignment: Assignment, context: str) -> None:
        """Measure one candidate and report the result. A failing engine ends the worker; the evaluation is not void."""
        started = time.monotonic()
        await self._arrival.settled()
        await self._probe_if_due(assignment.version)
        await self.catch_up.go_to(assignment.version)
        updated = time.monotonic()
        await self.engine.perturb(assignment.member)
        perturbed = time.monotonic()
        played, trace, error = Performance(()), "", None
        try:
            played = await self.player.perform(assignment, context)
            trace = await self._write_trace(assignment, played)
        except EnvError as fault:
            error = str(fault)
        except OSError as fault:
            played, error = Performance(()), f"the trace cannot be written to {self.paths.traces}: {fault}"
        finished = time.monotonic()
        result = Result(
            eval_id=assignment.eval_id,
            fitness=fitness_of(played.episodes),
            episodes=played.episodes,
            digest=self.engine.digest,
            seconds_update=updated - started,
            seconds_perturb=perturbed - updated,
            seconds_rollout=finished - perturbed,
            error=error,
            text=played.text,
            trace=trace,
        )
        now = time.monotonic()
        self.client.send(messages.Report(self.name, result, now - started, now - finished))
        self._holding = None  # from here on the client says that it is reported
        self.budget.note(now - started)
        if self._draining or not self.budget.fits():
            self._last_call()

    async def _write_trace(self, assignment: Assignment, played: Performance) -> str:
        """The hash of the trace; empty if none is wanted. Errors: OSError."""
        if not self._traces:
            return ""
        trace = Trace(assignment.eval_id, self.engine.digest, played.traces)
        return await asyncio.to_thread(write_trace, self.paths.traces, trace)

    def _last_call(self) -> None:
        """Take no more work, and leave after the running evaluation, or at once if it would not end in time."""
        if not self._draining:
            self._draining = True
            self.client.send(messages.Draining(self.name, "its job is nearly over"))
        elapsed = time.monotonic() - self._began
        if self._holding is None or not (self.budget.end_is_near and self.budget.fits(elapsed)):
            self._inbox.put_nowait(Ended("its job is nearly over", finished=False, out_of_time=True))

    async def _watch_head(self) -> None:
        """While the head is silent, ask whether it will ever come back."""
        pause = pauses()
        while True:
            await asyncio.sleep(LOOKOUT_S)
            if self.client.silence_s < SILENCE_S:
                pause = pauses()
                continue
            await asyncio.sleep(next(pause))
            if self.client.silence_s < SILENCE_S:
                continue
            outlook = await asyncio.to_thread(self._ask_about_head, self.client.silence_s)
            if outlook.state == "gone":
                self._inbox.put_nowait(Ended(f"the head is gone: {outlook.detail}", finished=False))
                return

    async def _decide_about(self, silence: HeadSilent) -> None:
        """No head was heard for transport.head_timeout: leave, queue again behind it, wait once more, or fail."""
        limit = self.config.transport.head_timeout
        for _ in range(MAX_QUESTIONS):
            outlook = await asyncio.to_thread(self._ask_about_head, self.client.silence_s)
            if outlook.state != "unknown" or not outlook.job:
                break
            await asyncio.sleep(next(pauses()))  # another worker is asking, or the controller does not answer
        if self.client.silence_s < limit:
            self.client.wait_again()  # it came back meanwhile
            return
        match verdict(outlook, limit):
            case "leave":
                self._inbox.put_nowait(Ended(f"the head is gone: {outlook.detail}", finished=False))
            case "requeue":
                reason = f"the head waits in the queue: {outlook.detail}"
                self._inbox.put_nowait(Ended(reason, finished=False, out_of_time=True))
            case "wait":
                log.info("waiting for the head: %s", outlook.detail)
                self.client.wait_again()
            case "fail":
                raise TransportError(str(silence))  # HeadSilent would be decided about again

    async def _probe_if_due(self, version: int) -> None:
        """Compare the live weights with the arena, while they are still those of the last evaluation."""
        every = self.config.engine.probe_every
        if every and version >= self._probed + every:
            await self.engine.probe()
            self._probed = version

    async def _abandon(self, reason: str) -> None:
        """Stop the running evaluation, if any, and give it back."""
        if self._evaluation is None or self._evaluation.done():
            return
        held = self._holding
        self._evaluation.cancel()
        await asyncio.gather(self._evaluation, return_exceptions=True)
        if held is not None:
            self._holding = None
            self.client.send(messages.HandBack(self.name, held, reason))

    def _beside(self, job: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(job)
        self._side_jobs.add(task)
        task.add_done_callback(self._side_jobs.discard)
        task.add_done_callback(self._surface)

    def _surface(self, task: "asyncio.Task[None]") -> None:
        """End the worker with the error of a task that is not awaited."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._inbox.put_nowait(error)
