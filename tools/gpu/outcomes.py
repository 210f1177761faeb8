"""Rows of what was found, and their table. Needs nothing but Python."""

from collections.abc import Sequence
from typing import Any

A_GPU = "a CUDA device"
"""What must not fail, or nothing else is tried."""
Row = dict[str, Any]
"""what, status (passed, FAILED, not run, measured), detail, value, unit, goal (at least); and in the end, check."""


def row_of(what: str, status: str, detail: str = "") -> Row:
    return {"what": what, "status": status, "detail": detail, "value": None, "unit": "", "goal": None}


def failed(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["status"] == "FAILED"]


def counts(rows: Sequence[Row]) -> str:
    """How many of each status."""
    statuses = [row["status"] for row in rows]
    return ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))


def line_of(row: Row) -> str:
    parts = [row["what"]]
    if row["value"] is not None:
        goal = f" (goal {_short(row['goal'])})" if row["goal"] is not None else ""
        parts.append(f"{_short(row['value'])} {row['unit']}{goal}")
    if row["detail"]:
        parts.append(row["detail"])
    return f"  {row['status']:<9} {': '.join(parts)}"


def table(rows: Sequence[Row], device: str) -> str:
    """Everything by check; the failures once more at the end."""
    lines, last = list[str](), ""
    for row in rows:
        if row["check"] != last:
            lines.append(f"\n{(last := row['check'])}")
        lines.append(line_of(row))
    no_gpu = any(row["what"] == A_GPU for row in failed(rows))
    where = "no GPU was found" if no_gpu else "with --device cuda"
    if device == "cpu":
        where = "a rehearsal on a CPU, which says nothing about a GPU"
    lines += ["", *(f"FAILED {row['check']}: {row['what']}: {row['detail']}" for row in failed(rows))]
    return "\n".join([*lines, f"{where}: {counts(rows)}"])


def _short(value: float) -> str:
    return f"{value:.4g}" if value < 1e4 else f"{value:,.0f}"
