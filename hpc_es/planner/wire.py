"""Bytes that an update sends over the network and writes to the journal.

Sizes are those of real messages: the plan, the commit and the results of one version, created by the head's own
functions and encoded for sending. The overhead of sockets, encryption and TCP, about 100 bytes per message, is not
counted.
"""

import hashlib
from dataclasses import dataclass

from hpc_es import methods
from hpc_es.config.schema import Config
from hpc_es.methods.base import Method, Tasks
from hpc_es.planner.shape import Shape
from hpc_es.planner.tokens import Tokens
from hpc_es.records import Assignment, Commit, Episode, EvalId, Result
from hpc_es.simulator.durations import uniform
from hpc_es.store import records as journal
from hpc_es.store.frames import frame
from hpc_es.transport.messages import Ack, Announce, Heartbeat, Report, Work, encode, encode_commit

_WORKER = "12345678_1234.0-0123456789ab"
"""A worker name of typical length, as in a Slurm job array."""
_NUM_TASKS = 100_000
_DIGEST = 2**64 - 1
_NOW = 1.7e9


@dataclass(frozen=True)
class Wire:
    """Bytes per update of N evaluations with T episodes each."""

    record: int
    """Bytes of a commit, which is broadcast or sent to every worker."""
    announcement: int
    """Bytes of the announcement of a commit, with the hash of its record, to each worker."""
    assignment: int
    result: int
    """Bytes of a result with one line per episode, and its acknowledgement."""
    heartbeat: int
    per_worker: float
    """Bytes to each worker: record and announcement."""
    per_update: float
    """Bytes to and from all workers, without heartbeats."""
    weights: float
    """Bytes to each worker if an update sent the weights in 16 bits, as is usual elsewhere."""
    journal_per_update: int


def wire_of(config: Config, shape: Shape, tokens: Tokens, *, num_workers: int) -> Wire:
    version = config.run.num_updates // 2
    tasks = Tasks(max(config.es.tasks_per_member, _NUM_TASKS), config.eval.num_tasks)
    method = methods.make(config, tasks)
    cohort = [_evaluation(method, tokens, version, slot) for slot in range(method.cohort_size)]
    commit = method.commit(version + 1, cohort, {version: 0.5})
    record = encode_commit(commit)
    announcement = encode(1, Announce(version + 1, 1, len(record), hashlib.sha256(record).digest(), None))
    assignment, result = cohort[0]
    sent = len(encode(1, Work(assignment)))
    reported = len(encode(1, Report(_WORKER, result, 61.5, 0.25))) + len(encode(1, Ack(result.eval_id)))
    per_worker = len(record) + len(announcement)
    return Wire(
        record=len(record),
        announcement=len(announcement),
        assignment=sent,
        result=reported,
        heartbeat=len(encode(1, Heartbeat(_WORKER))),
        per_worker=per_worker,
        per_update=num_workers * per_worker + len(cohort) * (sent + reported),
        weights=2.0 * shape.parameters,
        journal_per_update=_journalled(version, commit, cohort),
    )


def _evaluation(method: Method, tokens: Tokens, version: int, slot: int) -> tuple[Assignment, Result]:
    assignment = method.assign(version, slot, version + 1)
    episodes = tuple(
        Episode(
            task=task,
            reward=1.0,
            success=True,
            turns=int(tokens.turns),
            invalid_actions=0,
            tokens_in=int(tokens.prompt),
            tokens_out=int(tokens.answer),
            seconds_generating=uniform(slot, "generating"),
            seconds_in_env=uniform(slot, "env"),
            ended="terminated",
        )
        for task in assignment.tasks
    )
    result = Result(
        eval_id=assignment.eval_id,
        fitness=uniform(slot, "fitness"),
        episodes=episodes,
        digest=_DIGEST,
        seconds_update=uniform(slot, "update"),
        seconds_perturb=uniform(slot, "perturb"),
        seconds_rollout=uniform(slot, "rollout"),
    )
    return assignment, result


def _journalled(version: int, commit: Commit, cohort: list[tuple[Assignment, Result]]) -> int:
    """Bytes in the journal, counted as one frame; each further frame adds only a few bytes."""
    ids: list[EvalId] = [assignment.eval_id for assignment, _ in cohort]
    written: list[journal.AnyRecord] = [
        journal.Planned(_NOW, version, tuple(assignment for assignment, _ in cohort)),
        *(journal.Leased(_NOW, eval_id, _WORKER, 1) for eval_id in ids),
        *(journal.Reported(_NOW, _WORKER, result, _NOW, _NOW, 1) for _, result in cohort),
        journal.Committed(_NOW, commit),
        journal.Digested(_NOW, version + 1, _DIGEST, 0.1, 0.1),
    ]
    return len(frame(written)[0])
