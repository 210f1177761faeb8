"""Figures of where the seconds of an evaluation go: durations, waiting times, and discarded results."""

import math
from typing import TYPE_CHECKING

from hpc_es.analysis.figures.canvas import (
    FATE_COLOURS,
    colour,
    lag_colours,
    legend,
    legend_below,
    log_scale,
    panels,
    percent,
    short,
    title,
    whole_numbers,
)
from hpc_es.analysis.statistics.runs import Runs, conditions_of, labelled, labelled_within
from hpc_es.analysis.statistics.waiting import MIN_FOR_INTERVAL, discard_bias, members, seconds_by_update
from hpc_es.errors import NothingToShow

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_WORKERS = 24
"""Largest number of workers in the panel by worker."""


def plot_durations(runs: Runs) -> "Figure":
    """Plot how long evaluations take: the distribution by condition (left) and by worker of the first run (right).

    Workers are shown as quartiles and the range from 5 to 95 %. Errors: NothingToShow without results.
    """
    conditions = [
        (condition.label, frames)
        for condition in conditions_of(runs)
        if (frames := [(label, found) for label, run in labelled_within(condition) if len(found := members(run))])
    ]
    if not conditions:
        raise NothingToShow("no member has been evaluated yet")
    first_label, first = conditions[0][1][0]
    num_workers = min(first["worker"].nunique(), MAX_WORKERS)
    figure, ((left, right),) = panels(1, 2, width=10.5, height=max(3.2, 0.8 + 0.15 * num_workers))
    for number, (name, frames) in enumerate(conditions):
        _draw_distribution(left, name, [found for _, found in frames], colour(number))
    log_scale(left)
    left.set_xlabel("seconds of an evaluation (update, perturb, roll out)")
    left.set_ylabel("share of members")
    percent(left)
    title(left, "Durations of evaluations")
    _draw_by_worker(right, first)
    title(right, f"By worker: {first_label}")
    legend_below(figure, left)
    return figure


def plot_waiting(runs: Runs) -> "Figure":
    """Plot for each run where consumed members spent their time.

    Left: seconds in flight and in the queue of each member, coloured by lag. Right: mean seconds until the lease, in
    flight and in the queue, by lag. Errors: NothingToShow before the first commit.
    """
    shown = [(label, found) for label, run in labelled(runs) if len(found := members(run).dropna(subset="queue"))]
    if not shown:
        raise NothingToShow("no result has been consumed by an update yet")
    figure, rows = panels(len(shown), 2, width=10.5, height=2.7, width_ratios=(1.2, 1))
    for (left, right), (label, found) in zip(rows, shown, strict=True):
        for lag, tint in lag_colours([int(lag) for lag in found["lag"].unique()]).items():
            some = found[found["lag"] == lag]
            left.plot(some["flight"], some["queue"], ".", color=tint, markersize=3, alpha=0.7, label=str(lag))
        left.set_ylabel("queue (s)")
        legend(left, title="lag", loc="center left", bbox_to_anchor=(1.0, 0.5), markerscale=2.5, reverse=True)
        title(left, label)
        _draw_means(right, found)
    rows[-1][0].set_xlabel("flight: from the lease to the journalled result (s)")
    rows[-1][1].set_xlabel("lag")
    legend_below(figure, rows[0][1])
    return figure


def plot_discards(runs: Runs) -> "Figure":
    """Plot for each run with discards the worker-seconds that were discarded (left), and how much longer discarded
    members took than consumed ones, with 95 % intervals (right). Errors: NothingToShow if nothing was discarded."""
    shown = [(label, run, bias) for label, run in labelled(runs) if not (bias := discard_bias(run)).empty]
    if not shown:
        raise NothingToShow("no good result was discarded for its lag")
    figure, rows = panels(len(shown), 2, width=10.5, height=2.5)
    for (left, right), (label, run, bias) in zip(rows, shown, strict=True):
        _draw_lost_seconds(left, label, seconds_by_update(run))
        _draw_bias(right, bias)
    rows[-1][0].set_xlabel("updates")
    rows[-1][1].set_xlabel("difference, relative to consumed members")
    return figure


# --- panels ------------------------------------------------------------------------------------------------------


def _draw_distribution(axes: "Axes", label: str, frames: "list[pd.DataFrame]", tint: str) -> None:
    import numpy as np

    seconds = np.sort(np.concatenate([found["seconds"].to_numpy(float) for found in frames]))
    median, longest = np.percentile(seconds, [50, 95])
    text = f"{label}: median {median:.3g} s, 95 % {longest:.3g} s"
    axes.step(seconds, np.arange(1, len(seconds) + 1) / len(seconds), where="post", color=tint, label=text)


def _draw_by_worker(axes: "Axes", found: "pd.DataFrame") -> None:
    import numpy as np

    workers = list(dict.fromkeys(found["worker"]))[:MAX_WORKERS]
    values = [found.loc[found["worker"] == worker, "seconds"].dropna().to_numpy(float) for worker in workers]
    for place, some in enumerate(values, start=1):
        low, first, median, third, high = np.percentile(some, [5, 25, 50, 75, 95])
        axes.plot([low, high], [place, place], color=FATE_COLOURS["accepted"], linewidth=1)
        axes.barh(place, third - first, left=first, height=0.6, color="#CFE3F1", edgecolor=FATE_COLOURS["accepted"])
        axes.plot([median, median], [place - 0.3, place + 0.3], color=FATE_COLOURS["accepted"], linewidth=2)
    counts = [f"{short(worker)}  ({len(some)})" for worker, some in zip(workers, values, strict=True)]
    axes.set_yticks(range(1, len(workers) + 1), counts, fontsize=7)
    axes.invert_yaxis()
    log_scale(axes)
    axes.set_xlabel("seconds of an evaluation (results in brackets)")
    axes.grid(axis="y", visible=False)


def _draw_means(axes: "Axes", found: "pd.DataFrame") -> None:
    means = found.groupby("lag")[["unleased", "flight", "queue"]].mean()
    places, bottom = range(len(means)), means["unleased"] * 0
    parts = {"unleased": ("waits for a worker", "#BBBBBB"), "flight": ("in flight", FATE_COLOURS["accepted"])}
    parts |= {"queue": ("in the queue", "#E69F00")}
    for name, (label, tint) in parts.items():
        axes.bar(places, means[name], bottom=bottom, color=tint, label=label)
        bottom = bottom + means[name]
    axes.set_xticks(list(places), [f"{lag:.0f}" for lag in means.index])
    axes.set_xlim(-0.6, max(len(means), 4) - 0.4)
    axes.set_ylabel("mean seconds")
    axes.grid(axis="x", visible=False)


def _draw_lost_seconds(axes: "Axes", label: str, spent: "pd.DataFrame") -> None:
    axes.bar(spent.index, spent["accepted"], width=1.0, color=FATE_COLOURS["accepted"], label="consumed")
    axes.bar(
        spent.index,
        spent["discarded"],
        bottom=spent["accepted"],
        width=1.0,
        color=FATE_COLOURS["discarded"],
        label="discarded",
    )
    share = spent["discarded"].sum() / spent.to_numpy().sum()
    axes.set_ylabel("worker-seconds")
    axes.set_ylim(top=1.2 * spent.sum(axis=1).max())
    whole_numbers(axes)
    legend(axes, loc="upper left", ncols=2)
    title(axes, f"{label}: {share:.1%} of the seconds discarded")


def _draw_bias(axes: "Axes", bias: "pd.DataFrame") -> None:
    names = {"seconds": "seconds", "turns": "turns per episode", "tokens": "tokens per episode"}
    relative = bias[["difference", "low", "high"]].div(bias["consumed"], axis=0)
    for place, (middle, low, high) in enumerate(relative.to_numpy()):
        if not math.isnan(low):
            axes.plot([low, high], [place, place], color=FATE_COLOURS["discarded"], linewidth=2)
        axes.plot(middle, place, "o", color=FATE_COLOURS["discarded"])
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(bias)), [names[str(name)] for name in bias.index])
    axes.set_ylim(len(bias) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    percent(axes, "x")
    consumed, discarded = bias[["num_consumed", "num_discarded"]].max()
    enough = min(discarded, consumed) >= MIN_FOR_INTERVAL
    without = "" if enough else f", no interval below {MIN_FOR_INTERVAL}"
    title(axes, f"{discarded:,.0f} discarded against {consumed:,.0f} consumed{without}")
