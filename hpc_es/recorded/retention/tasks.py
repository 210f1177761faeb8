"""The retention tasks, defined for lm-eval over files of fixed examples.

Invariants: examples, prompts and scores depend only on the files and on lm-eval's own task code; examples keep the
order of the file, so that position i is the same example in every record of the same file. Sources: MMLU-Pro (Wang et
al., 2024) and HellaSwag (Zellers et al., 2019), both in lm-eval's form.

MMLU-Pro is used zero-shot, because the rows for its usual five shots are not in the files. HellaSwag is scored twice:
by the likelihood of its endings, as in lm-eval, and by a generated letter, as in the published retention tables. Their
prompt is not published, so ours follows MMLU-Pro's form.
"""

import gzip
import hashlib
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hpc_es.data import data_path
from hpc_es.errors import ConfigError

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

LETTERS = "ABCDEFGHIJ"
SEED = 2357
MAX_TOKENS = 1024
"""Most tokens of a generated answer."""
NO_ANSWER = ""
_ANSWERS = (
    re.compile(r"answer is \(?([A-J])\)?"),
    re.compile(r".*[aA]nswer:\s*([A-J])"),
    re.compile(r"\b([A-J])\b(?!.*\b[A-J]\b)", re.DOTALL),
)
"""MMLU-Pro's published extraction rules; the first that matches decides."""


@dataclass(frozen=True)
class Definition:
    """One task. `version` counts changes to its prompts and scoring."""

    name: str
    title: str
    file: str
    metrics: tuple[str, ...]
    generated: bool
    version: int = 1


DEFINITIONS = {
    each.name: each
    for each in (
        Definition("mmlu_pro", "MMLU-Pro, generated, 0-shot", "mmlu_pro_2048.jsonl.gz", ("exact_match",), True),
        Definition("hellaswag", "HellaSwag, by likelihood", "hellaswag_2048.jsonl.gz", ("acc", "acc_norm"), False),
        Definition("hellaswag_generated", "HellaSwag, generated", "hellaswag_2048.jsonl.gz", ("exact_match",), True),
    )
}


class MmluPro(msgspec.Struct):
    question: str
    options: list[str]
    answer: str
    category: str

    def __post_init__(self) -> None:
        if not 1 <= len(self.options) <= len(LETTERS) or self.answer not in LETTERS[: len(self.options)]:
            raise ValueError(
                f"answer {self.answer!r} is not the letter of one of {len(self.options)} options (1 to 10)"
            )


class HellaSwag(msgspec.Struct):
    activity_label: str
    ctx_a: str
    ctx_b: str
    endings: list[str]
    label: str

    def __post_init__(self) -> None:
        if len(self.endings) != 4 or self.label not in ("0", "1", "2", "3"):
            raise ValueError(f"label {self.label!r} with {len(self.endings)} endings; it must be 0 to 3 of 4 endings")


@dataclass(frozen=True)
class Examples:
    """The first examples in a task's file."""

    definition: Definition
    rows: tuple[MmluPro | HellaSwag, ...]
    sha256: str
    """SHA-256 of the file."""
    num_available: int


def data_folder(given: Path | None) -> Path:
    """The folder `given`, else `retention` in the data folder (HPC_ES_DATA). Errors: ConfigError if it is missing."""
    folder = data_path(given or Path("retention"))
    if not folder.is_dir():
        raise ConfigError(f"the folder {folder} for the retention files does not exist; name it with --data")
    return folder


def read_examples(name: str, folder: Path, limit: int | None = None) -> Examples:
    """Read all examples of a task, or the first `limit`.

    Errors: ConfigError for an unknown task, for a limit above the number of examples, and for a missing or damaged
    file.
    """
    if name not in DEFINITIONS:
        raise ConfigError(f"unknown task {name!r}; known: {', '.join(DEFINITIONS)}")
    definition = DEFINITIONS[name]
    path, kind = folder / definition.file, MmluPro if name == "mmlu_pro" else HellaSwag
    try:
        packed = path.read_bytes()
        lines = gzip.decompress(packed).splitlines()
    except FileNotFoundError:
        fields = ", ".join(kind.__struct_fields__)
        raise ConfigError(
            f"{path} is missing; {name} needs it: gzipped JSON lines, objects with {fields} as in the data set"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read ({error}); copy it again") from error
    rows = tuple(_row(line, kind, f"{path}, line {number}") for number, line in enumerate(lines, 1))
    if not 1 <= (wanted := limit or len(rows)) <= len(rows):
        raise ConfigError(f"{wanted} examples of {name} were requested; {path} has {len(rows)}")
    return Examples(definition, rows[:wanted], hashlib.sha256(packed).hexdigest(), len(rows))


def _row(line: bytes, kind: type[MmluPro] | type[HellaSwag], where: str) -> MmluPro | HellaSwag:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {error}; copy the file again") from error


def extract_letter(answer: str) -> str:
    """The letter that an answer chooses, or NO_ANSWER.

    An answer without a letter is wrong, whereas the published script guesses at random. Text before </think> is not
    part of the answer.
    """
    answer = answer.rpartition("</think>")[2]
    found = next(filter(None, (pattern.search(answer) for pattern in _ANSWERS)), None)
    return found[1] if found else NO_ANSWER


def make_task(examples: Examples, max_tokens: int) -> "ConfigurableTask":
    """Make the task for lm-eval; `max_tokens` limits a generated answer."""
    from lm_eval.api.task import ConfigurableTask

    definition = examples.definition
    config = _generated(examples, max_tokens) if definition.generated else _by_likelihood(examples)
    metrics = [{"metric": each, "aggregation": "mean", "higher_is_better": True} for each in definition.metrics]
    common = {"task": definition.name, "metric_list": metrics, "test_split": "test", "num_fewshot": 0}
    return ConfigurableTask(config={**common, **config, "metadata": {"version": definition.version}})


def _generated(examples: Examples, max_tokens: int) -> dict[str, Any]:
    """Configuration of lm-eval's mmlu_pro with all categories in one task, and of HellaSwag in the same form."""
    from lm_eval.tasks.mmlu_pro.utils import doc_to_text

    if examples.definition.name == "mmlu_pro":
        docs, about = [msgspec.to_builtins(row) for row in examples.rows], "{{category}}"
    else:
        docs, about = [_question(doc) for doc in _preprocessed(examples)], "how a text goes on"
    return {
        "custom_dataset": _dataset(docs),
        "output_type": "generate_until",
        "description": f"The following are multiple choice questions (with answers) about {about}. Think step by step "
        'and then finish your answer with "the answer is (X)" where X is the correct letter choice.\n',
        "doc_to_text": doc_to_text,
        "doc_to_target": "answer",
        "generation_kwargs": {
            "until": ["Question:"],
            "max_gen_toks": max_tokens,
            "do_sample": False,
            "temperature": 0.0,
        },
        "filter_list": [
            {"name": "letter", "filter": [{"function": "custom", "filter_fn": _letters}, {"function": "take_first"}]}
        ],
    }


def _by_likelihood(examples: Examples) -> dict[str, Any]:
    """Configuration of lm-eval's hellaswag."""
    return {
        "custom_dataset": _dataset(_preprocessed(examples)),
        "output_type": "multiple_choice",
        "doc_to_text": "{{query}}",
        "doc_to_target": "{{label}}",
        "doc_to_choice": "choices",
    }


def _preprocessed(examples: Examples) -> list[dict[str, Any]]:
    """HellaSwag's rows with lm-eval's query, choices and gold."""
    from datasets import Dataset, disable_progress_bars
    from lm_eval.tasks.hellaswag.utils import process_docs

    disable_progress_bars()
    return list(process_docs(Dataset.from_list([msgspec.to_builtins(row) for row in examples.rows])))


def _question(doc: dict[str, Any]) -> dict[str, Any]:
    question = f"Which ending continues this text best?\n{doc['query']}"
    return {"question": question, "options": doc["choices"], "answer": LETTERS[doc["gold"]]}


def _dataset(docs: list[dict[str, Any]]) -> Any:
    """The function that lm-eval calls instead of downloading a data set."""
    from datasets import Dataset

    return lambda **_: {"test": Dataset.from_list(docs)}


def _letters(answers: Sequence[Sequence[str]], docs: Sequence[dict[str, Any]]) -> list[list[str]]:
    return [[extract_letter(each) for each in of_one] for of_one in answers]
