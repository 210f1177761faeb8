"""Figures of the lengths of episodes over a run, by success, and of the brackets of a staircase."""

from typing import TYPE_CHECKING

from hpc_es.analysis.figures.canvas import (
    MUTED,
    colour,
    from_zero,
    lag_colours,
    legend,
    legend_below,
    panels,
    title,
    whole_numbers,
)
from hpc_es.analysis.statistics.episodes import (
    LENGTHS,
    REFERENCES,
    brackets,
    is_reference,
    lengths,
    mean_over_runs,
    per_update,
    per_version,
    schedule_of,
)
from hpc_es.analysis.statistics.progress import TRAILING_UPDATES
from hpc_es.analysis.statistics.runs import Condition, Runs, conditions_of, is_staircase, labelled
from hpc_es.errors import NothingToShow
from hpc_es.store import Run

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_episodes(runs: Runs) -> "Figure":
    """Plot turns, generated tokens and prompt tokens per episode over the updates, for each condition.

    Lines are cohorts (trailing mean over five updates, but raw for a staircase), dots the unperturbed policy; both are
    means over the runs of the condition.
    Errors: NothingToShow without a commit.
    """
    conditions = conditions_of(runs)
    if not any(len(run.updates) for condition in conditions for run in condition.runs):
        raise NothingToShow("no update has been committed yet")
    figure, (row,) = panels(1, 3, width=10.5, height=3.1)
    for axes, (what, text) in zip(row, LENGTHS.items(), strict=True):
        for number, condition in enumerate(conditions):
            cohorts = mean_over_runs([per_update(run)[what] for run in condition.runs])
            window = 1 if is_staircase(condition.runs[0]) else TRAILING_UPDATES
            trailing = cohorts.rolling(window, min_periods=1).mean()
            axes.plot(cohorts.index, cohorts, color=colour(number), alpha=0.3, linewidth=0.9)
            axes.plot(cohorts.index, trailing, color=colour(number), linewidth=1.8, label=condition.label)
            policy = mean_over_runs([per_version(run)[what] for run in condition.runs])
            axes.plot(policy.index, policy, "o", color=colour(number), markersize=4, markeredgecolor="white")
        title(axes, f"{text} per episode")
        axes.set_xlabel("updates")
        from_zero(axes)
        whole_numbers(axes)
    legend_below(figure, row[0], 4)
    return figure


def plot_lengths(runs: Runs) -> "Figure":
    """Plot for each run the turns and tokens per episode of each cohort, for successful and unsuccessful episodes.

    Lines are means, bands go from the 10 % to the 90 % quantile. Errors: NothingToShow without a commit.
    """
    shown = [(label, lengths(run)) for label, run in labelled(runs) if len(run.updates)]
    if not shown:
        raise NothingToShow("no update has been committed yet")
    figure, rows = panels(len(shown), 3, width=10.5, height=2.6)
    for row, (label, table) in zip(rows, shown, strict=True):
        for axes, (what, text) in zip(row, LENGTHS.items(), strict=True):
            for success, tint in ((True, colour(2)), (False, colour(1))):
                mine = table[table["success"] == success]
                axes.fill_between(mine["update"], mine[f"{what}_low"], mine[f"{what}_high"], color=tint, alpha=0.15)
                name = "succeeded" if success else "did not succeed"
                axes.plot(mine["update"], mine[f"{what}_mean"], ".-", color=tint, markersize=3, label=name)
            axes.set_ylabel(text)
            from_zero(axes)
            whole_numbers(axes)
        title(row[0], label)
    for axes in rows[-1]:
        axes.set_xlabel("updates")
    legend_below(figure, rows[0][0], 2)
    return figure


def plot_brackets(runs: Runs, references: Runs = ()) -> "Figure":
    """Plot for each staircase run the raw fitness of every cohort, coloured by lag.

    At each step (vertical line) it should fall back to that of the first cohort (dotted). Behind it stands the mean raw
    fitness of the Sync and Async-1 runs among `references` that differ in nothing but the schedule.
    Errors: NothingToShow if no staircase has reached its second step.
    """
    beside = [condition for condition in conditions_of(references) if condition.runs]
    shown = [(label, run, found) for label, run in labelled(runs) if not (found := brackets(run)).empty]
    if not shown:
        raise NothingToShow("no run is a staircase that has reached its second step")
    figure, rows = panels(len(shown), 1, width=10.5, height=2.9)
    for (axes,), (label, run, found) in zip(rows, shown, strict=True):
        _draw_references(axes, [condition for condition in beside if is_reference(condition, run)])
        _draw_brackets(axes, label, run, found)
    rows[-1][0].set_xlabel("updates")
    return figure


def _draw_references(axes: "Axes", conditions: list[Condition]) -> None:
    for condition in conditions:
        fitness = mean_over_runs(
            [run.updates.set_index("version")["fitness_mean"].astype(float) for run in condition.runs]
        )
        schedule = schedule_of(condition)
        dashes = "-" if schedule == REFERENCES[0] else "--"
        axes.plot(fitness.index, fitness, color=MUTED, linestyle=dashes, linewidth=1, alpha=0.8, label=schedule)


def _draw_brackets(axes: "Axes", label: str, run: Run, found: "pd.DataFrame") -> None:
    updates = run.updates
    error = updates["fitness_std"] / updates["num_members"] ** 0.5
    axes.axhline(found["start"][0], color="black", linestyle=":", linewidth=1)
    for lag, tint in lag_colours(updates["lag_max"].astype(int).tolist()).items():
        mine = updates["lag_max"] == lag
        places = updates["version"][mine], updates["fitness_mean"][mine], error[mine]
        axes.errorbar(*places, fmt="o", color=tint, markersize=3, linewidth=0.8, label=f"lag {lag}")
    top = axes.get_ylim()[1]
    for step in found.itertuples():
        axes.axvline(float(str(step.update)) - 0.5, color="black", linewidth=0.8)
        text = f"{step.before:.3g} → {step.at:.3g}"
        axes.annotate(
            text, (float(str(step.update)), top), xytext=(2, -2), textcoords="offset points", fontsize=8, va="top"
        )
    axes.set_ylabel("fitness of the cohort")
    whole_numbers(axes)
    title(axes, f"{label}: the first cohort had {found['start'][0]:.3g} ± {found['start_error'][0]:.2g}")
    legend(axes, loc="center left", bbox_to_anchor=(1.0, 0.5))
