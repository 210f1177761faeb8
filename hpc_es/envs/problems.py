"""Problems with one right answer each, from JSON-lines files: DAPO, AIME, GSM8K, or your own.

Invariant: a file is read completely, or refused with the faulty line; a problem has the same id in every run that reads
the file.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from hpc_es.data import data_path
from hpc_es.errors import ConfigError

Split = Literal["train", "eval"]

DATA_SETS: Mapping[str, Mapping[str, str]] = {
    "dapo": {"train": "dapo_evolve.jsonl", "eval": "dapo_test.jsonl"},
    "aime_2026": {"eval": "aime_2026.jsonl"},
    "gsm8k": {"train": "gsm8k_train.jsonl", "eval": "gsm8k_test.jsonl"},
}
"""File in the data folder, by data set and split. A data set without a training split is for evaluation only."""
_QUESTION = ("question", "problem")
_DAPO = re.compile(
    r"Solve the following math problem step by step\. The last line[^\n]*\n\n(.*)\n\n"
    r"Remember to put your answer on its own line after \"Answer:\"\.",
    re.DOTALL,
)
"""DAPO's instructions around each problem, which are removed because the environment has its own."""
_REASONED = "####"
"""Separates the reasoning from the answer in GSM8K."""


@dataclass(frozen=True)
class Problem:
    id: str
    question: str
    answer: str


def find(data: str, split: Split, data_dir: Path | None) -> Path:
    """The file of a data set in DATA_SETS, or of a path in which `{split}` stands for the split.

    Relative paths are resolved by `data_path`. Errors: ConfigError if the data set does not have the split, or if its
    folder or file is missing.
    """
    if data not in DATA_SETS:
        if not data.endswith(".jsonl"):
            raise ConfigError(f"option data={data!r} must be one of {', '.join(DATA_SETS)}, or a path ending in .jsonl")
        return data_path(Path(data_dir or "", data.replace("{split}", split)))
    if split not in DATA_SETS[data]:
        raise ConfigError(
            f"option data={data!r} is for evaluation only: put it into eval.options, and train on another data set"
        )
    name = DATA_SETS[data][split]
    if data_dir is None:
        raise ConfigError(f"option data={data!r} needs data_dir, the folder with {name}")
    return data_path(data_dir) / name


def read(path: Path, split: Split | None = None) -> tuple[Problem, ...]:
    """The problems of a file in file order: lines with `question` or `problem`, `answer`, and optionally `id`.

    With a split, lines that name another `split` are skipped. A problem without an id is named by file and line.
    Errors: ConfigError naming file and line, also for a file without problems.
    """
    try:
        stamp = path.stat().st_mtime_ns
    except OSError as error:
        raise ConfigError(
            f"{path}: the problems cannot be read ({error.strerror}); each line of the file is a JSON object with "
            "question (or problem) and answer"
        ) from error
    return _read(path, split, stamp)


@lru_cache(maxsize=16)
def _read(path: Path, split: Split | None, _stamp: int) -> tuple[Problem, ...]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the problems cannot be read ({error})") from error
    found: dict[str, Problem] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            problem = _problem(record, f"{path.stem} {number}")
            if problem.id in found:
                raise ValueError(f"there is another problem with the id {problem.id!r}")
            if split is None or record.get("split", split) == split:
                found[problem.id] = problem
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{path}, line {number}: {error}; each line is an object with `question` or `problem`, and `answer`"
            ) from error
    if not found:
        raise ConfigError(f"{path} has no problems" + (f" of the split {split}" if split else ""))
    return tuple(found.values())


def _problem(record: Any, name: str) -> Problem:
    if not isinstance(record, dict):
        raise ValueError(f"this is {type(record).__name__}")
    question = next((record[key] for key in _QUESTION if key in record), None)
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"the question is {question!r}")
    given = record.get("answer")
    is_answer = isinstance(given, str | int | float) and not isinstance(given, bool)
    answer = str(given).rpartition(_REASONED)[2].strip() if is_answer else ""
    if not answer:
        raise ValueError(f"the answer is {given!r}")
    wrapped = _DAPO.fullmatch(question.strip())
    return Problem(str(record.get("id", name)), (wrapped[1] if wrapped else question).strip(), answer)
