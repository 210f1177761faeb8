"""Figure of what k attempts at a task are worth: pass@k and max@k over k."""

from typing import TYPE_CHECKING

from hpc_es.analysis.figures.canvas import colour, from_zero, legend_below, panels, percent, title
from hpc_es.analysis.statistics.at_k import KS, at_k
from hpc_es.analysis.statistics.held_out import Ceiling, at_most, ceiling
from hpc_es.analysis.statistics.runs import Runs, labelled
from hpc_es.errors import NothingToShow

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_at_k(runs: Runs, version: int | None = None) -> "Figure":
    """Success (left) and reward (right) of the best of k attempts, and dotted of one; the last version solid, the first
    dashed, with 95 % intervals over tasks; or one version. Errors: NothingToShow where tasks were played once."""
    shown, reasons, ceilings = [], [], set[Ceiling | None]()
    for label, run in labelled(runs):
        try:
            shown.append((label, at_k(run, version)))
            played = shown[-1][1][["source", "num_tasks"]].drop_duplicates()
            ceilings |= {ceiling(run, range(num_tasks), source) for source, num_tasks in played.itertuples(index=False)}
        except NothingToShow as reason:
            reasons.append(str(reason))
    if not shown:
        raise NothingToShow(reasons[0] if reasons else "no run was given")
    figure, (row,) = panels(1, 2, width=10.5, height=3.6)
    protocols = {text for _, table in shown for text in table["protocol"]}
    if len(protocols) == 1:
        figure.suptitle(min(protocols), fontsize=9)  # too long for a panel
    for axes, (name, of) in zip(row, (("pass@k", "success"), ("max@k", "reward")), strict=True):
        for number, (label, table) in enumerate(shown):
            suffix = f" ({table['protocol'].iloc[0]})" if len(protocols) > 1 else ""
            _draw(axes, table[table["of"] == of], name, label + suffix, colour(number))
        title(axes, f"{name} of {of}, dotted mean@k")
        axes.set_xlabel("k (attempts at a task)")
        axes.set_xscale("log", base=2)
        axes.set_xticks(KS, [str(k) for k in KS])
        axes.set_xlim(0.9, 1.1 * max(table["k"].max() for _, table in shown))
    percent(row[0])
    from_zero(row[0])
    highest = at_most(ceilings)
    row[0].set_ylabel("success on held-out tasks" + (f" (at most {highest})" if highest else ""))
    row[1].set_ylabel("reward on held-out tasks")
    legend_below(figure, row[0], 3)
    return figure


def _draw(axes: "Axes", table: "pd.DataFrame", name: str, label: str, tint: str) -> None:
    last = table["version"].max()
    for version, rows in table.groupby("version"):
        best, mean = (rows[rows["name"] == what] for what in (name, "mean@k"))
        style = "-" if version == last else "--"
        text = f"{label}, version {version}, {rows['num_repeats'].iloc[0]} repeats"
        axes.plot(best["k"], best["mean"], f"o{style}", color=tint, markersize=4, label=text)
        axes.fill_between(best["k"], best["low"], best["high"], color=tint, alpha=0.15 if version == last else 0.07)
        axes.plot(mean["k"], mean["mean"], ":", color=tint, linewidth=0.9)
