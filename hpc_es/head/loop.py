"""The head as a process: carries out what the core decides.

It consumes control messages, finished arena work, failed broadcasts and signals; it produces journal records, messages
and broadcasts. It waits for messages only, until the next tick. Order within a batch: append every record, make them
durable with one fsync, then send messages. So the head sends nothing that a crash could undo.
"""

import gc
import logging
import platform
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from hpc_es import methods
from hpc_es.config.load import config_digest, load, refuse_another
from hpc_es.config.schema import Config
from hpc_es.envs.manifest import recorded_tasks
from hpc_es.errors import ConfigError, StoreError, Superseded, TransportError
from hpc_es.head.core import Core
from hpc_es.head.events import (
    CheckpointSaved,
    Event,
    GroupFailed,
    GroupUp,
    NoWorkersLeft,
    Received,
    StopAsked,
    Tick,
    TransferEnded,
    TransferReady,
    Updated,
)
from hpc_es.head.instructions import (
    Append,
    Broadcast,
    Exit,
    Instruction,
    OpenGroup,
    SaveCheckpoint,
    Send,
    Train,
    Transfer,
    Update,
)
from hpc_es.head.ledger import Ledger
from hpc_es.head.log_lines import log_record
from hpc_es.head.status import Anchor, status
from hpc_es.head.training import Training
from hpc_es.params import checkpoint, num_bytes, numa
from hpc_es.params.arena import Arena
from hpc_es.params.head_update import Apply, head_update, pin_arena
from hpc_es.params.rebuild import bring_to
from hpc_es.paths import RunPaths
from hpc_es.place import Place
from hpc_es.quoting import quote_error
from hpc_es.records import Commit, Weights
from hpc_es.store import records as journal
from hpc_es.store.clock import Clock
from hpc_es.store.hdf5 import Hdf5Writer
from hpc_es.store.journal import JournalWriter, fold_journal, read_journal
from hpc_es.traces import remove_traces
from hpc_es.transport import limits
from hpc_es.transport.address import resolve_host
from hpc_es.transport.backends import NOTHING, choose_backend, own_offer
from hpc_es.transport.collective import EpochFailed, EpochUp, HeadCollective
from hpc_es.transport.control import HeadServer
from hpc_es.transport.messages import AnyMessage, DrainRequest, Leave, StatusRequest, StopRequest
from hpc_es.version import __version__

log = logging.getLogger(__name__)

TICK_S = 0.5
NO_WORKERS_CHECK_S = 30.0
"""How often a head without workers checks whether one can still join."""
GC_THRESHOLD = 100_000
"""New objects between two garbage collections. A head keeps most of its objects, so that collections find little."""


def workers_may_join() -> str | None:
    """Default of `workers_are_gone`: a worker may always join."""
    return None


def run_head(run_dir: Path, *, local: bool, workers_are_gone: Callable[[], str | None] = workers_may_join) -> int:
    """Run the head of a run until it ends, and return its exit code.

    Exit codes: 0, the run is finished; 3, it was stopped; 1, it failed; 4, the time limit of the head's job is near
    (SIGUSR2), and the job should be queued again.

    local: all workers run on this machine; then loopback is a suitable address, and SIGTERM stops the workers too. On a
    cluster, SIGTERM may come from a scheduler that will restart the job; then the workers wait for the next head, and
    check with Slurm whether there will be one.
    workers_are_gone: called while there are no workers; returns why none will join, or None.

    Errors: ConfigError, ModelError, StoreError (Superseded if a newer head has taken over), RunFailed.
    """
    gc.set_threshold(GC_THRESHOLD)
    paths = RunPaths(run_dir)
    config = load(paths.config).config
    with Head(paths, config, local=local, workers_are_gone=workers_are_gone) as head:
        outcome = head.run()
    log.info("the head exits: %s", outcome.reason)
    if outcome.failed:
        return 1
    if outcome.finished:
        return 0
    return 4 if head.out_of_time else 3


class Head:
    """The head's loop, with the arena, journal, sockets and background threads that it needs."""

    def __init__(
        self,
        paths: RunPaths,
        config: Config,
        *,
        local: bool,
        workers_are_gone: Callable[[], str | None] = workers_may_join,
    ) -> None:
        self.paths, self.config, self.local = paths, config, local
        self._workers_are_gone = workers_are_gone
        self.out_of_time = False
        self.clock = Clock()
        self._events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        self._arena_pool = ThreadPoolExecutor(1, "arena")
        self._hdf5_pool = ThreadPoolExecutor(1, "hdf5")
        self._hdf5_job: Future[None] | None = None
        self._hdf5_at = 0.0
        self._unwritten: list[journal.AnyRecord] = []
        self._outcome: Exit | None = None

        tasks = recorded_tasks(paths.tasks, config)
        model, optimiser = config.model, config.es.optimiser.kind
        scope = (model.path, model.include, model.exclude)
        memory = numa.spread_memory(num_bytes(*scope, optimiser))
        self.arena = Arena.from_pretrained(*scope, memory, optimiser=optimiser)
        self._arena_memory = pin_arena(self.arena)
        self._apply = head_update(self.arena, config.head.device)
        self._refuse_another_run()
        self.journal = JournalWriter.create(paths, self._started, warn=log.warning)
        self.hdf5 = Hdf5Writer(paths, locking=config.store.hdf5_locking, warn=log.warning)
        ledger = Ledger()

        def add(record: journal.AnyRecord) -> None:
            ledger.apply(record)
            self._unwritten.append(record)

        fold_journal(paths.root, add, warn=log.warning)
        restored = restore(self.arena, self._apply, paths, ledger)
        host = resolve_host(config.transport, local)
        self.server = HeadServer(paths, self.journal.generation, config.run.name, host, largest=limits.to_head(config))
        transport = config.transport
        offer = NOTHING if transport.backend == "none" else own_offer()
        choose_backend(transport.backend, [offer])  # raise now if this process does not support the wanted backend
        self.collective = None
        if offer.backend != "none":
            self.collective = HeadCollective(
                host, transport.collective_timeout, self._collective_event, transport.interface
            )
        self.core = Core(config, ledger, methods.make(config, tasks), config_digest=config_digest(config), offer=offer)
        self._training = Training(paths, self._post)
        self._removes_traces = methods.find(config.method).needs_traces and not config.store.traces
        self.anchor = Anchor(config.run.name, self.journal.generation, self.clock(), ledger.version)
        self._no_workers_since = self.clock()
        if restored is not None:
            self._post(restored)

    def __enter__(self) -> "Head":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None and not isinstance(error, Superseded):  # if superseded, the workers follow the newer head
            for worker in self.core.crew.workers:
                self.server.send(worker.encode(), Leave(f"the head failed: {quote_error(error)}", False))
        self._training.close()
        self.server.close()
        if self.collective is not None:
            self.collective.close()
        self._arena_pool.shutdown()
        try:
            self.journal.close()  # first, so that run.h5 covers the journal's end mark too and is up to date
        finally:
            self._record_hdf5(final=True)
            self._hdf5_pool.shutdown()

    def _started(self, generation: int, predecessor_bytes: int) -> journal.Started:
        return journal.Started(
            time=self.clock(),
            schema_version=journal.SCHEMA_VERSION,
            run_id=self.config.run.name,
            generation=generation,
            predecessor_bytes=predecessor_bytes,
            config_json=self.config.model_dump_json(),
            base_digest=self.arena.base_digest,
            versions={"hpc_es": __version__, "python": platform.python_version(), "arena": self._arena_memory},
            host=Place.here().node,
        )

    def _refuse_another_run(self) -> None:
        """Check, before writing to the journal, that its configuration and base model are those of this head."""
        started = next(read_journal(self.paths.root, warn=log.warning), None)
        if not isinstance(started, journal.Started):
            return
        refuse_another(started.config_json, self.config, self.paths.config)
        if started.base_digest != self.arena.base_digest:
            raise ConfigError(
                f"model.path={self.config.model.path} has digest {self.arena.base_digest:016x}, but this run "
                f"began with {started.base_digest:016x}: restore that checkpoint, or choose another run.name"
            )

    # --- the loop ---------------------------------------------------------------------------------------------

    def run(self) -> Exit:
        """Run until the core's Exit instruction. Errors: StoreError, RunFailed, any error of the arena's thread."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self._signalled)
        self._perform(self.core.start(self.clock()))
        next_tick = self.clock() + TICK_S
        while self._outcome is None:
            instructions: list[Instruction] = []
            for peer, envelope in self.server.receive(max(next_tick - self.clock(), 0.0)):
                message = envelope.message
                if not isinstance(message, StatusRequest):
                    instructions += self.core.handle(Received(message), self.clock())
                if isinstance(message, StatusRequest | StopRequest | DrainRequest):
                    self.server.send(peer, status(self.core, self.anchor, self.clock()))
            for event in self._drain():
                instructions += self.core.handle(event, self.clock())
            if self.clock() >= next_tick:
                next_tick = self.clock() + TICK_S
                instructions += self._tick()
            self._perform(instructions)
            if self.core.stopping is not None and self.collective is not None:
                self.collective.end_transfers()  # the last checkpoint would have to wait for them
        return self._outcome

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self.out_of_time |= number == signal.SIGUSR2
        self._post(StopAsked(signal.Signals(number).name, comes_back=self.out_of_time or not self.local))

    def _tick(self) -> list[Instruction]:
        if self.journal.superseded():
            raise Superseded(f"a newer head than generation {self.journal.generation} has taken over {self.paths.root}")
        if self.clock() - self._hdf5_at >= self.config.store.hdf5_every:
            self._record_hdf5()
        self._look_for_workers()
        return self.core.handle(Tick(), self.clock())

    def _look_for_workers(self) -> None:
        """While there are no workers, check from time to time whether one can join; in a thread, as Slurm is slow."""
        if self.core.crew.workers:
            self._no_workers_since = self.clock()
        elif self.clock() - self._no_workers_since > NO_WORKERS_CHECK_S:
            self._no_workers_since = self.clock()
            threading.Thread(target=self._ask_for_workers, name="look-for-workers", daemon=True).start()

    def _ask_for_workers(self) -> None:
        if (reason := self._workers_are_gone()) is not None:
            self._post(NoWorkersLeft(reason))

    def _perform(self, instructions: Sequence[Instruction]) -> None:
        records = [instruction.record for instruction in instructions if isinstance(instruction, Append)]
        for record in records:
            self.journal.append(record)
        if records:
            self.journal.sync()
            self._unwritten += records
            self._remove_traces(records)
            for record in records:
                log_record(record)
        outgoing: dict[str, list[AnyMessage]] = {}
        for instruction in instructions:
            if isinstance(instruction, Send):
                outgoing.setdefault(instruction.worker, []).append(instruction.message)
        self.server.send_all(outgoing)
        for instruction in instructions:
            match instruction:
                case Broadcast(epoch=epoch, data=data) if self.collective is not None:
                    self.collective.broadcast(epoch, data)
                case OpenGroup(epoch=epoch, workers=workers, backend=backend) if self.collective is not None:
                    for worker, call in self.collective.open(epoch, workers, backend).items():
                        self.server.send(worker.encode(), call)
                case Transfer():
                    self._in_arena(self._transfer, instruction)
                case Update(commit=commit):
                    self._in_arena(self._update, commit)
                case Train():
                    self._training.begin(instruction)
                case SaveCheckpoint(version=version):
                    self._in_arena(self._save_checkpoint, version)
                case Exit():
                    self._outcome = instruction

    def _remove_traces(self, records: Sequence[journal.AnyRecord]) -> None:
        """Remove the traces of evaluations that these durable records show to be used or discarded."""
        if not self._removes_traces:
            return
        for record in records:
            match record:
                case journal.Committed(commit=commit):
                    done = [consumed.eval_id for consumed in commit.consumed]
                case journal.Voided(eval_id=eval_id) | journal.Discarded(eval_id=eval_id):
                    done = [eval_id]
                case _:
                    done = []
            for eval_id in done:
                remove_traces(self.paths.traces, eval_id)

    # --- work on other threads ----------------------------------------------------------------------------------

    def _update(self, commit: Commit) -> Event:
        if isinstance(commit.body, Weights):
            return self._load_trained(commit.version, commit.body)
        report = self._apply([commit])
        return Updated(commit.version, report.digest, report.update_norm, report.seconds)

    def _load_trained(self, version: int, body: Weights) -> Event:
        """Load the trainer's checkpoint into the arena. Errors: StoreError if its digest is not the reported one."""
        began = time.monotonic()
        self.arena.reload(checkpoint.adopt(self.paths, version))
        if (digest := self.arena.digest()) != body.digest:
            raise StoreError(f"the checkpoint of theta_{version} has digest {digest:016x}, not {body.digest:016x}")
        keep = max(self.config.checkpoint.keep, self.core.method.schedule().max_lag + 2)  # workers load these
        checkpoint.prune(self.paths, keep)
        return Updated(version, digest, body.update_norm, time.monotonic() - began)

    def _save_checkpoint(self, version: int) -> Event:
        checkpoint.write(self.paths, self.arena, self.core.ledger.digests[version])
        checkpoint.prune(self.paths, self.config.checkpoint.keep)
        return CheckpointSaved(version)

    def _transfer(self, transfer: Transfer) -> Event:
        """Send theta to joining workers. The next update of the arena waits for this, commits do not."""
        assert self.collective is not None
        assert self.arena.version == transfer.version
        memory = self.arena.memory.data.cast("B")
        try:
            sending = self.collective.sending(transfer.number, transfer.workers, transfer.backend)
            self._post(TransferReady(sending.calls(transfer.version, transfer.digest, len(memory))))
            sent = sending.send(memory)
        except TransportError as error:
            return TransferEnded((), 0, 0.0, str(error))
        return TransferEnded(sent.workers, sent.num_bytes, sent.seconds)

    def _in_arena(self, job: Any, argument: Any) -> None:
        def done(future: Future[Event]) -> None:
            self._post(future.exception() or future.result())

        self._arena_pool.submit(job, argument).add_done_callback(done)

    def _collective_event(self, event: EpochUp | EpochFailed) -> None:
        self._post(GroupUp(event.epoch) if isinstance(event, EpochUp) else GroupFailed(event.epoch, event.detail))

    def _post(self, event: Event | BaseException) -> None:
        """Pass the loop an event, or an error to raise. May be called from other threads and signal handlers."""
        self._events.put(event)
        self.server.wake()

    def _drain(self) -> list[Event]:
        events: list[Event] = []
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, BaseException):
                raise event
            events.append(event)
        return events

    def _record_hdf5(self, final: bool = False) -> None:
        """Update run.h5 in a separate thread. It is derived data, so a failure is only logged, and tried again."""
        if not final and self._hdf5_job is not None and not self._hdf5_job.done():
            return
        self._hdf5_at = self.clock()
        records, self._unwritten = self._unwritten, []
        self._hdf5_job = self._hdf5_pool.submit(self._write_hdf5, records, self.journal.size, final)

    def _write_hdf5(self, records: list[journal.AnyRecord], journal_bytes: int, final: bool) -> None:
        try:
            for record in records:
                self.hdf5.add(record)
            self.hdf5.flush(journal_bytes, last=final)
        except StoreError as error:
            log.warning("run.h5 was not written; the next attempt follows: %s", error)


def restore(arena: Arena, apply: Apply, paths: RunPaths, ledger: Ledger) -> Updated | None:
    """Bring the arena to the ledger's version. If its digest was never recorded, return the event that records it.

    Errors: VerifyError if the digest of the rebuilt parameters is not the recorded one.
    """
    version = ledger.version
    if version and isinstance(ledger.commits[version].body, Weights):
        checkpoint.adopt(paths, version)  # the previous head may have exited between the commit and this step
    checkpoint.set_aside(paths, ledger.digests)
    report = bring_to(version, arena, paths, ledger.commits, ledger.digests, apply)
    if version in ledger.digests:
        return None
    return Updated(version, report.digest, report.update_norm, report.seconds)
