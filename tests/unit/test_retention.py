"""Retention: examples, prompts and scores as lm-eval has them, versions of a run, and nothing measured twice."""

import asyncio
import gzip
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
import yaml
from builders import Counted, built_commit
from msgspec.structs import replace
from staged_run import Staged, stage, sync
from typer.testing import CliRunner, Result

from hpc_es.analysis.statistics.retention import retention as measured_retention
from hpc_es.analysis.statistics.retention import retention_text
from hpc_es.cli import app
from hpc_es.cli.retention import _lines
from hpc_es.config import Config, save
from hpc_es.engine import start_engine
from hpc_es.errors import ConfigError, StoreError
from hpc_es.params import Arena
from hpc_es.params.tiny_llama import write_tiny_llama
from hpc_es.paths import RunPaths, retention_records
from hpc_es.recorded.retention import measure as measuring
from hpc_es.recorded.retention.measure import RetentionRequest, measure, of_model
from hpc_es.recorded.retention.tasks import DEFINITIONS, Examples, extract_letter, make_task, read_examples
from hpc_es.records import EvalId
from hpc_es.store import records as journal
from hpc_es.store.journal import JournalWriter
from hpc_es.store.records import SCHEMA_VERSION
from hpc_es.store.retention import Measured, Record, Settings, find_record, write_record

lm_eval = pytest.importorskip("lm_eval")

QUESTIONS = [
    {"question": "What is 1 + 1?", "options": ["2", " 3"], "answer": "A", "category": "math", "cot_content": ""},
    {"question": "Which is a fruit?", "options": ["a stone", "a pear"], "answer": "B", "category": "other"},
    {"question": "Who may sue?", "options": ["all", "none", "some"], "answer": "C", "category": "law"},
]
TEXTS = [
    {
        "activity_label": "Baking",
        "ctx_a": "A man [header] stirs.",
        "ctx_b": "the dough",
        "endings": ["rises.", " falls [substeps] down.", "sings a  song.", "is [title] red."],
        "label": "0",
    },
    {
        "activity_label": "Golf",
        "ctx_a": "A ball lies.",
        "ctx_b": "",
        "endings": ["It", "is", "hit", "up."],
        "label": "2",
    },
    {"activity_label": "Tea", "ctx_a": "Water.", "ctx_b": "she", "endings": ["boils", "b", "cc", "dd"], "label": "3"},
]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*address: Any, **_: Any) -> None:
        raise AssertionError(f"a connection to {address} was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name, rows in (("mmlu_pro", QUESTIONS), ("hellaswag", TEXTS)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}_2048.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def run(tmp_path: Path, tiny: Path) -> Path:
    """One update of the tiny model, large enough that its answers change."""
    config = Config.model_validate(
        {
            "run": {"name": "run", "num_updates": 1},
            "model": {"path": str(tiny), "dtype": "float32"},
            "task": {"env": "sudoku"},
            "engine": {"kind": "transformers", "threads": 1},
        }
    )
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    save(config, paths.config)
    arena = Arena.from_pretrained(tiny)
    start = journal.Started(0.0, SCHEMA_VERSION, "run", 1, 0, config.model_dump_json(), arena.base_digest, {}, "host")
    writer = JournalWriter.create(paths, lambda generation, sealed: start)
    members = (Counted(EvalId(0, 0), 7, 1, 1e-3, 0, 1.0, 1.0, 1e-4),)
    commit = built_commit(1, 5e-4, members)
    report = arena.apply([commit])
    writer.append(journal.Committed(1.0, commit))
    writer.append(journal.Digested(1.0, 1, report.digest, report.update_norm, 0.0))
    writer.close()
    return paths.root


def retention(source: Path, data: Path, *options: object) -> Result:
    arguments = ["retention", str(source), "--data", str(data), "--max-tokens", "3", "--json", *map(str, options)]
    return CliRunner().invoke(app, arguments)


def quiet(text: str) -> None:
    pass


# --- examples --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DEFINITIONS)
def test_the_fixed_examples_are_read_whole_and_in_order(name: str, shared_data: Path) -> None:
    examples = read_examples(name, shared_data / "retention")
    assert len(examples.rows) == examples.num_available == 2048
    assert read_examples(name, shared_data / "retention", 5).rows == examples.rows[:5]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def spoil(path: Path) -> None:
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).replace(b'"label": "2"', b'"label": "4"')))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "cannot be read .*copy it again"),
        (spoil, "line 2: label '4'"),
        (Path.unlink, "is missing; hellaswag needs"),
    ],
)
def test_damaged_and_missing_files_are_refused_by_name(
    damage: Callable[[Path], None], message: str, data: Path, tmp_path: Path
) -> None:
    path = tmp_path / "hellaswag_2048.jsonl.gz"
    path.write_bytes((data / path.name).read_bytes())
    damage(path)
    with pytest.raises(ConfigError, match=message):
        read_examples("hellaswag", tmp_path)


def test_impossible_measurements_are_refused(data: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "unknown task 'gsm8k'; known: mmlu_pro" in retention(tiny, data, "--tasks", "gsm8k").stderr
    assert "4 examples of mmlu_pro were requested" in retention(tiny, data, "--limit", 4).stderr
    assert "a model has no versions" in retention(tiny, data, "--versions", "3").stderr
    assert "for the retention files does not exist" in retention(tiny, data / "none").stderr
    assert "leave no room for a prompt" in retention(tiny, data, "--max-tokens", 2048).stderr
    monkeypatch.setattr(measuring, "find_spec", lambda name: None)
    without = retention(tiny, data)
    assert without.exit_code == 2
    assert "pip install 'hpc_es[retention]'" in without.stderr


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("So the answer is (C), not the answer is B.", "C"),
        ("the answer is D", "D"),
        ("Thus B.\nAnswer: G", "G"),
        ("I would say (H) or J\nof these", "J"),
        ("the answer is (A)</think>It must be B", "B"),
        ("no idea", ""),
        ("", ""),
    ],
)
def test_a_letter_is_found_by_the_published_rules(answer: str, letter: str) -> None:
    assert extract_letter(answer) == letter


# --- as lm-eval has it -----------------------------------------------------------------------------------------------


class _Plain(yaml.SafeLoader):
    """lm-eval's task files without the functions that they name."""


_Plain.add_constructor("!function", lambda loader, node: None)


def lm_eval_file(name: str) -> dict[str, Any]:
    found = yaml.load(Path(lm_eval.__file__).with_name("tasks").joinpath(name).read_text(), _Plain)
    assert isinstance(found, dict)
    return found


def requests(task: Any) -> list[Any]:
    task.set_fewshot_seed(0)
    task.build_all_requests()
    return [request.args for request in task.instances]


def test_the_likelihoods_asked_for_are_those_of_lm_evals_own_hellaswag(data: Path) -> None:
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks.hellaswag.utils import process_docs

    theirs = {
        **lm_eval_file("hellaswag/hellaswag.yaml"),
        "process_docs": process_docs,
        "training_split": None,
        "num_fewshot": 0,
        "custom_dataset": lambda **_: {"validation": Dataset.from_list(TEXTS)},
    }
    del theirs["dataset_path"], theirs["dataset_name"]
    expected = requests(ConfigurableTask(config=theirs))
    assert expected[0] == ("Baking: A man stirs. The dough", " rises.")
    assert requests(make_task(read_examples("hellaswag", data), 3)) == expected


def test_questions_are_asked_as_lm_evals_own_mmlu_pro_asks_them(data: Path) -> None:
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks.mmlu_pro.utils import doc_to_text

    theirs = {
        **lm_eval_file("mmlu_pro/_default_template_yaml"),
        "description": lm_eval_file("mmlu_pro/mmlu_pro_law.yaml")["description"],
        "doc_to_text": doc_to_text,
        "custom_dataset": lambda **_: {"test": Dataset.from_list(QUESTIONS[2:])},
        "fewshot_split": None,
        "fewshot_config": None,
        "num_fewshot": 0,
    }
    del theirs["dataset_path"]
    (expected,) = requests(ConfigurableTask(config=theirs))
    text, settings = requests(make_task(read_examples("mmlu_pro", data), 3))[2]
    assert "about law." in text
    assert text == expected[0]
    assert settings == {**expected[1], "max_gen_toks": 3}


@pytest.fixture
def both(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """The tiny model as our engine shows it to lm-eval, and in lm-eval's own wrapper."""
    from lm_eval.models.huggingface import HFLM

    from hpc_es.recorded.retention.model import EngineModel

    config = of_model(tiny).config
    with asyncio.Runner() as runner:
        engine_config = config.engine.model_copy(update={"kind": "transformers"})
        engine = runner.run(start_engine(config.model, engine_config, threads=1))
        runner.run(engine.perturb(None))
        yield (
            EngineModel(engine, runner.run, max_length=2048, chat_options={}, say=quiet),
            HFLM(pretrained=str(tiny), device="cpu", dtype="float32", batch_size=1),
        )
        runner.run(engine.close())


@pytest.mark.parametrize("chat", [False, True])
def test_an_engine_gives_lm_eval_the_same_answers_as_its_own_wrapper(
    both: tuple[Any, Any], data: Path, chat: bool
) -> None:
    from lm_eval.evaluator import evaluate

    found = []
    for model in both:
        tasks = {name: make_task(read_examples(name, data), 5) for name in DEFINITIONS}
        for task in tasks.values():
            task.set_fewshot_seed(0)
        groups: dict[str, Any] = {"groups": {}, "group_map": {}}
        done = evaluate(lm=model, task_dict={"tasks": tasks, **groups}, bootstrap_iters=0, apply_chat_template=chat)
        found.append(done["samples"])
    for name in DEFINITIONS:
        for ours, theirs in zip(found[0][name], found[1][name], strict=True):
            assert ours["arguments"] == theirs["arguments"]
            if name == "hellaswag":
                sums = [[answer[0][0] for answer in each["resps"]] for each in (ours, theirs)]
                assert sums[0] == pytest.approx(sums[1], abs=1e-3)
                assert len(set(sums[0])) == 4
            else:
                assert ours["resps"] == theirs["resps"]
    assert chat or all(each["resps"][0][0] for each in found[0]["mmlu_pro"])


def test_prompts_that_do_not_fit_lose_their_beginning_and_are_counted(both: tuple[Any, Any]) -> None:
    ours = both[0]
    ours._max_length = 20
    assert ours._fitting(list(range(30)), 5) == list(range(15, 30))
    assert ours._fitting(list(range(15)), 5) == list(range(15))
    assert ours.num_shortened == 1


def test_a_template_without_a_system_role_gets_the_instruction_in_the_users_words(both: tuple[Any, Any]) -> None:
    def render(messages: list[dict[str, str]], **_: Any) -> str:
        if messages[0]["role"] == "system":
            raise jinja2.TemplateError("system role not supported")
        return "|".join(f"{each['role']}:{each['content']}" for each in messages)

    ours = both[0]
    ours.tokenizer = SimpleNamespace(apply_chat_template=render)
    messages = [{"role": "system", "content": "rules"}, {"role": "user", "content": "question"}]
    assert ours.apply_chat_template(messages) == "user:rules\nquestion"


# --- measurements ----------------------------------------------------------------------------------------------------


def test_a_run_is_compared_with_its_base_and_nothing_is_measured_twice(
    run: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = retention(run, data)
    assert first.exit_code == 0, first.output
    scores = json.loads(first.stdout)["scores"]
    assert [(each["version"], each["task"], each["metric"]) for each in scores] == [
        (version, definition.name, metric)
        for version in (0, 1)
        for definition in DEFINITIONS.values()
        for metric in definition.metrics
    ]
    recorded = measuring.of_run(run)
    assert {each["digest"] for each in scores} == {f"{digest:016x}" for digest in recorded.digests.values()}
    for before, after in zip(scores[:4], scores[4:], strict=True):
        assert (before["base"], before["change"]) == (None, None)
        assert after["base"] == before["score"]
        assert after["change"] == pytest.approx(after["score"] - before["score"])
        assert after["low"] <= after["score"] <= after["high"]
    for text in ("0-shot", "change: percentage points", "records:"):
        assert text in first.stderr
    assert len(retention_records(RunPaths(run).evals)) == 6

    monkeypatch.setattr(measuring.Solo, "start", None)  # no engine is started any more
    again = json.loads(retention(run, data).stdout)["scores"]
    assert again == scores
    assert retention(run, data, "--limit", 2).exit_code != 0, "other examples are another measurement"


def test_versions_are_named_as_for_evaluations(run: Path, data: Path) -> None:
    assert "version 2 does not exist" in retention(run, data, "--versions", "2").stderr
    assert "must be `all`, or numbers and `last`" in retention(run, data, "--versions", "1,newest").stderr


def test_finished_tasks_survive_a_kill(tiny: Path, data: Path, tmp_path: Path) -> None:
    recorded, request = of_model(tiny), RetentionRequest(backend="transformers", max_tokens=3)
    tasks = [read_examples(name, data) for name in ("mmlu_pro", "hellaswag")]
    said: list[str] = []

    def die(text: str) -> None:
        if "likelihood" in text:
            raise KeyboardInterrupt
        said.append(text)

    with pytest.raises(KeyboardInterrupt):
        measure(recorded, [0], tasks, request, tmp_path, say=die)
    assert len(said) == len(retention_records(tmp_path)) == 1
    done = measure(recorded, [0], tasks, request, tmp_path, say=said.append)
    assert ["likelihood" in text for text in said] == [False, True]
    (_, generated), (_, scored) = done.values()
    assert generated.version is None
    assert len(generated.answers or ()) == len(generated.correct["exact_match"]) == 3
    assert scored.scores["acc"] == sum(scored.correct["acc"]) / 3


def record(digest: str, correct: list[int], dtype: str = "float32", version: int = 3) -> Record:
    settings = Settings(backend="vllm", dtype=dtype, max_tokens=3, max_length=99, chat=True, chat_options={}, seed=2357)
    measured = Measured(
        digest=digest,
        task="mmlu_pro",
        task_version=1,
        data_sha256="",
        num_examples=len(correct),
        settings=settings,
        lm_eval="0",
    )
    return Record(
        measured=measured,
        title="MMLU-Pro",
        source="models/some",
        version=version,
        scores={"exact_match": sum(correct) / len(correct)},
        correct={"exact_match": correct},
        answers=None,
        num_shortened=0,
        began=0.0,
        seconds=1.0,
        software={},
    )


def test_changes_are_paired_by_example_and_only_between_equal_settings() -> None:
    here = Path("a")
    base, same = record("0", [1, 1, 0, 0]), record("1", [1, 0, 0, 0])
    other = record("2", [1, 0, 0, 0], dtype="bfloat16")
    lines = _lines([(here, base), (here, same), (here, other)], compare=True)
    assert [line.base for line in lines] == [None, 0.5, None]
    change = lines[1].change
    assert change
    assert (change.difference, change.p_value) == (-0.25, 1.0)
    assert lines[2].change is None
    assert all(line.change is None for line in _lines([(here, base), (here, same)], compare=False))


def test_the_table_of_retention_pairs_each_run_with_its_base_by_condition(tmp_path: Path) -> None:
    for seed, correct in ((0, [1, 0, 0, 0]), (1, [1, 1, 1, 0])):
        stage(tmp_path / f"run{seed}", Staged(composition=sync(4), seed=seed))
        evals = RunPaths(tmp_path / f"run{seed}").evals
        write_record(evals, record("0", [1, 1, 0, 0], version=0))
        write_record(evals, record("5", [0, 0, 0, 0], version=2))
        write_record(evals, record("6", correct, version=8))
    stage(tmp_path / "unmeasured", Staged(staleness={"mode": "natural", "max_lag": 1}))
    by_run = measured_retention([tmp_path / name for name in ("run0", "run1", "unmeasured")])
    assert by_run[["run", "version", "base", "score", "change"]].to_numpy().tolist() == [
        ["run0", 8, 0.5, 0.25, -0.25],
        ["run1", 8, 0.5, 0.75, 0.25],
    ]
    (row,) = retention_text(by_run).rows
    assert row[:6] == ["MMLU-Pro", "exact_match", "Sync", "2", "8", "4"]
    assert row[6:] == ["0.5000 ± 0.0000", "0.5000 ± 0.3536", "+0.00 ± 35.36"]


def test_no_change_is_stated_from_a_base_that_was_asked_otherwise(tmp_path: Path) -> None:
    run = stage(tmp_path / "run", Staged(composition=sync(4)))
    write_record(RunPaths(tmp_path / "run").evals, record("0", [1, 1], version=0, dtype="bfloat16"))
    write_record(RunPaths(tmp_path / "run").evals, record("6", [1, 0], version=8))
    found = measured_retention(run)
    assert found["score"].tolist() == [0.5]
    assert found[["base", "change"]].isna().all(axis=None)


def test_records_are_found_by_their_measurement(tmp_path: Path) -> None:
    kept = record("0", [1, 0])
    path = write_record(tmp_path, kept)
    assert path.name.startswith("retention-v00000003-mmlu_pro-19700101T000000")
    assert find_record(tmp_path, kept.measured) == (path, kept)
    assert find_record(tmp_path, replace(kept.measured, digest="1")) is None
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(StoreError, match="remove it to measure again"):
        find_record(tmp_path, kept.measured)


def test_a_tasks_file_named_like_a_record_is_not_a_record(tmp_path: Path) -> None:
    evals = RunPaths(tmp_path).evals
    evals.mkdir()
    RunPaths(tmp_path).later_eval_tasks("retention-too").write_text("{}")
    assert retention_records(evals) == []


def test_limits_take_the_first_examples(data: Path) -> None:
    examples: Examples = read_examples("mmlu_pro", data, 1)
    assert (len(examples.rows), examples.num_available) == (1, 3)
