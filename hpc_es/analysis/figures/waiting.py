"""Where the seconds of an evaluation go: how long it takes, where it waits, and what is thrown away.

Invariant: flight is from the lease to the journalled result, queue from there to the commit that consumes it; both on
the head's clock. Durations are the worker's own, by its monotonic clock.
"""

import math
from typing import TYPE_CHECKING, Any

from hpc_es.analysis.figures.canvas import (
    FATES,
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
from hpc_es.analysis.statistics.progress import busy_seconds, tokens
from hpc_es.analysis.statistics.runs import Runs, conditions_of, labelled, labelled_within
from hpc_es.errors import NothingToShow
from hpc_es.store import Run

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_RESAMPLES = 2_000
MIN_FOR_INTERVAL = 5
"""Fewer members, consumed or discarded, have no interval: a bootstrap of them says nothing."""
MAX_WORKERS = 24


def members(run: Run) -> "pd.DataFrame":
    """Members whose result came back: status, worker, lag, update (that consumed or refused it), seconds, and per
    episode turns and tokens; unleased (planned to leased), flight (leased to received), queue (received to the
    commit that consumed it; NaN where none did), in s."""
    import pandas as pd

    rows = run.evaluations
    rows = rows[(rows["kind"] == "train") & rows["time_received"].notna() & (rows["error"] == "")]
    committed = pd.Series(run.updates["time_committed"].to_numpy(float), index=run.updates["version"] - 1)
    lag = rows["lag"].astype("Float64").astype(float)
    return pd.DataFrame(
        {
            "status": rows["status"],
            "worker": rows["worker"],
            "lag": lag,
            "update": lag + rows["dispatch_version"] + 1,
            "seconds": busy_seconds(rows),
            "turns": rows["turns"].astype("Float64").astype(float) / rows["num_tasks"],
            "tokens": tokens(rows) / rows["num_tasks"],
            "unleased": rows["time_leased"] - rows["time_planned"],
            "flight": rows["time_received"] - rows["time_leased"],
            "queue": rows["consumed_version"].astype("Float64").astype(float).map(committed) - rows["time_received"],
        }
    )


def discard_bias(run: Run) -> "pd.DataFrame":
    """Whether what was discarded took longer than what was consumed. Rows: seconds, turns, tokens (per evaluation or
    per episode); columns: consumed, discarded (means), num_consumed, num_discarded, difference, low, high (95 %
    percentile bootstrap of the difference of means, fixed seed; NaN where there are fewer than five of either)."""
    import numpy as np
    import pandas as pd

    found, generator = members(run), np.random.default_rng(0)
    rows = {}
    for what in ("seconds", "turns", "tokens"):
        consumed = found.loc[found["status"] == "accepted", what].dropna().to_numpy(float)
        discarded = found.loc[found["status"] == "discarded", what].dropna().to_numpy(float)
        if not len(consumed) or not len(discarded):
            continue
        low = high = math.nan
        if min(len(consumed), len(discarded)) >= MIN_FOR_INTERVAL:
            resampled = _resampled_means(discarded, generator) - _resampled_means(consumed, generator)
            low, high = np.percentile(resampled, [2.5, 97.5])
        means = float(consumed.mean()), float(discarded.mean())
        rows[what] = {
            "consumed": means[0],
            "discarded": means[1],
            "num_consumed": len(consumed),
            "num_discarded": len(discarded),
            "difference": means[1] - means[0],
            "low": float(low),
            "high": float(high),
        }
    names = ["consumed", "discarded", "num_consumed", "num_discarded", "difference", "low", "high"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=names).rename_axis("of")


def plot_durations(runs: Runs) -> "Figure":
    """Cumulative distribution of the seconds that members took, by condition (left).

    Right: the same by worker, as quartiles and the range from 5 to 95 %, of the first run.
    Errors: NothingToShow without results.
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
    """Per run: seconds in flight and in the queue of every consumed member, coloured by lag (left), and the mean wait
    for a worker, in flight and in the queue by lag (right). Errors: NothingToShow before the first commit."""
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
    """Per run with discards: worker-seconds thrown away (left), and how much longer discarded members were than
    consumed ones, with 95 % intervals (right). Errors: NothingToShow where nothing was discarded."""
    shown = [(label, run, bias) for label, run in labelled(runs) if not (bias := discard_bias(run)).empty]
    if not shown:
        raise NothingToShow("no good result was discarded for its lag")
    figure, rows = panels(len(shown), 2, width=10.5, height=2.5)
    for (left, right), (label, run, bias) in zip(rows, shown, strict=True):
        _draw_lost_seconds(left, label, members(run))
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
        axes.plot([low, high], [place, place], color=FATES["accepted"], linewidth=1)
        axes.barh(place, third - first, left=first, height=0.6, color="#CFE3F1", edgecolor=FATES["accepted"])
        axes.plot([median, median], [place - 0.3, place + 0.3], color=FATES["accepted"], linewidth=2)
    counts = [f"{short(worker)}  ({len(some)})" for worker, some in zip(workers, values, strict=True)]
    axes.set_yticks(range(1, len(workers) + 1), counts, fontsize=7)
    axes.invert_yaxis()
    log_scale(axes)
    axes.set_xlabel("seconds of an evaluation (results in brackets)")
    axes.grid(axis="y", visible=False)


def _draw_means(axes: "Axes", found: "pd.DataFrame") -> None:
    means = found.groupby("lag")[["unleased", "flight", "queue"]].mean()
    places, bottom = range(len(means)), means["unleased"] * 0
    parts = {"unleased": ("waits for a worker", "#BBBBBB"), "flight": ("in flight", FATES["accepted"])}
    parts |= {"queue": ("in the queue", "#E69F00")}
    for name, (label, tint) in parts.items():
        axes.bar(places, means[name], bottom=bottom, color=tint, label=label)
        bottom = bottom + means[name]
    axes.set_xticks(list(places), [f"{lag:.0f}" for lag in means.index])
    axes.set_xlim(-0.6, max(len(means), 4) - 0.4)
    axes.set_ylabel("mean seconds")
    axes.grid(axis="x", visible=False)


def _draw_lost_seconds(axes: "Axes", label: str, found: "pd.DataFrame") -> None:
    spent = found.dropna(subset="update").groupby(["update", "status"])["seconds"].sum().unstack(fill_value=0)
    spent = spent.reindex(columns=["accepted", "discarded"], fill_value=0.0)
    axes.bar(spent.index, spent["accepted"], width=1.0, color=FATES["accepted"], label="consumed")
    axes.bar(
        spent.index,
        spent["discarded"],
        bottom=spent["accepted"],
        width=1.0,
        color=FATES["discarded"],
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
            axes.plot([low, high], [place, place], color=FATES["discarded"], linewidth=2)
        axes.plot(middle, place, "o", color=FATES["discarded"])
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(bias)), [names[str(name)] for name in bias.index])
    axes.set_ylim(len(bias) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    percent(axes, "x")
    consumed, discarded = bias[["num_consumed", "num_discarded"]].max()
    enough = min(discarded, consumed) >= MIN_FOR_INTERVAL
    without = "" if enough else f", no interval below {MIN_FOR_INTERVAL}"
    title(axes, f"{discarded:,.0f} discarded against {consumed:,.0f} consumed{without}")


def _resampled_means(values: "np.ndarray[Any, Any]", generator: "np.random.Generator") -> "np.ndarray[Any, Any]":
    import numpy as np

    return np.array([values[generator.integers(0, len(values), len(values))].mean() for _ in range(NUM_RESAMPLES)])
