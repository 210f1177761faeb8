"""Problems with one right answer each, from files of JSON lines: DAPO, AIME, GSM8K, or your own.

Invariant: a file is read whole or refused with the line that is wrong; a problem's id is its own, the same in every
run that reads the file.
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
"""Name -> split -> file in the data folder. What has no training split is for evaluation only."""
_QUESTION = ("question", "problem")
_DAPO = re.compile(
    r"Solve the following math problem step by step\. The last line[^\n]*\n\n(.*)\n\n"
    r"Remember to put your answer on its own line after \"Answer:\"\.",
    re.DOTALL,
)
"""What DAPO puts around each problem: how to answer is for the environment to say."""
_REASONED = "####"
"""Stands between GSM8K's reasoning and its answer."""


@dataclass(frozen=True)
class Problem:
    id: str
    question: str
    answer: str


def find(data: str, split: Split, data_dir: Path | None) -> Path:
    """The file of a data set of DATA_SETS, or any other: a path, in which `{split}` stands for the split.

    Relative paths are looked for as in `data_path`. Errors: ConfigError for a split that the data set does not have,
    and without the folder or the file that it needs.
    """
    if data not in DATA_SETS:
        if not data.endswith(".jsonl"):
            raise ConfigError(f"option data={data!r}: known are {', '.join(DATA_SETS)}, and files that end on .jsonl")
        return data_path(Path(data_dir or "", data.replace("{split}", split)))
    if split not in DATA_SETS[data]:
        raise ConfigError(
            f"option data={data!r} is for evaluation only: put it into eval.options, and train on another data set"
        )
    name = DATA_SETS[data][split]
    if data_dir is None:
        raise ConfigError(f"option data={data!r} needs data_dir, the folder that has {name}")
    return data_path(data_dir) / name


def read(path: Path, split: Split | None = None) -> tuple[Problem, ...]:
    """The problems of a file, in its order: lines with `question` or `problem`, `answer`, and perhaps `id`.

    With a split, those whose `split`, where a line has one, is this. Without an id a problem is named by file and line.
    Errors: ConfigError naming file and line, also for a file that has none.
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
