"""Logs of head and workers are bounded in length and number, and so is what a launcher quotes of them."""

import io
import logging
from pathlib import Path

import pytest

from hpc_es.cli.log_lines import LINES_AT_ONCE, BoundedHandler
from hpc_es.launch.process import last_lines
from hpc_es.quoting import MAX_MESSAGE, MAX_RECORD

LONG = "\x1b[2J" + "x" * 1_000_000


@pytest.fixture
def log() -> tuple[logging.Logger, io.StringIO]:
    stream = io.StringIO()
    logger = logging.Logger("hpc_es.test")
    logger.addHandler(BoundedHandler(stream))
    return logger, stream


def test_a_record_and_its_traceback_are_bounded_and_printable(log: tuple[logging.Logger, io.StringIO]):
    logger, stream = log
    try:
        raise ValueError(LONG)
    except ValueError:
        logger.exception("it said %s", LONG)
    written = stream.getvalue()
    assert written.startswith("it said \\x1b[2Jxxx")
    assert "\x1b" not in written
    assert len(written) <= MAX_RECORD + 1


def test_one_place_in_the_code_writes_a_limited_number_of_lines_and_counts_the_rest(
    log: tuple[logging.Logger, io.StringIO], monkeypatch: pytest.MonkeyPatch
):
    logger, stream = log
    now = [1000.0]
    monkeypatch.setattr(logging.time, "time", lambda: now[0])  # type: ignore[attr-defined]
    for later in [0.0] * (LINES_AT_ONCE + 50) + [60.0]:
        now[0] += later
        logger.warning("a message was dropped")
    logger.warning("another place")
    lines = stream.getvalue().splitlines()
    assert len(lines) == LINES_AT_ONCE + 2
    assert lines[-2:] == ["a message was dropped [50 lines like this one were left out]", "another place"]


@pytest.mark.parametrize("text", [LONG, (LONG + "\n") * 20, "\x1b[2J\n" * 100_000])
def test_the_last_lines_of_a_log_are_few_and_short(tmp_path: Path, text: str):
    (tmp_path / "log").write_text(text)
    quoted = last_lines(tmp_path / "log")
    assert len(quoted) < MAX_MESSAGE
    assert len(quoted.splitlines()) <= 15
    assert "\x1b" not in quoted


def test_the_last_lines_of_a_log_are_quoted_as_they_are(tmp_path: Path):
    (tmp_path / "log").write_text("".join(f"line {i} é\n" for i in range(100)))
    assert last_lines(tmp_path / "log", 2) == "  line 98 é\n  line 99 é"
