"""CSV files that a spreadsheet opens run nothing."""

import csv
import math
from pathlib import Path

import pandas as pd
import pytest

from hpc_es.analysis.statistics.csv_files import write_frame, write_rows
from hpc_es.errors import StoreError

FORMULAS = ['=HYPERLINK("http://x")', "+1+1", "-2+3", "@SUM(A1)", "\tx", "\n=1"]
TEXTS = ["plain", "", "a=b", "-0.5", "+1e-3", "-inf", "Lag-4 50 %"]


def cells(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def test_a_text_that_looks_like_a_formula_is_written_as_text(tmp_path: Path) -> None:
    given = [text.replace("\n", "\r") for text in FORMULAS]
    frame = pd.DataFrame({"=label": [*given, *TEXTS], "number": -1.5, "count": -3, "flag": True})
    write_frame(frame, tmp_path / "frame.csv")
    write_rows(frame.to_dict("records"), tmp_path / "rows.csv")
    for name in ("frame.csv", "rows.csv"):
        header, *rows = cells(tmp_path / name)
        assert header == ["'=label", "number", "count", "flag"]
        assert [row[0] for row in rows] == [*("'" + text for text in FORMULAS), *TEXTS]
        assert all(row[1:] == ["-1.5", "-3", "True"] for row in rows)


def test_categories_and_missing_values_are_written_as_before(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": pd.Categorical(["=1", "x"]), "b": [math.nan, 1.0], "c": [None, "@"]})
    write_frame(frame, tmp_path / "x.csv")
    assert cells(tmp_path / "x.csv")[1:] == [["'=1", "", ""], ["x", "1.0", "'@"]]


def test_a_folder_that_is_not_there_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be written"):
        write_rows([{"a": 1}], tmp_path / "none" / "x.csv")
