"""From journal records to table rows: what changes in run.h5 when a record is added.

A pure fold. It keeps the rows that may still change and what later records need, so its memory grows by a few hundred
bytes per evaluation, and what has to be written is proportional to what has changed since the last `take`.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import astuple, replace

from hpc_es.errors import ConfigError, StoreError
from hpc_es.records import Assignment, Commit, Context, EvalId, Result, Seeds
from hpc_es.staleness import lag
from hpc_es.store import records as journal
from hpc_es.store.journal import Warn
from hpc_es.store.later import read_later
from hpc_es.store.protocol import EvalProtocol, protocol_of
from hpc_es.store.rows import Changes, Row, Rows
from hpc_es.store.worker_rows import WorkerRows

RUN = "run"
"""The `source` of everything that the run itself measured."""

_AFTER_A_HEAD = 1e-6
"""Least number of seconds from the last record of a head to the first of the next, so that no time belongs to both."""
_TOLERATED = 1.0
"""Seconds by which clocks may differ without having been set; smaller differences are not reported."""

_PATIENCE = {"lease_timeout": 3600.0, "head_timeout": 600.0}
"""Settings of the transport, with their values for records that do not have them."""

_SETTLED = ("accepted", "void", "discarded")


@dataclass(slots=True)
class _Evaluation:
    row: Row | None
    """None for a member that is settled and will never change."""
    kind: str
    status: str = "planned"
    worker: str = ""
    seconds: float = 0.0


@dataclass
class _Eval:
    """The batches of one evaluated version: slot -> (task, reward, success) of its episodes, None until they are in."""

    row: Row | None = None
    slots: dict[int, list[tuple[int, float, bool]] | None] = field(default_factory=dict)


class Projection:
    """`add` the records of a run in order, then `add_later` those of later evaluations; `take` what changed.

    `own`: by what the run itself is evaluated, where no record of the run will say so.
    """

    def __init__(self, own: EvalProtocol | None = None) -> None:
        self.started: journal.Started | None = None
        """First record of the newest segment."""
        self.finished = False
        self._own = own
        self._protocols: dict[str, EvalProtocol | None] = {RUN: own}
        """Protocols by source."""
        self._rows = Rows()
        self._workers = WorkerRows(self._rows)
        self._evaluations: dict[tuple[str, EvalId], _Evaluation] = {}
        self._evals: dict[tuple[str, int], _Eval] = {}
        self._updates: dict[int, Row] = {}
        self._contexts: dict[str, Row] = {}
        self._leased: set[EvalId] = set()
        self._discarded = 0
        self._time = -math.inf
        """Time of the latest record, as in the tables."""
        self._ahead = 0.0
        """By how much the tables are ahead of the clock of the present head."""

    @property
    def num_cells(self) -> int:
        """Changed since the last `take`."""
        return self._rows.num_cells

    def take(self) -> Changes:
        """What changed since the last call."""
        self._workers.write_sums()
        return self._rows.take()

    def add(self, record: journal.AnyRecord) -> None:
        """Errors: StoreError when the record speaks of something that no earlier record introduced."""
        record, set_back = self._in_order(record)
        match record:
            case journal.Started():
                self._start(record)
            case journal.Planned(assignments=assignments):
                self._plan(RUN, record.time, assignments)
            case journal.Joined(worker=worker, host=host):
                self._workers.join(record)
                self._rows.event(record.time, "info", f"worker {worker} joined", host)
            case journal.Left(worker=worker, reason=reason):
                self._workers.leave(worker, record.time, reason)
                self._rows.event(record.time, "info", f"worker {worker} left", reason)
            case journal.Leased(eval_id=eval_id, worker=worker, attempt=attempt):
                self._lease(record.time, eval_id, worker, attempt)
            case journal.Unleased(eval_id=eval_id, worker=worker, reason=reason):
                self._set_status(self._evaluation(RUN, eval_id), "planned")
                self._leased.discard(eval_id)
                self._rows.event(record.time, "info", f"evaluation {eval_id} taken back from {worker}", reason)
            case journal.Reported():
                self._report(RUN, record)
            case journal.Voided(eval_id=eval_id, reason=reason):
                self._void(record.time, eval_id, reason)
            case journal.Discarded(eval_id=eval_id, update=update):
                self._discard(eval_id, update)
            case journal.Closed(update=update, evaluations=evaluations):
                what = f"{len(evaluations)} evaluations closed for update {update}"
                self._rows.event(record.time, "info", what, "the trainer makes it of these and no others")
            case journal.Proposed(context=context):
                self._propose(record.time, context)
            case journal.Committed(commit=commit):
                self._commit(record.time, commit)
            case journal.Digested():
                self._digest(record)
            case journal.Checkpointed(version=version):
                self._rows.event(record.time, "info", f"checkpoint of version {version}")
            case journal.Noted(level=level, what=what, detail=detail):
                self._rows.event(record.time, level, what, detail)
            case journal.Stopped(reason=reason, finished=finished):
                self.finished = finished
                self._workers.leave_all(record.time, "the head stopped")
                self._rows.event(record.time, "info", "head stopped", reason)
        self._time = max(self._time, record.time)
        if set_back > _TOLERATED and isinstance(record, journal.Started):
            detail = f"by {set_back:.3f} s or more: how long no head ran is unknown, and later times are moved"
            self._rows.event(record.time, "warning", "the clock was set back", detail)

    def _in_order(self, record: journal.AnyRecord) -> tuple[journal.AnyRecord, float]:
        """The record with its times moved behind those of earlier ones, and by how much its clock was set back.

        A clock may be set back between two heads, or two machines' clocks may differ; what a journal is sure of is the
        order of its records, and how long things took while a head ran. A head begins later than all before it.
        """
        if isinstance(record, journal.Started):
            time, self._ahead = record.time, 0.0
            earliest = self._time + _AFTER_A_HEAD
        else:
            time = record.time + self._ahead
            earliest = self._time if time < self._time - _TOLERATED else time
        behind = max(earliest - time, 0.0)
        self._ahead += behind
        if not self._ahead:
            return record, 0.0
        if isinstance(record, journal.Reported):
            record = replace(record, started=record.started + self._ahead, finished=record.finished + self._ahead)
        return replace(record, time=max(time, earliest)), behind

    def add_later(self, name: str, records: Iterable[journal.AnyRecord]) -> None:
        """Evaluations made after the run; `name` is their `source`."""
        for record in records:
            match record:
                case journal.Started(config_json=config_json):
                    self._protocols[name] = protocol_of(config_json)
                case journal.Planned(assignments=assignments):
                    self._plan(name, record.time, assignments)
                case journal.Reported():
                    self._report(name, record)

    def _start(self, record: journal.Started) -> None:
        for eval_id in self._leased:  # a new head takes leases up again only when their holders say Hello
            self._set_status(self._evaluation(RUN, eval_id), "planned")
        self._leased.clear()
        self._workers.leave_all(self._time, "its head ended")
        if self.started is not None:
            self._workers.head_was_away(record.time - self._time - _patience(record.config_json))
        self.started, self.finished = record, False
        self._own = self._protocols[RUN] = protocol_of(record.config_json)
        self._rows.event(record.time, "info", "head started", f"generation {record.generation} on {record.host}")

    # --- evaluations -----------------------------------------------------------------------------------------

    def _plan(self, source: str, time: float, assignments: Iterable[Assignment]) -> None:
        for assignment in assignments:
            eval_id, kind = assignment.eval_id, assignment.purpose
            row = self._rows.new(
                "evaluations",
                source=source,
                dispatch_version=eval_id.version,
                slot=eval_id.table_slot,
                replacement=eval_id.replacement,
                kind=kind,
                status="planned",
                sampling_seed=assignment.sampling_seed,
                num_tasks=len(assignment.tasks),
                time_planned=time,
                **_planned(assignment),
            )
            self._evaluations[source, eval_id] = _Evaluation(row, kind)
            if kind == "eval":
                self._evals.setdefault((source, eval_id.version), _Eval()).slots[eval_id.slot] = None

    def _lease(self, time: float, eval_id: EvalId, worker: str, attempt: int) -> None:
        evaluation = self._evaluation(RUN, eval_id)
        self._leased.add(eval_id)
        self._set_worker(evaluation, worker)
        self._set_status(evaluation, "leased", time_leased=time, attempt=attempt)

    def _report(self, source: str, record: journal.Reported) -> None:
        result = record.result
        evaluation = self._evaluation(source, result.eval_id)
        if evaluation.status in _SETTLED:
            return  # nothing that was settled is counted again
        self._leased.discard(result.eval_id)
        self._set_worker(evaluation, record.worker)
        planned = evaluation.row.cells["time_planned"] if evaluation.row else record.time
        spent = [result.seconds_update, result.seconds_perturb, result.seconds_rollout]
        evaluation.seconds = sum(seconds for seconds in spent if _is_duration(seconds))
        self._set_status(
            evaluation,
            "reported",
            **_measured(result),
            **_when(record, planned),
            time_received=record.time,
            attempt=record.attempt,
        )
        self._add_episodes(source, evaluation.kind, result)
        self._workers.count_result(record.worker, record.time, evaluation.seconds, error=result.error is not None)
        if evaluation.kind != "train" and result.error is None:
            self._set_status(evaluation, "accepted")
            self._count_accepted(evaluation, record.time, +1)
        if evaluation.kind == "eval" and result.error is None:
            played = [(episode.task, episode.reward, episode.success) for episode in result.episodes]
            self._evals[source, result.eval_id.version].slots[result.eval_id.slot] = played
            self._write_eval(source, result.eval_id.version, record.time)

    def _add_episodes(self, source: str, kind: str, result: Result) -> None:
        version, slot, replacement = result.eval_id.version, result.eval_id.table_slot, result.eval_id.replacement
        for position, episode in enumerate(result.episodes):
            self._rows.add("episodes", source, version, slot, replacement, kind, position, *astuple(episode))

    def _void(self, time: float, eval_id: EvalId, reason: str) -> None:
        evaluation = self._evaluation(RUN, eval_id)
        if evaluation.status == "accepted":
            self._count_accepted(evaluation, time, -1)
        self._set_status(evaluation, "void", error=reason)
        self._leased.discard(eval_id)
        if evaluation.kind == "train":
            self._discarded += 1
        elif evaluation.kind == "eval":
            self._evals[RUN, eval_id.version].slots[eval_id.slot] = None
            self._write_eval(RUN, eval_id.version, time)

    def _discard(self, eval_id: EvalId, update: int) -> None:
        self._set_status(self._evaluation(RUN, eval_id), "discarded", lag=lag(eval_id.version, update))
        self._discarded += 1

    def _write_eval(self, source: str, version: int, time: float) -> None:
        """The row of an evaluated version: when all its batches are in, or one that was in is void."""
        evaluated = self._evals[source, version]
        batches = [batch for batch in evaluated.slots.values() if batch is not None]
        complete = len(batches) == len(evaluated.slots)
        if evaluated.row is None:
            if not complete:
                return
            evaluated.row = self._rows.new("evals")
        played = [episode for batch in batches for episode in batch] if complete else []
        rewards, successes = _by_task(played)
        num_tasks = len(rewards)
        protocol = self._protocols[source]
        self._rows.set(
            evaluated.row,
            source=source,
            version=version,
            num_tasks=num_tasks,
            reward_mean=_mean(rewards),
            standard_error=_std(rewards, ddof=1) / math.sqrt(num_tasks) if num_tasks else math.nan,
            success_rate=_mean(successes),
            time=time,
            num_repeats=len(played) // num_tasks if num_tasks else 0,
            **_measured_by(protocol, other=protocol != self._own),
        )

    # --- updates ---------------------------------------------------------------------------------------------

    def _commit(self, time: float, commit: Commit) -> None:
        consumed = commit.version - 1
        seeds = commit.body if isinstance(commit.body, Seeds) else None
        terms = seeds.terms if seeds is not None else (None,) * len(commit.consumed)
        for each, term in zip(commit.consumed, terms, strict=True):
            evaluation = self._evaluation(RUN, each.eval_id)
            self._count_accepted(evaluation, time, +1)
            self._set_status(
                evaluation,
                "accepted",
                consumed_version=consumed,
                lag=lag(each.eval_id.version, commit.version),
                **({} if term is None else {"utility": term.utility, "coefficient": term.coefficient}),
            )
        fitness, lags = [each.fitness for each in commit.consumed], commit.lags
        self._updates[commit.version] = self._rows.new(
            "updates",
            version=commit.version,
            num_members=len(commit.consumed),
            fitness_mean=_mean(fitness),
            fitness_std=_std(fitness, ddof=0),
            fitness_min=min(fitness, default=math.nan),
            fitness_max=max(fitness, default=math.nan),
            null=commit.null,
            lag_mean=_mean([float(value) for value in lags]),
            lag_max=max(lags, default=0),
            discarded=self._discarded,
            time_committed=time,
            **({} if seeds is None else _of_seeds(seeds)),
        )
        self._discarded = 0
        if (change := commit.pool) is not None:
            for name in change.added:
                self._rows.set(self._contexts[name], added=commit.version)
            for name in change.removed:
                self._rows.set(self._contexts[name], removed=commit.version)

    def _propose(self, time: float, context: Context) -> None:
        proposed_by = context.proposed_by
        where = {}
        if proposed_by is not None:
            evaluation = self._evaluation(RUN, proposed_by)
            where = {
                "dispatch_version": proposed_by.version,
                "slot": proposed_by.table_slot,
                "replacement": proposed_by.replacement,
            }
            if evaluation.status != "accepted":
                raise StoreError(f"a context was proposed by evaluation {proposed_by}, which is {evaluation.status}")
        self._contexts[context.id] = self._rows.new(
            "contexts",
            context=context.id,
            text=context.text,
            parents=json.dumps(context.parents),
            operator=context.operator,
            score=context.score,
            time=time,
            **where,
        )

    def _digest(self, record: journal.Digested) -> None:
        row = self._updates.get(record.version)
        if row is None:
            raise StoreError(f"the journal has a digest of theta_{record.version}, but no commit that made it")
        self._rows.set(row, digest=record.digest, update_norm=record.update_norm, seconds_update=record.seconds)

    # --- rows ------------------------------------------------------------------------------------------------

    def _evaluation(self, source: str, eval_id: EvalId) -> _Evaluation:
        try:
            return self._evaluations[source, eval_id]
        except KeyError:
            raise StoreError(f"the journal speaks of evaluation {eval_id}, which was never planned") from None

    def _set_status(self, evaluation: _Evaluation, status: str, **values: Any) -> None:
        """And what else has become known with it."""
        if evaluation.row is None:
            raise StoreError(f"the journal says {status} of a member that is {evaluation.status} already")
        evaluation.status = status
        self._rows.set(evaluation.row, status=status, **values)
        if evaluation.kind == "train" and status in _SETTLED:
            evaluation.row = None

    def _count_accepted(self, evaluation: _Evaluation, time: float, change: int) -> None:
        self._workers.count_accepted(evaluation.worker, time, evaluation.seconds, change)

    def _set_worker(self, evaluation: _Evaluation, name: str) -> None:
        if name != evaluation.worker and evaluation.row is not None:
            evaluation.worker = name
            self._rows.set(evaluation.row, worker=name, **self._workers.place(name))


def merge_later(
    projection: Projection, files: Iterable[Path], warn: Warn, base_digest: int, config_json: str
) -> Iterator[tuple[str, int]]:
    """Fold in journals of evaluations made after the run; yields name and size of those that could be read.

    `base_digest`, `config_json`: of the run. What was made for another run is left out.
    """
    from hpc_es.config.load import refuse_evaluation_of_another  # slow to import, and most readers have none of these

    for path in files:
        try:
            size = path.stat().st_size  # one that grows meanwhile is read again the next time
            records = list(read_later(path, warn=warn))
            first = records[0]
            assert isinstance(first, journal.Started), "a journal begins with Started"
            if first.base_digest != base_digest:
                raise StoreError(f"it is of a run on the base model {first.base_digest:016x}, not {base_digest:016x}")
            refuse_evaluation_of_another(config_json, first.config_json)
            projection.add_later(path.stem, records)
        except (ConfigError, StoreError, OSError) as error:  # one bad file must not hide the run
            warn(f"{path.name} is left out: {error}")
        else:
            yield path.stem, size


def _patience(config_json: str) -> float:
    """Seconds after a head's last record by which every worker has given up: it finishes what it holds, and waits."""
    transport = json.loads(config_json).get("transport", {})
    return sum(float(transport.get(key, default)) for key, default in _PATIENCE.items())


def _measured_by(protocol: EvalProtocol | None, *, other: bool) -> dict[str, Any]:
    if protocol is None:
        return {}
    return {"protocol": protocol.label, "protocol_digest": protocol.digest, "other_protocol": other}


def _of_seeds(body: Seeds) -> dict[str, Any]:
    """What only updates by seeds have."""
    return {
        "alpha": body.alpha,
        "sigma": _mean([term.sigma for term in body.terms]),
        "num_subspaces": body.num_subspaces,
        "partition_seed": body.partition_seed,
        "rank": body.rank,
    }


def _planned(assignment: Assignment) -> dict[str, Any]:
    """What only candidates for an update have, and what only members have."""
    member = assignment.member
    known: dict[str, Any] = {"context": assignment.candidate.context}
    if assignment.update:
        known["planned_update"] = assignment.update
    if member is None:
        return known
    return known | {
        "seed": member.seed,
        "sign": member.sign,
        "sigma": member.sigma,
        "subspace": member.subspace,
    }


def _when(record: journal.Reported, planned: float) -> dict[str, float]:
    """When the worker began and ended: not before it was planned, not after it was received; NaN where its report had
    an age that is none."""
    finished = min(max(record.finished, planned), record.time) if math.isfinite(record.finished) else math.nan
    started = min(max(record.started, planned), record.time) if math.isfinite(record.started) else math.nan
    return {"time_started": min(started, finished), "time_finished": finished}


def _is_duration(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds >= 0


def _duration(seconds: float) -> float:
    """NaN for what is none: journals of the first release have whatever a worker sent."""
    return seconds if _is_duration(seconds) else math.nan


def _measured(result: Result) -> dict[str, Any]:
    error = {"error": result.error} if result.error else {}
    return {
        "fitness": result.fitness,
        "turns": sum(episode.turns for episode in result.episodes),
        "tokens_in": sum(episode.tokens_in for episode in result.episodes),
        "tokens_out": sum(episode.tokens_out for episode in result.episodes),
        "seconds_update": _duration(result.seconds_update),
        "seconds_perturb": _duration(result.seconds_perturb),
        "seconds_rollout": _duration(result.seconds_rollout),
        "digest": result.digest,
        "trace": result.trace,
        **error,
    }


def _by_task(episodes: Iterable[tuple[int, float, bool]]) -> tuple[list[float], list[float]]:
    """Mean reward, and share of successes, of each task: its repeats are no further tasks."""
    repeats = defaultdict[int, list[tuple[float, bool]]](list)
    for task, reward, success in episodes:
        repeats[task].append((reward, success))
    rewards = [_mean([reward for reward, _ in played]) for played in repeats.values()]
    return rewards, [_mean([float(success) for _, success in played]) for played in repeats.values()]


def _sum(values: Iterable[float]) -> float:
    """NaN where there is no sum: of infinities, or beyond what a float can hold."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return math.nan


def _mean(values: list[float]) -> float:
    return _sum(values) / len(values) if values else math.nan


def _std(values: list[float], *, ddof: int) -> float:
    if len(values) <= ddof:
        return math.nan
    mean = _mean(values)
    return math.sqrt(_sum((value - mean) * (value - mean) for value in values) / (len(values) - ddof))
