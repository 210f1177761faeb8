"""What must be true of a run after it was disturbed (for chaos.py).

Invariant: everything is read from the journals afterwards; nothing that the head claimed meanwhile is believed.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from chaos_local import Run

from hpc_es import methods
from hpc_es.recorded.verify import verify
from hpc_es.records import EvalId, Result
from hpc_es.staleness import Natural, Schedule, lag
from hpc_es.store import records as journal


@dataclass
class Fates:
    """What happened to the valid results of members."""

    lags: Counter[int] = field(default_factory=Counter)
    """Number of results that a commit counted, by lag."""
    discarded: Counter[int] = field(default_factory=Counter)
    """Number of results that were too late, by the lag that they would have had."""
    voided: int = 0
    """Results measured with other parameters than those of the version."""
    waiting: int = 0
    """Results that were not used when the run ended."""
    given_up: int = 0
    """Void evaluations without any valid result."""

    def __str__(self) -> str:
        parts = [f"counted by lag {dict(sorted(self.lags.items()))}"]
        parts += [f"discarded by lag {dict(sorted(self.discarded.items()))}"] if self.discarded else []
        numbers = {"voided": self.voided, "left over": self.waiting, "given up": self.given_up}
        return ", ".join([*parts, *(f"{count} {word}" for word, count in numbers.items() if count)])


def fates(records: Iterable[journal.AnyRecord], schedule: Schedule) -> tuple[Fates, list[str]]:
    """Count what happened to valid results, and list problems: each must be used once, and none made twice."""
    found, problems = Fates(), list[str]()
    good: dict[EvalId, Result] = {}
    ends: dict[EvalId, list[str]] = {}
    for record in records:
        match record:
            case journal.Leased(eval_id=eval_id) if eval_id in good:
                problems.append(f"evaluation {eval_id} was dispatched again after its result had been reported")
            case journal.Reported(result=result) if result.error is None:
                good[result.eval_id] = result
            case journal.Committed(commit=commit):
                for each in commit.consumed:
                    ends.setdefault(each.eval_id, []).append(f"counted by update {commit.version}")
                found.lags.update(commit.lags)
            case journal.Discarded(eval_id=eval_id, update=update):
                behind = lag(eval_id.version, update)
                ends.setdefault(eval_id, []).append(f"discarded at update {update}")
                found.discarded[behind] += 1
                if behind <= schedule.max_lag:
                    problems.append(f"evaluation {eval_id} was discarded with a lag of {behind}: within the bound")
            case journal.Voided(eval_id=eval_id, reason=reason):
                ends.setdefault(eval_id, []).append(f"void: {reason}")
                if eval_id not in good:
                    found.given_up += 1
                    continue
                found.voided += eval_id.purpose == "train"
                if "digest" not in reason:
                    problems.append(f"the result of {eval_id} was voided, although its bits were right: {reason}")
    problems += [f"evaluation {eval_id}: {' and '.join(end)}" for eval_id, end in ends.items() if len(end) > 1]
    left_over = [eval_id for eval_id in good if eval_id.purpose == "train" and eval_id not in ends]
    found.waiting = len(left_over)
    if not schedule.on_demand:
        problems += [f"the result of {eval_id} was never counted" for eval_id in left_over]
    if isinstance(schedule, Natural) and schedule.hold and found.discarded:
        problems.append("results were discarded, although staleness.overdue is hold")
    if max(found.lags, default=0) > schedule.max_lag:
        problems.append(f"lags up to {max(found.lags)} were counted, the bound is {schedule.max_lag}")
    return found, problems


def complaints(
    undisturbed: Run | None, disturbed: Run, seen: Mapping[EvalId, Result], left: list[int]
) -> tuple[Fates, list[str]]:
    """Everything that is not as it should be. `seen`: results that stood in the journal at some time.

    `undisturbed` is None where results are consumed in the order in which they arrive: no two such runs are alike.
    """
    problems = [f"processes are left: {left}"] if left else []
    problems += _different_bits(undisturbed, disturbed) if undisturbed else []
    records = disturbed.records()
    found, wrong = fates(records, methods.make(disturbed.config).schedule())
    problems += wrong
    versions = [record.commit.version for record in records if isinstance(record, journal.Committed)]
    if versions != list(range(1, disturbed.config.run.num_updates + 1)):
        problems.append(f"the updates are {versions}, not 1 to {disturbed.config.run.num_updates}")
    kept = disturbed.results()
    problems += [f"the result of {eval_id} was lost" for eval_id, result in seen.items() if kept.get(eval_id) != result]
    for run in [undisturbed, disturbed] if undisturbed else [disturbed]:
        problems += [f"verify {run.paths.root}: {problem}" for problem in verify(run.paths.root).problems]
    return found, problems


def _different_bits(undisturbed: Run, disturbed: Run) -> list[str]:
    expected, got = undisturbed.digests(), disturbed.digests()
    if not expected:
        return ["the undisturbed run has no digests"]
    return [
        f"digest of version {version}: {expected.get(version)} undisturbed, {got.get(version)} here"
        for version in sorted(expected.keys() | got.keys())
        if expected.get(version) != got.get(version)
    ]
