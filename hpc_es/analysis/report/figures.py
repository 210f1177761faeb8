"""The figures of a report, in order: which there are, what they are called, and how each is to be read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_es.analysis.figures import plots
from hpc_es.analysis.statistics.progress import Measure
from hpc_es.analysis.statistics.runs import Condition, labelled_within
from hpc_es.store import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_PANELS = 8
"""Maximum number of panels in a figure that has one panel per run."""


@dataclass(frozen=True)
class Selection:
    """What a report is about."""

    conditions: tuple[Condition, ...]
    measure: Measure
    model: Path | None = None
    """The base model, where it has moved."""

    @property
    def runs(self) -> Mapping[str, Sequence[Run]]:
        """All of them, by condition."""
        return {condition.label: condition.runs for condition in self.conditions}

    @property
    def few(self) -> Mapping[str, Run]:
        """One per condition, the first; of a single condition its first runs. Labels say which run of how many."""
        most = MAX_PANELS if len(self.conditions) == 1 else 1
        named = [pair for condition in self.conditions for pair in labelled_within(condition)[:most]]
        return dict(named[:MAX_PANELS])

    @property
    def num_runs(self) -> int:
        return sum(len(condition.runs) for condition in self.conditions)


@dataclass(frozen=True)
class Entry:
    """One figure; `draw` raises NothingToShow where the runs have no data for it."""

    name: str
    title: str
    reading: str
    draw: "Callable[[Selection], Figure]"
    per_run: bool = False
    """It has a panel per run, so it shows `few` of them."""


LEARNING = (
    Entry(
        "learning_curve",
        "Learning curves",
        "Left, the mean fitness of each cohort (thin) and of the last five (thick; raw for a staircase); right, the "
        "unperturbed policy on held-out tasks. Bars are standard errors over the tasks of one run, or deviations "
        "between several; a rise smaller than its error bars means nothing.",
        lambda chosen: plots.plot_learning_curve(chosen.runs, measure=chosen.measure),
    ),
    Entry(
        "finals",
        "Final result by condition",
        "The last evaluation of the unperturbed policy on held-out tasks: small dots are runs, the large one is their "
        "mean. The bar is the standard deviation between runs, or for a single run the standard error over its tasks. "
        "Hollow: theta_0. The dashed line continues the first condition; a distance smaller than the bars is no "
        "difference.",
        lambda chosen: plots.plot_finals(chosen.runs, chosen.measure),
    ),
    Entry(
        "costs",
        "What a level cost",
        "The same evaluations over four costs of training: the curve further to the left at the same height was the "
        "cheaper one.",
        lambda chosen: plots.plot_costs(chosen.runs, chosen.measure),
    ),
    Entry(
        "at_k",
        "Best of k attempts",
        "Held-out tasks that were played repeatedly: left, the share of tasks that at least one of k attempts solves; "
        "right, the best reward of k; dotted, of one attempt. Solid is the last version, dashed the first: curves that "
        "meet at large k say that training made likely what was possible before. Bands are 95 % bootstrap intervals "
        "over tasks.",
        lambda chosen: plots.plot_at_k(chosen.few),
        per_run=True,
    ),
    Entry(
        "horizon",
        "Success against horizon",
        "Held-out tasks by the least number of turns that can solve them, under the first evaluated version and under "
        "the last; bars are Wilson's 95 % intervals. A policy that only gained at short horizons falls steeply.",
        lambda chosen: plots.plot_horizon(chosen.few),
        per_run=True,
    ),
)
STALENESS = (
    Entry(
        "lags",
        "Lags of what was consumed and refused",
        "Left, how many members were consumed at each lag and how many were too late; right, mean and largest lag of "
        "every cohort: no consumed lag may lie above the bound of the schedule.",
        lambda chosen: plots.plot_lags(chosen.few),
        per_run=True,
    ),
    Entry(
        "composition",
        "Cohorts against their schedule",
        "Each column is a cohort, coloured by lag; the black lines are what the schedule asks for, so colours must "
        "change at the lines and nowhere else.",
        lambda chosen: plots.plot_composition(chosen.few),
        per_run=True,
    ),
    Entry(
        "brackets",
        "Brackets of the staircase",
        "At each step (vertical line) the cohort was measured around an old theta again: where that is theta_0, raw "
        "fitness must fall back to the dotted line, from the first number to the second. Grey: raw fitness of the Sync "
        "and Async-1 runs with otherwise the same settings, where the report has them.",
        lambda chosen: plots.plot_brackets(chosen.few, references=chosen.runs),
        per_run=True,
    ),
)
TIME = (
    Entry(
        "timeline",
        "Who did what, and when",
        "One line per worker: its evaluations by what became of them, commits as vertical lines; white is idle time, "
        "which a barrier leaves before every commit. A member that is only reported has come back, but no update had "
        "consumed or refused it by the end of the record; the centre is the unperturbed policy, on held-out tasks or "
        "on the tasks of a cohort.",
        lambda chosen: plots.plot_timeline(chosen.few),
        per_run=True,
    ),
    Entry(
        "worker_shares",
        "Busy and useful shares",
        "Of the seconds that a worker was connected: blue went into evaluations that count, orange into others, grey "
        "into none.",
        lambda chosen: plots.plot_worker_shares(chosen.few),
        per_run=True,
    ),
    Entry(
        "durations",
        "How long evaluations take",
        "Left, the share of members that took at most so long: the longer the upper tail, the more a barrier costs; "
        "right, quartiles and the range from 5 to 95 % by worker, to find a slow one.",
        lambda chosen: plots.plot_durations(chosen.runs),
    ),
    Entry(
        "waiting",
        "Flight and queue",
        "Every consumed member: seconds from its lease to its result against seconds from there to its commit. What "
        "waits long in the queue is stale by design; what flies long is stale by nature.",
        lambda chosen: plots.plot_waiting(chosen.few),
        per_run=True,
    ),
    Entry(
        "discards",
        "What was thrown away, and whether that is a bias",
        "Left, worker-seconds by the update that consumed or refused them; right, how much longer discarded members "
        "were than consumed ones (95 % bootstrap intervals, none where there are fewer than five of either): right of "
        "zero, updates lack long episodes.",
        lambda chosen: plots.plot_discards(chosen.few),
        per_run=True,
    ),
)
MOVEMENT = (
    Entry(
        "update_norms",
        "Length of updates",
        "The length of every update, as the head measured it: it follows from step size and population, and says "
        "nothing about whether fitness meant anything.",
        lambda chosen: plots.plot_update_norms(chosen.runs),
    ),
    Entry(
        "drift",
        "Distance from theta_0, beside a random walk",
        "The dashed line is the same schedule with its utilities dealt out at random. Above it, updates have added up "
        "in one direction; on it, size alone shows no learning. The band, and ± in the title, are two standard errors, "
        "of a sample of parameters that was replayed from the journal and of the walk itself.",
        lambda chosen: plots.plot_drift(chosen.few, chosen.model),
        per_run=True,
    ),
    Entry(
        "magnitudes",
        "Parameters by how far they moved",
        "Share of the sampled parameters that moved by at most so much, and what a random walk of the same schedule "
        "should have, with the standard error that it would have in as large a sample. Thresholds are those of the "
        "literature, for language models, and multiples of the run's own sigma; those within the axis are dotted.",
        lambda chosen: plots.plot_magnitudes(chosen.few, chosen.model),
        per_run=True,
    ),
)
EPISODES = (
    Entry(
        "episodes",
        "Turns and tokens per episode",
        "Lines are consumed members (thick: mean of five updates), dots the unperturbed policy: one that learns to say "
        "less, or more, shows here.",
        lambda chosen: plots.plot_episodes(chosen.runs),
    ),
    Entry(
        "lengths",
        "Length of episodes, by outcome",
        "Episodes of every cohort that succeeded, and that did not: lines are means, bands go from the 10 % to the "
        "90 % quantile. Both falling is a policy that needs less; only the share of the long ones changing is not.",
        lambda chosen: plots.plot_lengths(chosen.few),
        per_run=True,
    ),
)

SECTIONS: dict[str, tuple[Entry, ...]] = {
    "Learning": LEARNING,
    "Staleness": STALENESS,
    "Time": TIME,
    "How far theta moved": MOVEMENT,
    "Episodes": EPISODES,
}
