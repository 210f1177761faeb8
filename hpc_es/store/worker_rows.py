"""The table of workers: one row per incarnation, with its hours and what it made of them."""

import json
import math
from dataclasses import dataclass

from hpc_es.store import records as journal
from hpc_es.store.rows import Row, Rows


@dataclass
class _Worker:
    row: Row
    host: str
    slurm_job: str
    array_task: str
    since: float
    """First Hello."""
    heard: float
    """Time of the last word about it."""
    jumps: float
    """What `WorkerRows._jumps` was when it last joined."""
    present: bool = True
    seconds_busy: float = 0.0
    seconds_useful: float = 0.0
    num_results: int = 0
    num_accepted: int = 0
    num_errors: int = 0


class WorkerRows:
    """A worker that comes back, to the next head say, goes on in its row and was there all the time: it worked on."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._workers: dict[str, _Worker] = {}
        self._changed: dict[str, _Worker] = {}
        """Whose sums are to be written."""
        self._jumps = 0.0
        """Seconds by which the clock was set forward between heads, for all that is known."""

    def join(self, record: journal.Joined) -> None:
        name, facts = record.worker, record.facts
        if (known := self._workers.get(name)) is not None:
            known.present = True
            known.since, known.jumps = known.since + self._jumps - known.jumps, self._jumps
            self._rows.set(known.row, time_left=math.nan, left="")
            self._change(name, record.time)
            return
        job, task = facts.get("slurm_job", ""), facts.get("array_task", "")
        row = self._rows.new(
            "workers",
            worker=name,
            seat=record.seat,
            host=record.host,
            pid=record.pid,
            slurm_job=job,
            array_task=task,
            facts=json.dumps(facts, sort_keys=True),
            time_joined=record.time,
        )
        self._workers[name] = _Worker(
            row, record.host, job, task, since=record.time, heard=record.time, jumps=self._jumps
        )
        self._change(name, record.time)

    def leave(self, name: str, time: float, reason: str) -> None:
        worker = self._workers.get(name)
        if worker is None or not worker.present:
            return
        worker.present = False
        self._rows.set(worker.row, time_left=time, left=reason)
        self._change(name, time)

    def leave_all(self, time: float, reason: str) -> None:
        for name in self._workers:
            self.leave(name, time, reason)

    def head_was_away(self, seconds: float) -> None:
        """Between two heads, beyond what a worker waits: one that comes back nevertheless did not live through them."""
        self._jumps += max(seconds, 0.0)

    def place(self, name: str) -> dict[str, str]:
        """Where a worker runs, in columns of the evaluations; nothing about an unknown one."""
        worker = self._workers.get(name)
        if worker is None:
            return {}
        return {"host": worker.host, "slurm_job": worker.slurm_job, "array_task": worker.array_task}

    def count_result(self, name: str, time: float, seconds: float, *, error: bool) -> None:
        if (worker := self._workers.get(name)) is not None:
            worker.num_results += 1
            worker.num_errors += error
            worker.seconds_busy += seconds
            self._change(name, time)

    def count_accepted(self, name: str, time: float, seconds: float, change: int) -> None:
        """Count a result and its seconds as accepted (+1), or as no longer accepted (-1)."""
        if (worker := self._workers.get(name)) is not None:
            worker.num_accepted += change
            worker.seconds_useful += change * seconds
            self._change(name, time)

    def write_sums(self) -> None:
        """Bring the sums in the rows up to date."""
        for worker in self._changed.values():
            self._rows.set(
                worker.row,
                seconds_connected=max(worker.heard - worker.since, 0.0),
                seconds_busy=worker.seconds_busy,
                seconds_useful=worker.seconds_useful,
                num_results=worker.num_results,
                num_accepted=worker.num_accepted,
                num_errors=worker.num_errors,
            )
        self._changed.clear()

    def _change(self, name: str, time: float) -> None:
        """Its sums have changed; they are written once for all changes between two takes."""
        worker = self._changed[name] = self._workers[name]
        worker.heard = time
