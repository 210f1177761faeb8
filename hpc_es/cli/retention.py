"""`hpc-es retention`: measure what a model still knows after training, compared with its base model.

Invariant: a change is only computed between scores of the same examples, prompted in the same way, paired by example.
"""

import json as jsonlib
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from hpc_es import modes
from hpc_es.cli.arguments import Json
from hpc_es.errors import ConfigError
from hpc_es.paths import RunPaths

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpc_es.analysis.statistics.intervals import Interval, Paired
    from hpc_es.cli.output import Column
    from hpc_es.recorded.solo import Recorded
    from hpc_es.store.retention import Record

TASKS = "mmlu_pro,hellaswag,hellaswag_generated"


class Backend(StrEnum):
    vllm = "vllm"
    transformers = "transformers"


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Line(NamedTuple):
    """One score, and its change from the base model."""

    record: "Record"
    path: Path
    metric: str
    interval: "Interval"
    base: float | None
    change: "Paired | None"

    def facts(self) -> dict[str, Any]:
        record, change = self.record, self.change
        return {
            "source": record.source,
            "version": record.version,
            "digest": record.measured.digest,
            "task": record.measured.task,
            "title": record.title,
            "metric": self.metric,
            "num_examples": record.measured.num_examples,
            "score": record.scores[self.metric],
            "low": self.interval.low,
            "high": self.interval.high,
            "base": self.base,
            "change": None if change is None else change.difference,
            "change_low": None if change is None else change.low,
            "change_high": None if change is None else change.high,
            "p_value": None if change is None else change.p_value,
            "num_unanswered": None if record.answers is None else record.answers.count(""),
            "num_shortened": record.num_shortened,
            "record": str(self.path),
        }


def add_commands(app: typer.Typer) -> None:
    app.command()(retention)


def retention(
    source: Annotated[Path, typer.Argument(metavar="RUN|MODEL", help="A run folder, or a Hugging Face folder.")],
    versions: Annotated[
        str, typer.Option(help="Versions of a run: all, or e.g. 0:100:10,last. The base model is always included.")
    ] = "last",
    tasks: Annotated[str, typer.Option(help="Tasks to measure, separated by commas.")] = TASKS,
    limit: Annotated[int | None, typer.Option(min=1, help="Number of examples per task. Default: all.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder with the examples. Default: retention in $HPC_ES_DATA.")
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(help="For a model: the base model to compare it with. For a run: its base model, if it moved."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the records. Default: RUN/evals for a run, evals/MODEL for a model.")
    ] = None,
    backend: Annotated[
        Backend | None,
        typer.Option(help="Engine. Default: that of the run; for a model, vllm if it is installed."),
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Data type for computing. Default: that of the run or the model.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Number of prompts at once. Default: as in the run; 64 for a model.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens of a generated answer.")] = 1024,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=16, help="Maximum number of tokens of prompt and answer. Default: the model's maximum, up to 4096."
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat/--no-chat", help="Use the model's chat template for prompts.")] = True,
    chat_options: Annotated[
        str | None,
        typer.Option(
            help="Variables of the chat template, e.g. '{\"enable_thinking\": false}'. Default: those of the run."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Measure MMLU-Pro and HellaSwag by lm-eval, from local files: scores, and their change from the base model."""
    from hpc_es.cli.output import console, print_json, stdout_for, tables
    from hpc_es.recorded.retention import tasks as retention_tasks
    from hpc_es.recorded.retention.measure import RetentionRequest, measure

    screen = console(stderr=json)
    is_run = RunPaths(source).config.is_file()
    folder = out or (RunPaths(source).evals if is_run else Path("evals", source.resolve().name))
    place = retention_tasks.data_folder(data)
    examples = [retention_tasks.read_examples(name, place, limit) for name in _names(tasks)]
    request = RetentionRequest(
        backend=backend.value if backend else None,
        dtype=dtype.value if dtype else None,
        batch_size=batch_size,
        max_tokens=max_tokens,
        max_length=max_length,
        chat=chat,
        chat_options=_chat_options(chat_options),
    )
    found: list[tuple[Path, Record]] = []
    with stdout_for(json), modes.within(source if is_run and out is None else None):
        for recorded, wanted in _visits(source, versions, base, is_run=is_run):
            measured = measure(recorded, wanted, examples, request, folder, say=screen.print)
            found += measured.values()
    lines = _lines(found, compare=is_run or base is not None)
    if json:
        print_json({"source": str(source), "scores": [line.facts() for line in lines]})
    for table in tables(_columns(lines), screen.width, num_keys=3, justify="right"):
        screen.print(table)
    for text in _remarks(lines, folder, num_available=min(each.num_available for each in examples)):
        screen.print(text)


def _names(tasks: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in tasks.split(",")))


def _chat_options(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        options = jsonlib.loads(text)
    except ValueError as error:
        raise ConfigError(f'--chat-options {text} is not JSON ({error}), e.g. {{"enable_thinking": false}}') from None
    if not isinstance(options, dict):
        raise ConfigError(f'--chat-options {text} must be an object, e.g. {{"enable_thinking": false}}')
    return options


def _visits(source: Path, versions: str, base: Path | None, *, is_run: bool) -> "Iterator[tuple[Recorded, list[int]]]":
    """Yield what to measure, the base model first."""
    from hpc_es.recorded.evaluate import chosen_versions
    from hpc_es.recorded.retention.measure import of_model, of_run

    if is_run:
        recorded = of_run(source, base)
        yield recorded, sorted({0, *chosen_versions(recorded, versions)})
        return
    if versions != "last":
        raise ConfigError(f"--versions {versions}: {source} is not a run folder, and a model has no versions")
    for model in (base, source):
        if model is not None:
            yield of_model(model), [0]


def _lines(found: "list[tuple[Path, Record]]", *, compare: bool) -> list[Line]:
    """One line for each metric of each record. `compare`: the first record of a task is that of the base model."""
    from hpc_es.analysis.statistics.intervals import paired, wilson
    from hpc_es.store.retention import asked_alike

    lines: list[Line] = []
    bases: dict[str, Record] = {}
    for path, record in found:
        base = bases.setdefault(record.measured.task, record)
        comparable = compare and base is not record and asked_alike(base, record)
        for metric, correct in record.correct.items():
            change = paired(correct, base.correct[metric]) if comparable and len(correct) > 1 else None
            interval = wilson(sum(correct), len(correct))
            lines.append(Line(record, path, metric, interval, base.scores[metric] if comparable else None, change))
    return lines


def _columns(lines: list[Line]) -> "list[Column]":
    titles = ("version", "task", "metric", "score", "95 %", "base", "change", "95 %", "p", "no letter")
    rows = [_row(line) for line in lines]
    return [(title, [row[place] for row in rows]) for place, title in enumerate(titles)]


def _row(line: Line) -> tuple[str, ...]:
    record, change = line.record, line.change
    return (
        Path(record.source).name if record.version is None else str(record.version),
        record.title,
        line.metric,
        f"{record.scores[line.metric]:.4f}",
        f"{line.interval.low:.4f} to {line.interval.high:.4f}",
        "" if line.base is None else f"{line.base:.4f}",
        "" if change is None else f"{100 * change.difference:+.2f}",
        "" if change is None else f"{100 * change.low:+.2f} to {100 * change.high:+.2f}",
        "" if change is None else f"{change.p_value:.3f}",
        "" if record.answers is None else str(record.answers.count("")),
    )


def _remarks(lines: list[Line], folder: Path, num_available: int) -> "Iterator[str]":
    """Remarks below the table that explain how its scores were measured."""
    measured = [line.record.measured for line in lines]
    ways = [(each.settings.backend, each.settings.dtype, each.settings.max_length) for each in measured]
    chat = "through the chat template" if measured[0].settings.chat else "without a chat template"
    for backend, dtype, length in dict.fromkeys(ways):
        yield f"greedy, {chat}, {backend} in {dtype}, at most {length} tokens of prompt and answer"
    if len(set(ways)) > 1:
        yield "no change is given between models that were measured with different settings"
    if any(line.change for line in lines):
        yield "change: percentage points from the base on the same examples, paired; p by a sign-flip permutation test"
    if measured[0].num_examples < num_available:
        yield f"only the first {measured[0].num_examples} of {num_available} examples of each task"
    tasks = {each.task for each in measured}
    if "mmlu_pro" in tasks:
        yield "MMLU-Pro is 0-shot: the dev rows for its five shots are not in the data"
    if "hellaswag_generated" in tasks:
        yield "HellaSwag, generated: the model has to name a letter, as in the published tables; the prompt is our own"
    if max_tokens := max(each.settings.max_tokens for each in measured):
        yield f"generated: answers of at most {max_tokens} tokens"
        yield "no letter: answers without a letter count as wrong (MMLU-Pro's own script guesses a letter)"
    if num_shortened := sum({line.path: line.record.num_shortened for line in lines}.values()):
        yield f"{num_shortened} prompts were cut at the beginning; use a larger --max-length if the model allows it"
    yield f"records: {folder}"
