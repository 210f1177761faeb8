"""The head's answer to a StatusRequest."""

from dataclasses import dataclass

from hpc_es.head.core import Core
from hpc_es.head.crew import Worker
from hpc_es.transport.messages import Status, WorkerStatus


@dataclass(frozen=True)
class Anchor:
    """Time and version at which this head started; rates are measured from there."""

    run_id: str
    generation: int
    time: float
    version: int


def status(core: Core, anchor: Anchor, now: float) -> Status:
    ledger, num_updates = core.ledger, core.config.run.num_updates
    elapsed = max(now - anchor.time, 1e-9)
    updates_done = ledger.version - anchor.version
    seconds_left = elapsed / updates_done * (num_updates - ledger.version) if updates_done else None
    eval_version = max(ledger.eval_fitness, default=None)
    return Status(
        run_id=anchor.run_id,
        generation=anchor.generation,
        state=_state(core),
        version=ledger.version,
        num_updates=num_updates,
        fitness=ledger.fitness,
        eval_fitness=None if eval_version is None else ledger.eval_fitness[eval_version],
        eval_version=eval_version,
        cohort_done=min(ledger.num_due, core.method.cohort_size),
        cohort_size=core.method.cohort_size,
        seconds_elapsed=elapsed,
        seconds_left=seconds_left,
        tokens_per_second=core.crew.num_tokens / elapsed if core.crew.num_tokens else None,
        workers=tuple(_worker(core, worker, now) for worker in core.crew.workers.values()),
        events=tuple(core.notes),
        why_idle=_why_idle(core),
    )


def _state(core: Core) -> str:
    if core.stopping is not None:
        return "stopping"
    if not core.crew.workers:
        return "waiting for workers"
    return "finishing" if core.ledger.version >= core.config.run.num_updates else "running"


def _why_idle(core: Core) -> str:
    num_idle, cohort = core.crew.num_idle, core.cohort
    if not num_idle or core.stopping is not None:
        return ""
    if core.ledger.version >= core.config.run.num_updates:
        return f"{num_idle} idle: all updates are done"
    if cohort.on_demand and cohort.room() == 0:
        bound = cohort.schedule.max_lag
        most = cohort.schedule.population * (bound + 1)
        return f"{num_idle} idle: more than {most} evaluations at once would exceed the largest lag, {bound}"
    return f"{num_idle} idle: all evaluations of this version are dispatched, and its cohort is not complete"


def _worker(core: Core, worker: Worker, now: float) -> WorkerStatus:
    connected = max(now - worker.joined_at, 1e-9)
    busy = "busy" if worker.lease is not None else "idle"
    return WorkerStatus(
        worker=worker.name,
        seat=worker.seat,
        host=worker.host,
        state=busy if worker.state == "ready" else worker.state,
        version=worker.lease.version if worker.lease is not None else core.ledger.version,
        busy_share=min(worker.seconds_busy / connected, 1.0),
        useful_share=min(worker.seconds_useful / connected, 1.0),
        num_results=worker.num_results,
        eval_id=None if worker.lease is None else str(worker.lease),
    )
