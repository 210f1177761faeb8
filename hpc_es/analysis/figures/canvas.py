"""Helpers that all figures share: panels, colours, axes, legends and PNG files.

Invariant: no display and no global state. Figures use matplotlib's Agg canvas, so they work in a notebook,
in a job, and in several threads.
"""

import io
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6A3D9A", "#7F7F7F", "#8C564B", "#000000")
"""Colours of conditions and runs. The first six are Okabe and Ito's, which colour-blind readers can tell apart."""
FATE_COLOURS = {"accepted": "#0072B2", "discarded": "#D55E00", "void": "#000000", "eval": "#BBBBBB", "other": "#56B4E9"}
"""Colour of each fate of an evaluation (statistics/timeline.py)."""
MUTED = "#666666"
FRESH = "#A9C4E0"
"""Colour of lag 0."""
DPI = 110

_STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.08,
}


def panels(
    rows: int = 1, columns: int = 1, *, width: float = 9.0, height: float = 3.2, **options: Any
) -> "tuple[Figure, list[list[Axes]]]":
    """Make a figure with rows x columns axes, `height` inches per row; other options go to Figure.subplots."""
    from matplotlib import rc_context

    with rc_context(_STYLE):
        figure = _plain_figure()(figsize=(width, height * rows + 0.3), layout="constrained", dpi=DPI)
        axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, [list(row) for row in axes]


@lru_cache
def _plain_figure() -> "type[Figure]":
    """Figure class that draws all text literally: a run name with dollar signs must not be parsed as mathematics."""
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    class PlainFigure(Figure):
        def draw(self, renderer: Any) -> None:
            for text in self.findobj(Text):
                text.set_parse_math(False)
            super().draw(renderer)

        def _repr_png_(self) -> bytes:
            """What a notebook shows; without it, only a figure of pyplot's would be shown as a picture."""
            return png(self)

    return PlainFigure


def colour(number: int) -> str:
    """Return the colour of the n-th condition or run."""
    return COLOURS[number % len(COLOURS)]


def lag_colours(lags: Sequence[int]) -> dict[int, Any]:
    """Map each lag to a colour: pale for 0, and from purple to yellow by rank for others, often 1, 2, 4, ... 128."""
    from matplotlib import colormaps

    stale, scale = sorted({*lags} - {0}), colormaps["plasma"]
    colours = {lag: scale(0.1 + 0.75 * rank / max(len(stale) - 1, 1)) for rank, lag in enumerate(stale)}
    return {**({0: FRESH} if 0 in lags else {}), **colours}


def title(axes: "Axes", text: str) -> None:
    """Set a bold, left-aligned panel title."""
    axes.set_title(text, loc="left", fontsize=9.5, fontweight="bold")


def whole_numbers(axes: "Axes") -> None:
    """Put ticks of the x axis on integers only."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def from_zero(axes: "Axes") -> None:
    """Start the y axis at 0 and leave some room above the data."""
    axes.set_ylim(0, 1.12 * max(axes.get_ylim()[1], 1e-30))


def percent(axes: "Axes", which: str = "y") -> None:
    """Show shares as percentages."""
    getattr(axes, f"{which}axis").set_major_formatter(lambda value, _: f"{100 * value:.4g} %")


def thousands(axes: "Axes", which: str = "x") -> None:
    """Show 1,500,000 as 1.5M, but keep values below 1,000: 0.5 shown as 500m would be read as minutes."""
    from matplotlib.ticker import EngFormatter

    large = EngFormatter(sep="")
    getattr(axes, f"{which}axis").set_major_formatter(lambda value, _: large(value) if value >= 1000 else f"{value:g}")


def log_scale(axes: "Axes") -> None:
    """Make the x axis logarithmic, with plain numbers at 1, 2, 5, 10, ... or at decades. Call it after drawing."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def legend(axes: "Axes", **where: Any) -> None:
    """Add a small legend without a frame to a panel."""
    axes.legend(fontsize=8, frameon=False, handlelength=1.4, **where)


def legend_below(figure: "Figure", axes: "Axes", columns: int = 3) -> None:
    """Add one legend below all panels, with the entries of `axes` (if it has any)."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        longest = max(map(len, labels))
        columns = max(1, min(columns, len(labels), 130 // max(longest + 6, 1)))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def short(name: str, longest: int = 22) -> str:
    """Shorten a long name to its end, which is the part that tells workers apart."""
    return name if len(name) <= longest else f"…{name[1 - longest :]}"


def png(figure: "Figure") -> bytes:
    """Render the figure as the bytes of a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    out = io.BytesIO()
    FigureCanvasAgg(figure).print_png(out)
    return out.getvalue()


def save_png(figure: "Figure", path: str | Path) -> Path:
    """Write the figure to a PNG file, creating its folder. Returns the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(figure))
    return path
