"""A table of text cells with a note below it, written as Markdown or HTML."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TextTable:
    """Cells of text for people to read; the numbers behind them are in a DataFrame."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    foot: str = ""
    num_names: int = 1
    """Number of columns at the left that hold names. The others hold numbers and are right-aligned."""

    def markdown(self) -> str:
        """Return the table as Markdown."""
        rule = ["---"] * self.num_names + ["--:"] * (len(self.header) - self.num_names)
        lines = [_line(cells) for cells in (self.header, rule, *self.rows)]
        return "\n".join([*lines, "", self.foot] if self.foot else lines)

    def html(self) -> str:
        """Return a <table>, with the foot as a paragraph below it."""
        head = "".join(f"<th{self._side(place)}>{html.escape(text)}</th>" for place, text in enumerate(self.header))
        body = "\n".join(
            "<tr>" + "".join(f"<td{self._side(k)}>{html.escape(text)}</td>" for k, text in enumerate(row)) + "</tr>"
            for row in self.rows
        )
        foot = f'\n<p class="foot">{html.escape(self.foot)}</p>' if self.foot else ""
        return f'<div class="wide"><table>\n<tr>{head}</tr>\n{body}\n</table></div>{foot}'

    def _side(self, place: int) -> str:
        return "" if place < self.num_names else ' class="number"'


def mean_and_sd(mean: float, sd: float, scale: float = 1, digits: int = 2, *, sign: str = "") -> str:
    """Format "72.66 ± 1.20", or without the deviation if it is NaN (a single run), or "-" if the mean is NaN."""
    if math.isnan(mean):
        return "-"
    text = f"{scale * mean:{sign},.{digits}f}"
    return text if math.isnan(sd) else f"{text} ± {scale * sd:,.{digits}f}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
