"""Write tables as CSV files that are safe to open in a spreadsheet.

Invariant: no cell is a formula. Names of runs, conditions and workers, and text of environments and errors, end up in
cells. A spreadsheet would run text that begins with `=`, `+`, `-` or `@`, so an apostrophe is put in front of it.
"""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_es.errors import StoreError

if TYPE_CHECKING:
    import pandas as pd

_FORMULA = ("=", "+", "-", "@", "\t", "\n")


def as_text(cell: Any) -> Any:
    """Put an apostrophe in front of text that a spreadsheet would read as a formula; return other cells unchanged."""
    if not isinstance(cell, str):
        return cell
    text = cell.replace("\r\n", "\n").replace("\r", "\n")  # pandas would not quote a lone \r, which ends a row
    return f"'{text}" if text.startswith(_FORMULA) and not _is_number(text) else text


def write_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write one or more rows with the same keys. Errors: StoreError if the file cannot be written."""
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([as_text(name) for name in rows[0]])
            writer.writerows([as_text(cell) for cell in row.values()] for row in rows)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}") from error


def write_frame(frame: "pd.DataFrame", path: Path) -> None:
    """Write a data frame without its index; missing values are empty cells. Errors: OSError."""
    texts = {str(name): frame[name].map(as_text) for name in frame.select_dtypes(exclude=["number", "bool"])}
    frame.assign(**texts).rename(columns=as_text).to_csv(path, index=False)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
