"""How far theta moved, beside the random walk of a run whose fitness means nothing.

The walk: the utilities of every commit dealt out to its members at random. Z-scores and ranks have a fixed sum of
squares whatever the fitness, so a single update is about as long with meaning as without; what meaning can change is
whether updates add up: a theta further from theta_0 than the walk has been going somewhere. In d dimensions the length
of a walk varies by one part in sqrt(2 d), which is nothing for a language model, and is counted for small ones.
"""

import math
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_es.analysis.figures.canvas import (
    MUTED,
    colour,
    from_zero,
    legend,
    legend_below,
    log_scale,
    panels,
    percent,
    title,
    whole_numbers,
)
from hpc_es.analysis.statistics.runs import Runs, conditions_of, labelled, settings
from hpc_es.analysis.statistics.sample import Sample, sample
from hpc_es.errors import NothingToShow
from hpc_es.records import Commit, Term
from hpc_es.store import Run

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Floats = np.ndarray[Any, np.dtype[np.float64]]

THRESHOLDS = (1e-3, 1.5e-3, 2e-3)
"""Magnitudes at which Zheng et al. (2026) give shares of a language model's parameters."""
SIGMAS = (0.1, 0.5, 1.0, 2.0)
"""Further thresholds, in units of the run's sigma: these have something to say at every scale."""
_WALKERS = 2**15
"""Elements of a simulated walk, where an optimiser leaves no formula."""
_TABLE_VARIANCE = 0.99998
"""Variance of the 65,536-point Gaussian of the noise; its standard deviation is 0.99999."""


class Walk(NamedTuple):
    """Standard deviation per parameter, over V updates; times sqrt(d) it is a norm."""

    steps: "Floats"
    """[V] of the change of each update."""
    distances: "Floats"
    """[V] of theta_u - theta_0."""


def walk(commits: "tuple[Commit, ...]") -> Walk:
    """The random walk that the same schedule makes when utilities are dealt out at random."""
    import numpy as np

    gradients = np.array([gradient_variance(commit) for commit in commits])
    if all(commit.seeds.step is None for commit in commits):
        return Walk(np.sqrt(gradients), np.sqrt(np.cumsum(gradients)))
    return _simulated_walk(commits, np.sqrt(gradients))


def gradient_variance(commit: Commit) -> float:
    """Expected square, per parameter, of sum(a_i * eps_i) with a_i = 4096 * c_i, over all ways to deal the utilities
    of a commit out to its members. Members that share their noise (a mirrored pair) are not independent."""
    if commit.null:
        return 0.0
    weights, utilities = _weights(commit), [term.utility for term in commit.seeds.terms]
    number, squares = len(utilities), math.fsum(u * u for u in utilities)
    same = squares / number
    other = (math.fsum(utilities) ** 2 - squares) / (number * (number - 1)) if number > 1 else 0.0
    groups = defaultdict[Any, list[float]](list)
    for term, weight in zip(commit.seeds.terms, weights, strict=True):
        groups[term.seed, term.subspace, term.partition_seed].append(term.sign * weight)
    total = 0.0
    for group in groups.values():
        alone = math.fsum(weight * weight for weight in group)
        total += same * alone + other * (math.fsum(group) ** 2 - alone)
    return _TABLE_VARIANCE * total / commit.seeds.num_subspaces


def share_within(threshold: float, deviation: float) -> float:
    """Share of a normal distribution around 0 within +-threshold."""
    return math.erf(threshold / (deviation * math.sqrt(2))) if deviation else 1.0


def magnitudes(run: Run, model: Path | None = None) -> "pd.DataFrame":
    """Shares of trained parameters by |theta_V - theta_0|: threshold, sigmas (the same, in units of the first
    update's sigma), share (in the sample), walk (the share that a random walk of the same schedule should have),
    standard_error (by which it would miss that in as large a sample). Errors: NothingToShow as `sample`."""
    import pandas as pd

    found = sample(run, model)
    deviation = float(walk(found.commits).distances[-1])
    sigma, rows = _sigma(run), []
    for threshold in sorted({float(f"{value:.9g}") for value in (*THRESHOLDS, *(part * sigma for part in SIGMAS))}):
        share = float((abs(found.changes) <= threshold).mean())
        walking = share_within(threshold, deviation)
        rows.append(
            (threshold, threshold / sigma, share, walking, math.sqrt(walking * (1 - walking) / found.num_sampled))
        )
    return pd.DataFrame(rows, columns=["threshold", "sigmas", "share", "walk", "standard_error"])


def plot_update_norms(runs: Runs) -> "Figure":
    """Length of every update as the head measured it. Errors: NothingToShow before the first digest."""
    conditions = conditions_of(runs)
    if all(run.updates["update_norm"].isna().all() for condition in conditions for run in condition.runs):
        raise NothingToShow("the norm of no update has been recorded yet")
    figure, ((axes,),) = panels(1, 1, width=10.5, height=2.8)
    for number, condition in enumerate(conditions):
        for place, run in enumerate(condition.runs):
            label = condition.label if place == 0 else None
            updates = run.updates
            axes.plot(updates["version"], updates["update_norm"], color=colour(number), linewidth=1.2, label=label)
    axes.set_xlabel("updates")
    axes.set_ylabel("|theta_u - theta_{u-1}|")
    from_zero(axes)
    whole_numbers(axes)
    legend_below(figure, axes, 4)
    return figure


def plot_drift(runs: Runs, model: Path | None = None) -> "Figure":
    """Per run: length of each update, distance from theta_0, and the ratio of that to the random walk; the band and
    the ± of the title are two standard errors, of the sample and of the walk. Errors: NothingToShow where no run can be
    sampled."""
    shown, missing = _sampled(runs, model)
    figure, rows = panels(len(shown), 3, width=10.5, height=2.6)
    _name_missing(figure, missing)
    for (left, middle, right), (label, _, found) in zip(rows, shown, strict=True):
        _draw_walks(left, middle, found)
        _draw_ratio(right, found)
        title(left, f"{label}: length of updates")
        title(middle, "distance from theta_0")
    for axes in rows[-1]:
        axes.set_xlabel("updates")
    legend_below(figure, rows[0][1])
    return figure


def plot_magnitudes(runs: Runs, model: Path | None = None) -> "Figure":
    """Per run: share of parameters that moved by at most so much, and the same for the random walk. Errors:
    NothingToShow as `plot_drift`."""
    shown, missing = _sampled(runs, model)
    figure, rows = panels(-(-len(shown) // 2), min(len(shown), 2), width=10.5, height=2.9)
    _name_missing(figure, missing)
    every = [axes for row in rows for axes in row]
    for axes, (label, run, found) in zip(every, shown, strict=False):
        _draw_magnitudes(axes, found, magnitudes(run, model))
        title(axes, label)
        axes.set_xlabel("|theta_V - theta_0| of a parameter")
    for axes in every[len(shown) :]:
        axes.set_axis_off()
    for row in rows:
        row[0].set_ylabel("share of parameters")
    return figure


# --- panels ------------------------------------------------------------------------------------------------------


def _draw_walks(left: "Axes", middle: "Axes", found: Sample) -> None:
    expected, root = walk(found.commits), math.sqrt(found.num_parameters)
    updates = [commit.version for commit in found.commits]
    pairs = (
        (left, found.norms, found.norm_errors, expected.steps),
        (middle, found.distances, found.distance_errors, expected.distances),
    )
    for axes, values, errors, walking in pairs:
        axes.plot(updates, values, color=colour(0), linewidth=1.6, label="theta, from a sample of its parameters")
        axes.fill_between(updates, values - 2 * errors, values + 2 * errors, color=colour(0), alpha=0.2)
        axes.plot(
            updates, root * walking, color="black", linewidth=1, linestyle="--", label="random walk, same schedule"
        )
        from_zero(axes)
        whole_numbers(axes)


def _draw_ratio(axes: "Axes", found: Sample) -> None:
    import numpy as np

    walking = math.sqrt(found.num_parameters) * walk(found.commits).distances
    updates = np.array([commit.version for commit in found.commits])
    moved = walking > 0
    ratio = found.distances[moved] / walking[moved]
    error = np.hypot(found.distance_errors[moved] / walking[moved], 1 / math.sqrt(2 * found.num_parameters))
    axes.axhline(1, color="black", linewidth=1, linestyle="--")
    axes.plot(updates[moved], ratio, color=colour(0), linewidth=1.6)
    axes.fill_between(updates[moved], ratio - 2 * error, ratio + 2 * error, color=colour(0), alpha=0.2)
    whole_numbers(axes)
    last = f"{ratio[-1]:.4f} ± {2 * error[-1]:.4f}" if len(ratio) else "no change"
    title(axes, f"distance / walk: {last}")


def _draw_magnitudes(axes: "Axes", found: Sample, table: "pd.DataFrame") -> None:
    import numpy as np

    moved = np.sort(np.abs(found.changes))
    deviation = float(walk(found.commits).distances[-1])
    grid = np.geomspace(max(moved[-1], deviation, 1e-30) * 1e-2, max(moved[-1], deviation, 1e-30) * 1.2, 300)
    axes.plot(
        grid, np.searchsorted(moved, grid, side="right") / moved.size, color=colour(0), linewidth=2, label="theta"
    )
    walking = [share_within(float(value), deviation) for value in grid]
    axes.plot(grid, walking, color="black", linewidth=1, linestyle="--", label="random walk, same schedule")
    for threshold in table["threshold"].tolist():
        if grid[0] < threshold < grid[-1]:
            axes.axvline(threshold, color=MUTED, linewidth=0.7, linestyle=":", zorder=1.6)
    log_scale(axes)
    percent(axes)
    lines = [
        f"≤ {row.threshold:g} ({row.sigmas:.3g} sigma):  {row.share:.2%}  "
        f"(walk {row.walk:.2%} ± {row.standard_error:.2%})"
        for row in table.itertuples()
    ]
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1}
    text = axes.text(
        0.02, 0.97, "\n".join(lines), transform=axes.transAxes, va="top", fontsize=7, color=MUTED, bbox=box
    )
    text.set_zorder(1.8)  # behind the curves, in front of the thresholds
    legend(axes, loc="lower right")


# --- numbers -----------------------------------------------------------------------------------------------------


def _weights(commit: Commit) -> list[float]:
    """alpha * w_i of every member: its coefficient over its utility. A utility of 0 hides it; then it is the mean."""
    terms = commit.seeds.terms
    known = [_weight(term) for term in terms if term.utility]
    mean = math.fsum(known) / len(known)
    return [_weight(term) if term.utility else mean for term in terms]


def _weight(term: Term) -> float:
    return 4096 * term.coefficient / (term.utility * term.sign)


def _simulated_walk(commits: "tuple[Commit, ...]", deviations: "Floats") -> Walk:
    """Independent normal gradients through the optimiser of the commits."""
    import numpy as np

    from hpc_es.noise.reference import optimise
    from hpc_es.params.arena import update_of

    generator, everywhere = np.random.default_rng(0), np.ones(_WALKERS, bool)
    theta, state = np.zeros(_WALKERS), [np.zeros(_WALKERS, np.float32) for _ in range(2)]
    steps, distances = [], []
    for commit, deviation in zip(commits, deviations, strict=True):
        change, step = np.zeros(_WALKERS), update_of(commit).step
        if not commit.null:
            gradient = (deviation * generator.standard_normal(_WALKERS)).astype(np.float32)
            chosen = commit.seeds.step
            adam = chosen is not None and chosen.kind == "adam"
            change = gradient if step is None else optimise(step, gradient, everywhere, state[: 2 if adam else 1])
        theta = theta + change
        steps.append(math.sqrt(float((change.astype(float) ** 2).mean())))
        distances.append(math.sqrt(float((theta**2).mean())))
    return Walk(np.array(steps), np.array(distances))


def _sampled(runs: Runs, model: Path | None) -> tuple[list[tuple[str, Run, Sample]], list[str]]:
    """(runs that can be sampled, names of the others). Errors: NothingToShow when none can, as the first."""
    shown, reasons = list[tuple[str, Run, Sample]](), dict[str, NothingToShow]()
    for label, run in labelled(runs):
        try:
            shown.append((label, run, sample(run, model)))
        except NothingToShow as reason:
            reasons[label] = reason
    if not shown:
        raise next(iter(reasons.values()), NothingToShow("there are no runs"))
    return shown, list(reasons)


def _name_missing(figure: "Figure", labels: list[str]) -> None:
    if labels:
        text = f"without base model or journal at hand, hence not shown: {', '.join(labels)}"
        figure.suptitle(text, x=0.01, ha="left", fontsize=8, color=MUTED)


def _sigma(run: Run) -> float:
    """Sigma of the first update."""
    return float(settings(run)["es"]["sigma"]["start"])
