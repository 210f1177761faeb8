"""The figures of a report in order, each with its title and a note on how to read it."""

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
"""Largest number of panels in a figure with one panel per run."""


@dataclass(frozen=True)
class Selection:
    """The runs that a report shows, grouped into conditions, and how they are judged."""

    conditions: tuple[Condition, ...]
    measure: Measure
    model: Path | None = None
    """Path of the base model if it has moved."""

    @property
    def runs(self) -> Mapping[str, Sequence[Run]]:
        """All runs by condition."""
        return {condition.label: condition.runs for condition in self.conditions}

    @property
    def few(self) -> Mapping[str, Run]:
        """Runs for figures with a panel per run: one of each condition, or the first ones of a single condition."""
        most = MAX_PANELS if len(self.conditions) == 1 else 1
        named = [pair for condition in self.conditions for pair in labelled_within(condition)[:most]]
        return dict(named[:MAX_PANELS])

    @property
    def num_runs(self) -> int:
        return sum(len(condition.runs) for condition in self.conditions)


@dataclass(frozen=True)
class Entry:
    """One figure of a report. `draw` raises NothingToShow if the runs have no data for it."""

    name: str
    title: str
    reading: str
    """How to read the figure."""
    draw: "Callable[[Selection], Figure]"
    per_run: bool = False
    """Whether the figure has a panel per run and therefore shows only the runs of `Selection.few`."""


LEARNING = (
    Entry(
        "learning_curve",
        "Learning curves",
        "Left, the mean fitness of each cohort (thin) and of the last five (thick; raw for a staircase); right, the "
        "unperturbed policy on held-out tasks. Bars are standard errors over the tasks of one run, or deviations "
        "between several; a rise smaller than its error bars is not evidence.",
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
        "Cost of a result",
        "The same evaluations over four costs of training: at equal height, the curve further to the left was cheaper.",
        lambda chosen: plots.plot_costs(chosen.runs, chosen.measure),
    ),
    Entry(
        "at_k",
        "Best of k attempts",
        "Held-out tasks that were played repeatedly: left, the share of tasks that at least one of k attempts solves; "
        "right, the best reward of k attempts; dotted, the mean of one attempt. Solid is the last version, dashed the "
        "first. Curves that meet at large k mean that training made likely what was possible before. Bands are 95 % "
        "bootstrap intervals over tasks.",
        lambda chosen: plots.plot_at_k(chosen.few),
        per_run=True,
    ),
    Entry(
        "horizon",
        "Success against horizon",
        "Success on held-out tasks by the smallest number of turns that can solve them, for the first and the last "
        "evaluated version; bars are 95 % Wilson intervals. A policy that improved only at short horizons falls "
        "steeply.",
        lambda chosen: plots.plot_horizon(chosen.few),
        per_run=True,
    ),
)
STALENESS = (
    Entry(
        "lags",
        "Lags of consumed and refused members",
        "Left, how many members were consumed and refused at each lag; right, mean and largest lag of every cohort: no "
        "consumed lag may exceed the bound of the schedule.",
        lambda chosen: plots.plot_lags(chosen.few),
        per_run=True,
    ),
    Entry(
        "composition",
        "Cohorts compared with their schedule",
        "Each column is a cohort, coloured by lag; the black lines are what the schedule prescribes, so colours "
        "must change at the lines and nowhere else.",
        lambda chosen: plots.plot_composition(chosen.few),
        per_run=True,
    ),
    Entry(
        "brackets",
        "Brackets of the staircase",
        "At each step (vertical line) the cohort was measured around an old theta again: if that is theta_0, raw "
        "fitness must fall back to the dotted line, from the first number to the second. Grey: raw fitness of the Sync "
        "and Async-1 runs with otherwise the same settings, if the report includes them.",
        lambda chosen: plots.plot_brackets(chosen.few, references=chosen.runs),
        per_run=True,
    ),
)
TIME = (
    Entry(
        "timeline",
        "Timeline of workers",
        "One line per worker with its evaluations, coloured by what became of them, and commits as vertical lines. "
        "White is idle time, which a barrier causes before every commit. A member that is only reported returned a "
        "result that no update had consumed or refused by the end of the record. The centre is the unperturbed policy, "
        "on held-out tasks or on the tasks of a cohort.",
        lambda chosen: plots.plot_timeline(chosen.few),
        per_run=True,
    ),
    Entry(
        "worker_shares",
        "Busy and useful shares",
        "Shares of the seconds that a worker was connected: blue was spent on accepted evaluations, orange on others, "
        "grey on none.",
        lambda chosen: plots.plot_worker_shares(chosen.few),
        per_run=True,
    ),
    Entry(
        "durations",
        "How long evaluations take",
        "Left, the cumulative distribution over members: the longer its upper tail, the more a barrier costs; right, "
        "quartiles and the range from 5 to 95 % by worker, to find a slow one.",
        lambda chosen: plots.plot_durations(chosen.runs),
    ),
    Entry(
        "waiting",
        "Time in flight and in the queue",
        "Every consumed member: seconds from its lease to its result, and from there to its commit. Members with a "
        "long time in the queue are stale because of the schedule; those with a long time in flight because they are "
        "slow.",
        lambda chosen: plots.plot_waiting(chosen.few),
        per_run=True,
    ),
    Entry(
        "discards",
        "Discarded members, and their bias",
        "Left, worker-seconds by the update that consumed or refused them; right, how much longer discarded members "
        "took than consumed ones (95 % bootstrap intervals, omitted with fewer than five of either): right of zero, "
        "updates lack long episodes.",
        lambda chosen: plots.plot_discards(chosen.few),
        per_run=True,
    ),
)
MOVEMENT = (
    Entry(
        "update_norms",
        "Norm of updates",
        "The norm of every update, as the head measured it. It follows from step size and population, and does not "
        "show whether fitness carried information.",
        lambda chosen: plots.plot_update_norms(chosen.runs),
    ),
    Entry(
        "drift",
        "Distance from theta_0, compared with a random walk",
        "The dashed line is the same schedule with utilities assigned to members at random. Above it, updates have "
        "added up in one direction; on it, the distance shows no learning. The band, and ± in the title, are two "
        "standard errors, of the walk and of the sample of parameters that was replayed from the journal.",
        lambda chosen: plots.plot_drift(chosen.few, chosen.model),
        per_run=True,
    ),
    Entry(
        "magnitudes",
        "How far parameters moved",
        "Cumulative distribution of the distance that sampled parameters moved, and the one expected of a random walk "
        "of the same schedule, with its standard error in a sample of this size. Thresholds are those of the "
        "literature on language models, and multiples of the run's own sigma; those within the axis are dotted.",
        lambda chosen: plots.plot_magnitudes(chosen.few, chosen.model),
        per_run=True,
    ),
)
EPISODES = (
    Entry(
        "episodes",
        "Turns and tokens per episode",
        "Lines are consumed members (thick: mean of five updates), dots the unperturbed policy. This shows a policy "
        "that learns to write less, or more.",
        lambda chosen: plots.plot_episodes(chosen.runs),
    ),
    Entry(
        "lengths",
        "Length of episodes, by outcome",
        "Successful and unsuccessful episodes of every cohort: lines are means, bands go from the 10 % to the 90 % "
        "quantile. If both fall, the policy needs fewer turns; if only the mix of the two changes, it does not.",
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
