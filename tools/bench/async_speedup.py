"""Cost of the barrier: synchronous runs compared with natural asynchrony on the same long-tailed durations.

    python tools/bench/async_speedup.py [--median 0.5] [--updates 24] [--out DIR]

Every run is a real `hpc-es run`: head, four worker processes, journal, transport. An evaluation sleeps for a lognormal
time (sigma 0.8); the k-th evaluation to begin sleeps for the k-th time of one seeded list in every run (see listed.py).
Four sleeping workers do not need four cores, but a busy machine lengthens the gaps.

All figures describe the steady state: from the first commit after all workers have joined (but at least the second) to
the last but two. Nothing is dispatched that the last update could not consume, so in every mode workers run out of work
before it. Evaluations are cut at both ends. busy share: seconds inside evaluations (updating theta, perturbing,
sleeping) divided by the seconds of all workers. useful share: the same for evaluations that an update consumed.

The bound on the wall-clock ratio: without a barrier N evaluations take N * mean / G seconds at best, with one they take
the time in which G workers finish N durations, each taking the next when it is free. It is given for the distribution,
and for the part of the list that the synchronous run consumes in its steady state.
"""

import argparse
import heapq
import os
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, quantiles

from listed import duration

from hpc_es.config import load
from hpc_es.config.schema import Config
from hpc_es.params.lab_model import LAB_MODELS, write_lab_model
from hpc_es.records import EvalId
from hpc_es.store import records as journal
from hpc_es.store.journal import read_journal

HERE = Path(__file__).resolve().parent
SIGMA = 0.8
RUNS = {
    "sync": "mode: sync",
    "natural, max_lag 1": "mode: natural, max_lag: 1",
    "natural, max_lag 3": "mode: natural, max_lag: 3",
    "hold, max_lag 1": "mode: natural, max_lag: 1, overdue: hold",
}
NUM_COHORTS = 20_000
"""Number of samples drawn for the bound."""


@dataclass(frozen=True)
class Span:
    """The time that one evaluation took a worker."""

    eval_id: EvalId
    worker: str
    leased: float
    started: float
    finished: float
    received: float


@dataclass(frozen=True)
class Measured:
    updates: range
    """Measurements of the steady state."""
    seconds_per_update: float
    busy_share: float
    useful_share: float
    stale: list[int]
    """Number of members with a lag above 0 in each cohort."""
    num_discarded: int
    gaps: dict[str, list[float]]
    """Seconds from the end of an evaluation to the start of the worker's next one, in total and by part."""


def measure(records: list[journal.AnyRecord], num_workers: int, num_updates: int) -> Measured:
    spans, commits = list(_spans(records)), [r for r in records if isinstance(r, journal.Committed)]
    joined = [r.time for r in records if isinstance(r, journal.Joined)]
    first = next((k for k, commit in enumerate(commits) if k and commit.time > max(joined)), num_updates)
    last = num_updates - 3
    if len(joined) != num_workers or first >= last:
        sys.exit(f"{len(joined)} workers joined, the last before update {first + 1}: no steady state; raise --updates")
    begin, end = commits[first].time, commits[last].time
    consumed = {each.eval_id for record in commits for each in record.commit.consumed}
    inside = {span.eval_id: max(min(span.finished, end) - max(span.started, begin), 0.0) for span in spans}
    available = num_workers * (end - begin)
    return Measured(
        updates=range(first + 2, last + 2),
        seconds_per_update=(end - begin) / (last - first),
        busy_share=sum(inside.values()) / available,
        useful_share=sum(seconds for eval_id, seconds in inside.items() if eval_id in consumed) / available,
        stale=[sum(lag > 0 for lag in r.commit.lags) for r in commits],
        num_discarded=sum(isinstance(r, journal.Discarded) and begin < r.time <= end for r in records),
        gaps=_gaps(span for span in spans if begin < span.started and span.finished < end),
    )


def _spans(records: list[journal.AnyRecord]) -> Iterable[Span]:
    """End of each evaluation; one without a result lasted until the run ended."""
    leases: dict[EvalId, journal.Leased] = {}
    for record in records:
        match record:
            case journal.Leased(eval_id=eval_id):
                leases[eval_id] = record
            case journal.Reported(time=time, worker=worker, result=result, started=started, finished=finished):
                lease = leases.pop(result.eval_id)
                yield Span(result.eval_id, worker, lease.time, started, finished, time)
    for eval_id, lease in leases.items():
        yield Span(eval_id, lease.worker, lease.time, lease.time, records[-1].time, records[-1].time)


def _gaps(spans: Iterable[Span]) -> dict[str, list[float]]:
    by_worker = defaultdict[str, list[Span]](list)
    for span in spans:
        by_worker[span.worker].append(span)
    pairs = [pair for own in by_worker.values() for pair in pairwise(sorted(own, key=lambda span: span.started))]
    return {
        "idle": [after.started - before.finished for before, after in pairs],
        "report under way": [before.received - before.finished for before, _ in pairs],
        "nothing to do": [after.leased - before.received for before, after in pairs],
        "work under way": [after.started - after.leased for _, after in pairs],
    }


def makespan(durations: Iterable[float], num_workers: int) -> float:
    """Seconds until all durations are done, if every worker takes the next one as soon as it is free."""
    free = [0.0] * num_workers
    for seconds in durations:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)


def bound(config: Config, median: float, seed: int, updates: range) -> float:
    """Bound on the ratio for the cohorts that these updates consume: mean makespan over N * mean / G."""
    size, num_workers = config.es.population, config.launch.workers
    cohorts = [[duration(median, SIGMA, seed, size * (u - 1) + k) for k in range(size)] for u in updates]
    ideal = mean(seconds for cohort in cohorts for seconds in cohort) * size / num_workers
    return mean(makespan(cohort, num_workers) for cohort in cohorts) / ideal


def run(arguments: argparse.Namespace, name: str, staleness: str) -> tuple[Config, Measured]:
    out = arguments.out.resolve()
    options = f"counter: {out / name}.episodes, median: {arguments.median}, sigma: {SIGMA}, durations: {arguments.seed}"
    overrides = [
        f"run.dir={out}", f"run.name={name}", f"run.num_updates={arguments.updates}", f"model.path={out / 'model'}",
        f"staleness={{{staleness}}}", f"task.options={{{options}}}",
    ]  # fmt: skip
    config_file = HERE / "async_speedup.yaml"
    command = [sys.executable, "-m", "hpc_es", "run", str(config_file), *overrides]
    paths = f"{HERE}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    config = load(config_file, overrides).config
    return config, measure(list(read_journal(out / name)), config.launch.workers, arguments.updates)


def report(name: str, config: Config, measured: Measured, sync: Measured) -> bool:
    """Print the measurements. Returns False if a cohort has more stale members than natural asynchrony allows."""
    size = config.es.population
    print(
        f"{name:<20}{measured.busy_share:>12.3f}{measured.useful_share:>12.3f}{measured.seconds_per_update:>12.3f}"
        f"{sync.seconds_per_update / measured.seconds_per_update:>12.3f}{measured.num_discarded:>12}"
        f"{mean(measured.stale) / size:>12.3f}{max(measured.stale) / size:>12.3f}",
        flush=True,
    )
    for what, seconds in measured.gaps.items():
        cuts = [1e3 * cut for cut in quantiles(seconds, n=20)]
        print(f"    {what:<18} mean {1e3 * mean(seconds):7.1f} ms, median {cuts[9]:7.1f}, 95 % {cuts[18]:7.1f}")
    stale, most = (
        f"cohorts by stale members: {dict(sorted(Counter(measured.stale).items()))}",
        config.launch.workers - 1,
    )
    if not name.startswith("natural"):  # with hold, results pile up, so that a whole cohort may be stale
        print(f"    {stale}", flush=True)
        return True
    holds = max(measured.stale) <= most
    print(f"    {stale}; at most G - 1 = {most}: {'holds' if holds else 'DOES NOT HOLD'}", flush=True)
    return holds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--median", type=float, default=0.5, help="median duration in seconds")
    parser.add_argument("--updates", type=int, default=24)
    parser.add_argument(
        "--seed", type=int, default=2, help="seed of the list; with 2 its mean equals that of the distribution"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/async_speedup"), help="folder of the runs, which is emptied first"
    )
    arguments = parser.parse_args()
    shutil.rmtree(arguments.out, ignore_errors=True)
    write_lab_model(arguments.out / "model", LAB_MODELS["lab-10k"])
    columns = ("busy", "useful", "s / update", "ratio", "discarded", "stale mean", "stale max")
    print(f"{'':<20}" + "".join(f"{column:>12}" for column in columns))
    measured: dict[str, Measured] = {}
    all_hold = True
    for name, staleness in RUNS.items():
        config, measured[name] = run(arguments, name.replace(", ", "-").replace(" ", "-"), staleness)
        all_hold &= report(name, config, measured[name], measured["sync"])
    listed = bound(config, arguments.median, arguments.seed, measured["sync"].updates)
    drawn = bound(config, arguments.median, -1, range(1, NUM_COHORTS + 1))
    print(f"bound on the ratio: {listed:.3f} for these durations, {drawn:.3f} for their distribution")
    return 0 if all_hold else 1


if __name__ == "__main__":
    sys.exit(main())
