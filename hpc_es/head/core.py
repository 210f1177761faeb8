"""The head's decisions: a pure state machine, `handle(event, now) -> [instruction]`.

Consumes messages of workers, results of the arena and the collective plane, and ticks of the clock. Produces
journal records (each applied to the ledger as it is appended), messages, and work for the arena.
Invariants: the loop makes every record of a batch durable before it sends any message of that batch; an evaluation
is counted at most once; update u+1 waits for digest u; no commit leaves v before everything planned at v is leased
or done. No clock, no I/O: the same core runs in the simulator.
"""

import math
from collections import Counter

from msgspec import structs

from hpc_es.allowance import Allowance
from hpc_es.bounds import tidied
from hpc_es.config.schema import Config
from hpc_es.head.admission import refusal
from hpc_es.head.checks import (
    EVENTS_PER_MINUTE,
    JOINS_AT_ONCE,
    JOINS_PER_MINUTE,
    MAX_REFUSALS,
    events_allowance,
    why_no_result,
    why_refused,
)
from hpc_es.head.cohort import Cohort
from hpc_es.head.crew import Crew, Worker
from hpc_es.head.events import (
    CheckpointSaved,
    Event,
    GroupFailed,
    GroupUp,
    NoWorkersLeft,
    Received,
    StopAsked,
    Tick,
    Trained,
    TrainingFailed,
    TransferEnded,
    TransferReady,
    Updated,
)
from hpc_es.head.instructions import Append, Exit, Instruction, SaveCheckpoint, Send, Train, Update
from hpc_es.head.ledger import Ledger
from hpc_es.head.plane import Plane
from hpc_es.methods.base import Method
from hpc_es.quoting import MAX_MESSAGE, quote
from hpc_es.records import Commit, Context, EvalId, Result, Weights, context_id
from hpc_es.store import records as journal
from hpc_es.store.history import Evaluation
from hpc_es.transport import limits, messages
from hpc_es.transport.backends import NOTHING, Offer
from hpc_es.transport.messages import AnyMessage

MAX_REBUILDS = 3
"""Digest mismatches that one worker may have; after one more it is removed from the run."""
NULLS_TO_WARN = 5
MAX_FAILED_TRAININGS = 3
"""Times in a row that a trainer may end without having trained; then the run fails."""
SUMMARY_S = 60.0
"""Seconds between two events that say how many others were left out."""
STRANGERS = "workers that are not connected"
DRAINED = "drained on request"


class Core:
    """One run's decisions. `now` is in seconds and never runs backwards."""

    def __init__(self, config: Config, ledger: Ledger, method: Method, *, config_digest: str, offer: Offer = NOTHING):
        """`offer`: what the head itself brings to the collective plane."""
        self.config = config
        self.ledger = ledger
        self.config_digest = config_digest
        self.method = method
        self.cohort = Cohort(method, ledger)
        self.crew = Crew()
        self.plane = Plane(config.transport, self.crew, offer, self.note)
        self.stopping: str | None = None
        self.comes_back = False
        self.notes: list[str] = []
        self._out: list[Instruction] = []
        self._now = self._began = 0.0
        self._saving = False
        self._exited = False
        self.joins = Allowance(JOINS_AT_ONCE, JOINS_PER_MINUTE)
        self._strangers = events_allowance()
        self._left_out = Counter[str]()
        """Number of events that were left out, by worker."""
        self._failed_trainings = 0
        self._expelled: dict[str, str] = {}
        """Workers that were removed from the run, with the reason. A worker that restarts has another name."""
        self._summary_at = -math.inf

    # --- the only entry point --------------------------------------------------------------------------------

    def start(self, now: float) -> list[Instruction]:
        """Begin, after the ledger has been restored and the arena is at its version."""
        self._now = self._began = now
        advice = self.method.advice()
        if advice and self.ledger.planned < 0:
            self.note("warning", advice)
        self.plane.start()
        for entry, why in self.ledger.contradictions():
            self._replace(entry, why)
        self._accept_proposals(self.ledger.version)
        if self.ledger.closed:
            self._train()  # the head or the trainer before ended in between
        self._advance()
        return self._take()

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Decide what an event leads to."""
        self._now = now
        if self._exited:
            return []
        match event:
            case Received(message=message):
                self._receive(message)
            case Updated(version=version, digest=digest, update_norm=norm, seconds=seconds):
                self._append(journal.Digested(now, version, digest, norm, seconds))
                self._check_digests(version)
                self._accept_proposals(version)
                self._open_transfer()
            case Trained():
                self._trained(event)
            case TrainingFailed(version=version, reason=reason):
                self._training_failed(version, reason)
            case CheckpointSaved(version=version):
                self._saving = False
                self._append(journal.Checkpointed(now, version))
            case GroupUp(epoch=epoch):
                self.plane.group_up(epoch)
            case GroupFailed(epoch=epoch, detail=detail):
                self.plane.end_epoch(epoch, detail)
            case TransferReady(calls=calls):
                self._out += self.plane.call(calls)
            case TransferEnded(workers=workers, num_bytes=num_bytes, seconds=seconds, error=error):
                self.plane.end_transfer(workers, num_bytes, seconds, error)
            case Tick():
                self._expire()
                self._sum_up_left_out()
                self._give_up_orphans()
                self._open_transfer()
            case NoWorkersLeft(reason=reason):
                if not self.crew.workers:  # one may have joined meanwhile
                    self.note("error", reason)
                    self._exit(reason, finished=False, failed=True)
            case StopAsked(reason=reason, comes_back=comes_back):
                self.stopping = self.stopping or reason
                self.comes_back = comes_back
        self._advance()
        return self._take()

    def _take(self) -> list[Instruction]:
        out, self._out = self._out, []
        return out

    def _append(self, record: journal.AnyRecord) -> None:
        self.ledger.apply(record)
        self._out.append(Append(record))

    def _send(self, worker: str, message: AnyMessage) -> None:
        self._out.append(Send(worker, message))

    def note(self, level: str, what: str, detail: str = "") -> None:
        """Record an event for people to read later."""
        what, detail = quote(what, MAX_MESSAGE), quote(detail, MAX_MESSAGE)
        self.notes = [*self.notes[-19:], f"{level}: {what}" + (f" ({detail})" if detail else "")]
        self._append(journal.Noted(self._now, level, what, detail))

    def _tell(self, sender: str, level: str, what: str, detail: str = "") -> None:
        """Record an event that a message caused, if the allowance of its sender permits."""
        worker = self.crew.workers.get(sender)
        if (worker.allowance if worker else self._strangers).take(self._now):
            self.note(level, what, detail)
        else:
            self._left_out[sender if worker else STRANGERS] += 1

    def _sum_up_left_out(self) -> None:
        if not self._left_out or self._now - self._summary_at < SUMMARY_S:
            return
        loudest = ", ".join(f"{count} of {name}" for name, count in self._left_out.most_common(5))
        what = f"{self._left_out.total()} events were left out: more than {EVENTS_PER_MINUTE} a minute"
        self.note("warning", what, loudest)
        self._left_out.clear()
        self._summary_at = self._now

    # --- messages --------------------------------------------------------------------------------------------

    def _receive(self, message: AnyMessage) -> None:
        sender: str | None = getattr(message, "worker", None)
        if (why := why_refused(message)) is not None:
            self._refuse(message, why)
        else:
            self._act_on(tidied(message))
        if sender is None or self.crew.seen(sender, self._now):
            return
        if not isinstance(message, messages.Hello | messages.Goodbye):
            self._send(sender, messages.Unknown())

    def _refuse(self, message: AnyMessage, why: str) -> None:
        """Answer a message that breaks a rule, so that it is not sent again, and count it against its sender."""
        match message:
            case messages.Report(worker=sender, result=result):
                self._send(sender, messages.Ack(result.eval_id))
                self._refuse_result(message, why)
            case messages.Hello(worker=sender):
                self._send(sender, messages.Refused(why))
                self._tell(sender, "error", f"worker {quote(sender)} refused", why)
            case _:
                sender = getattr(message, "worker", "")
                what = f"{type(message).__name__} of worker {quote(sender)} is refused"
                self._tell(sender, "error", what, why)
                self._count_refusal(sender)

    def _refuse_result(self, report: messages.Report, why: str) -> None:
        """Void the evaluation as failed if this worker held its lease; other workers are not affected."""
        result, name, now = report.result, report.worker, self._now
        self._tell(name, "error", f"result {result.eval_id} of worker {quote(name)} is refused", why)
        worker, entry = self.crew.workers.get(name), self.ledger.evaluations.get(result.eval_id)
        if worker is not None and worker.lease == result.eval_id:
            self.crew.give(worker, None)
        if entry is not None and entry.state == "leased" and entry.worker == name:
            self._fail_evaluation(entry, Result(result.eval_id, math.nan, (), 0, 0.0, 0.0, 0.0, why), name, now, now)
        self._count_refusal(name)

    def _count_refusal(self, name: str) -> None:
        worker = self.crew.workers.get(name)
        if worker is None or self._exited:
            return
        worker.refusals += 1
        if worker.refusals > MAX_REFUSALS:
            self._expel(name, f"{worker.refusals} of its messages broke a rule: see the events of this run")

    def _expel(self, name: str, reason: str) -> None:
        self._expelled[name] = reason
        self._send(name, messages.Leave(reason, False))
        self._lose(name, reason)

    def _act_on(self, message: AnyMessage) -> None:
        """Act on a message whose fields are valid."""
        match message:
            case messages.Hello():
                self._hello(message)
            case messages.Report():
                self._report(message)
            case messages.Fetch(worker=worker, first=first, last=last):
                self._send(worker, messages.Records(self._commits(first, last)))
            case messages.HandBack(worker=worker, eval_id=eval_id, reason=reason, holding=holding):
                self._drop_lease(worker, eval_id, reason)
                if holding is not None and (busy := self.crew.workers.get(worker)) is not None:
                    self._holds(busy, holding)
            case messages.EpochReady(worker=worker, epoch=epoch, ok=ok, detail=detail):
                if not ok and self.plane.has_member(epoch, worker):
                    self.plane.end_epoch(epoch, f"{worker}: {detail}")
            case messages.Arrived(worker=worker, ok=ok, detail=detail):
                if not ok:
                    self._tell(worker, "warning", f"worker {worker} did not receive theta by broadcast", detail)
            case messages.Draining(worker=worker, reason=reason):
                for drained in self.crew.called(worker):
                    self.crew.mark(drained, "draining")
                    self._tell(drained.name, "info", f"worker {worker} takes no more work", reason)
            case messages.DrainRequest(who=who):
                for drained in self.crew.called(who):
                    if drained.dismissal is not None:
                        continue
                    self._append(journal.Dismissed(self._now, drained.name))
                    self.crew.dismiss(drained, DRAINED)
            case messages.Goodbye(worker=worker, reason=reason, died=died):
                if died and worker in self.crew.workers:
                    self.note("error", f"worker {worker} died", reason)
                self._lose(worker, reason)
            case messages.StopRequest(reason=reason):
                self.stopping = self.stopping or reason

    def _commits(self, first: int, last: int) -> tuple[Commit, ...]:
        """Commits of versions first..last, as many as fit into one message, at least one; the worker asks for more."""
        commits, num_members = list[Commit](), 0
        for version in range(max(first, 1), min(last, self.ledger.version) + 1):
            commit = self.ledger.commits[version]
            num_members += len(commit.consumed)
            if commits and num_members > limits.MEMBERS_PER_ANSWER:
                break
            commits.append(commit)
        return tuple(commits)

    def _hello(self, hello: messages.Hello) -> None:
        reason = refusal(hello, self.config, base_digest=self.ledger.digests[0], config_digest=self.config_digest)
        if reason is not None:
            self._tell(hello.worker, "error", f"worker {hello.worker} refused", reason)
            self._send(hello.worker, messages.Refused(reason))
            return
        if hello.worker in self._expelled:
            self._send(hello.worker, messages.Leave(self._expelled[hello.worker], False))
            return
        if hello.worker not in self.crew.workers and not self.joins.take(self._now):
            return
        for older in self.crew.in_seat(hello.seat):
            if older.name != hello.worker:
                self._send(older.name, messages.Leave(f"seat {hello.seat} was taken by {hello.worker}", False))
                self._lose(older.name, f"replaced by {hello.worker}")
        if hello.worker not in self.crew.workers:
            self._append(journal.Joined(self._now, hello.worker, hello.seat, hello.host, hello.pid, hello.facts))
        worker = self.crew.join(hello, self._now)
        if worker.name in self.ledger.dismissed:
            self.crew.dismiss(worker, DRAINED)
        self._send(worker.name, messages.Welcome(self.ledger.version, self.config_digest))
        if self.stopping is not None and not self.comes_back:
            self._send(worker.name, messages.Leave(self.stopping, False))
        entry = self.ledger.evaluations.get(hello.holding) if hello.holding else None
        is_known = entry is not None and entry.state in ("reported", "accepted", "discarded")
        self._holds(worker, None if is_known else hello.holding)
        if worker.name in self.crew.workers:
            self.plane.welcome(worker, hello, self.ledger.version)

    def _report(self, report: messages.Report) -> None:
        result, now = report.result, self._now
        entry = self.ledger.evaluations.get(result.eval_id)
        worker = self.crew.workers.get(report.worker)
        if worker is not None and worker.lease == result.eval_id:
            self.crew.give(worker, None)
        self._send(report.worker, messages.Ack(result.eval_id))
        if entry is None or entry.state not in ("planned", "leased"):
            return  # a duplicate, or void: acknowledged so that it is not sent again, never counted
        if (why := why_no_result(report, entry.assignment, now - min(self.ledger.began, self._began))) is not None:
            self._refuse_result(report, why)
            return
        started, finished = now - report.started_age, now - report.finished_age
        if result.error is not None:
            self._fail_evaluation(entry, result, report.worker, started, finished)
            return
        self._append(journal.Reported(now, report.worker, result, started, finished, max(entry.attempts, 1)))
        self.crew.count_result(report.worker, result)
        if self.ledger.digests.get(result.eval_id.version, result.digest) != result.digest:
            self._quarantine(entry)
        elif result.eval_id.purpose == "propose":
            self._accept_proposals(result.eval_id.version)

    def _accept_proposals(self, version: int) -> None:
        """Record the contexts that evaluations at a version proposed, once its digest shows what wrote them."""
        if version not in self.ledger.digests:
            return
        for entry in self.ledger.reported_at(version):
            if entry.assignment.purpose == "propose" and (result := entry.result) is not None:
                parent = entry.assignment.candidate.context
                parents, name = (parent,) if parent else (), context_id(result.text)
                context = Context(name, result.text, parents, "", result.eval_id, result.fitness)
                self._append(journal.Proposed(self._now, context))

    def _fail_evaluation(self, entry: Evaluation, failed: Result, worker: str, started: float, finished: float) -> None:
        """Record a failed evaluation and plan its replacement; fail the run if too many have failed in a row."""
        error = failed.error or "it failed without an error message"
        self._append(journal.Reported(self._now, worker, failed, started, finished, max(entry.attempts, 1)))
        self.crew.count_result(worker, failed)
        self._replace(entry, error)
        if self.ledger.failures_in_a_row >= self.config.run.max_failures_in_a_row:
            self._fail(error)

    def _check_digests(self, version: int) -> None:
        """Void results that were measured around other bits than theta_version, and quarantine their workers."""
        for entry in self.ledger.reported_at(version):
            assert entry.result is not None
            if entry.result.digest != self.ledger.digests[version]:
                self._quarantine(entry)

    def _quarantine(self, entry: Evaluation) -> None:
        assert entry.result is not None
        version, wrong, name = entry.assignment.version, entry.result.digest, entry.worker or ""
        self._replace(
            entry, f"measured around digest {wrong:016x}, theta_{version} has {self.ledger.digests[version]:016x}"
        )
        worker = self.crew.workers.get(name)
        if worker is None or worker.state == "rebuilding":
            return
        worker.rebuilds += 1
        self.note("error", f"worker {name} is quarantined", f"digest {wrong:016x} at version {version}")
        if worker.rebuilds > MAX_REBUILDS:
            self._expel(name, "its parameters differed from the head's several times: its memory may be faulty")
        else:
            self.crew.mark(worker, "rebuilding")
            self._send(name, messages.Rebuild(version))

    def _replace(self, entry: Evaluation, reason: str) -> None:
        """Void an evaluation and plan its replacement; in on-demand schedules a new member takes its place later."""
        self._void(entry, reason)
        self._tell(entry.worker or "", "warning", f"evaluation {entry.assignment.eval_id} is void", reason)
        if not self._made_on_demand(entry):
            again = self.method.replacement(entry.assignment)
            self._append(journal.Planned(self._now, again.version, (again,)))

    def _void(self, entry: Evaluation, reason: str) -> None:
        self._append(journal.Voided(self._now, entry.assignment.eval_id, reason))

    def _made_on_demand(self, entry: Evaluation) -> bool:
        return self.cohort.on_demand and entry.assignment.purpose == "train"

    # --- leases ----------------------------------------------------------------------------------------------

    def _holds(self, worker: Worker, eval_id: EvalId | None) -> None:
        """Note the evaluation that a worker says it holds, whether or not this head leased it; it holds no other."""
        if worker.lease is not None and worker.lease != eval_id:
            self._drop_lease(worker.name, worker.lease, "the worker no longer holds it")
        if worker.name not in self.crew.workers:
            return  # it gave up too many leases
        self.crew.give(worker, eval_id)
        entry = self.ledger.evaluations.get(eval_id) if eval_id else None
        if entry is not None and entry.state == "planned":
            self._lease(entry, worker)

    def _lease(self, entry: Evaluation, worker: Worker) -> None:
        eval_id = entry.assignment.eval_id
        self._append(journal.Leased(self._now, eval_id, worker.name, entry.attempts + 1))
        self.crew.give(worker, eval_id)

    def _drop_lease(self, worker: str, eval_id: EvalId, reason: str) -> None:
        holder = self.crew.workers.get(worker)
        if holder is not None and holder.lease == eval_id:
            self.crew.give(holder, None)
        entry = self.ledger.evaluations.get(eval_id)
        if entry is not None and entry.state == "leased" and entry.worker == worker:
            self._append(journal.Unleased(self._now, eval_id, worker, reason))
            if self._made_on_demand(entry):
                self._void(entry, f"lost: {reason}")
            if holder is not None and not holder.allowance.take(self._now):
                self._expel(worker, f"it gives up leases more than {EVENTS_PER_MINUTE} times a minute")

    def _lose(self, name: str, reason: str) -> None:
        worker = self.crew.leave(name)
        if worker is None:
            return
        if worker.lease is not None:
            self._drop_lease(name, worker.lease, reason)
        self._append(journal.Left(self._now, name, reason))

    def _expire(self) -> None:
        transport = self.config.transport
        for worker in self.crew.silent_since(self._now - transport.heartbeat_timeout):
            self._lose(worker.name, f"silent for more than {transport.heartbeat_timeout:g} s")
        for worker in list(self.crew.workers.values()):
            entry = self.ledger.evaluations.get(worker.lease) if worker.lease else None
            if entry is None or entry.worker != worker.name or entry.state != "leased":
                continue
            if self._now - entry.leased_at > transport.lease_timeout:
                reason = f"lease of {entry.assignment.eval_id} ran past {transport.lease_timeout:g} s"
                self._expel(worker.name, reason)

    def _give_up_orphans(self) -> None:
        """In on-demand schedules, void evaluations leased by an earlier head if their workers do not return in time."""
        if self.cohort.on_demand and self._now - self._began > self.config.transport.heartbeat_timeout:
            for entry in self.ledger.queued_members():
                self._void(entry, "lost: its worker did not come back")

    # --- progress --------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Do everything that has become possible: commit, plan, hand out work, finish."""
        if self._exited:
            return
        self._checkpoint()  # before the next commit moves the arena on
        if self.stopping is None:
            self._discard_stale()
            if self.cohort.is_full() and not self.cohort.must_wait():
                if self.method.trains:
                    self._append(journal.Closed(self._now, self.cohort.update, self.cohort.ids()))
                    self._train()
                else:
                    self._commit(self.cohort.commit())
                self._discard_stale()
            if self.ledger.planned < self.ledger.version:
                self._plan()
            while (worker := self.crew.first_idle()) is not None and (entry := self._next_entry()) is not None:
                self._lease(entry, worker)
                context = self.ledger.contexts.get(entry.assignment.candidate.context)
                self._send(worker.name, messages.Work(entry.assignment, context.text if context else ""))
        for worker in self.crew.dismissed_and_done():
            self._send(worker.name, messages.Leave(worker.dismissal or "", False, drained=True))
            self._lose(worker.name, worker.dismissal or "")
        self._exit_if_done()

    def _next_entry(self) -> Evaluation | None:
        """Next evaluation to hand out; in on-demand schedules a member is planned when a worker is free for it."""
        entry = self.cohort.next_planned(len(self.crew.workers))
        if entry is None and (assignment := self.cohort.next_member()) is not None:
            self._append(journal.Planned(self._now, assignment.version, (assignment,)))
            entry = self.ledger.evaluations[assignment.eval_id]
        return entry

    def _discard_stale(self) -> None:
        for entry in self.cohort.stale():
            assert entry.result is not None
            self.crew.count_useless(entry.worker, entry.result)
            self._append(journal.Discarded(self._now, entry.assignment.eval_id, self.cohort.update))

    def _train(self) -> None:
        self._out.append(Train(self.cohort.update, tuple(self.cohort.closed())))

    def _trained(self, event: Trained) -> None:
        """Commit what the trainer made of the closed cohort; its checkpoint is durable."""
        self._failed_trainings = 0
        if event.version != self.cohort.update or not self.ledger.closed:
            return
        body = Weights(event.digest, event.update_norm, event.metrics)
        self._commit(structs.replace(self.cohort.commit(), body=body))

    def _training_failed(self, version: int, reason: str) -> None:
        self._failed_trainings += 1
        self.note("error", f"training of theta_{version} failed", reason)
        if self._failed_trainings >= MAX_FAILED_TRAININGS:
            times = self._failed_trainings
            what = f"theta_{version} could not be trained {times} times in a row; the last: {reason}"
            self._exit(what, finished=False, failed=True)
        elif self.stopping is None:
            self._train()

    def _commit(self, commit: Commit) -> None:
        self._append(journal.Committed(self._now, commit))
        self._out.append(Update(commit))
        if commit.null:
            self.note("info", f"update {commit.version} is null", self.method.why_null(commit))
            if self.ledger.nulls_in_a_row % NULLS_TO_WARN == 0:
                what = f"{self.ledger.nulls_in_a_row} null updates in a row"
                self.note("warning", what, self.method.why_null(commit))
        if (remark := self.method.remark(commit)) is not None:
            self.note("info", *remark)
        self._out += self.plane.announce(commit)
        if commit.version < self.config.run.num_updates:
            self._out += self.plane.change_epoch()

    def _open_transfer(self) -> None:
        """Open a transfer of theta between two updates of the arena, while there is work. It does not open as soon as a
        worker joins, so that workers that join together share it."""
        version = self.ledger.version
        digest, is_last = self.ledger.digests.get(version), version >= self.config.run.num_updates
        has_work = not is_last or self.ledger.num_queued(("centre", "eval")) > 0
        if self.stopping is None and digest is not None and has_work:
            self._out += self.plane.open_transfer(version, digest)

    def _plan(self) -> None:
        self._append(journal.Planned(self._now, self.ledger.version, self.cohort.plan()))

    # --- checkpoints and the end -----------------------------------------------------------------------------

    def _checkpoint(self) -> None:
        ledger = self.ledger
        last = ledger.version >= self.config.run.num_updates or self.stopping is not None
        due = last or ledger.version % self.config.checkpoint.every == 0
        if due and not self._saving and ledger.checkpoint < ledger.version and ledger.version in ledger.digests:
            self._saving = True
            self._out.append(SaveCheckpoint(ledger.version))

    def _exit_if_done(self) -> None:
        ledger = self.ledger
        all_planned = ledger.version >= self.config.run.num_updates and ledger.planned >= ledger.version
        done = all_planned and not ledger.evals_open()
        saved = not self._saving and ledger.checkpoint >= ledger.version and ledger.version in ledger.digests
        if saved and (done or self.stopping is not None):
            self._exit(self.stopping or "all updates and evaluations are done", finished=done)

    def _exit(self, reason: str, *, finished: bool, failed: bool = False) -> None:
        self._exited = True
        self._append(journal.Stopped(self._now, reason, finished))
        if finished or failed or not self.comes_back:
            for name in self.crew.workers:
                self._send(name, messages.Leave(reason, finished))
        self._out.append(Exit(reason, finished, failed))

    def _fail(self, error: str) -> None:
        count = self.ledger.failures_in_a_row
        reason = f"{count} evaluations failed in a row, so the run stops; the last error: {error}"
        self.note("error", reason)
        self._exit(reason, finished=False, failed=True)
