"""The manifest of evaluation tasks: written when a run is made, held against the tasks when it goes on."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hpc_es
from hpc_es.config import Config
from hpc_es.envs import manifest
from hpc_es.envs.base import TaskFacts
from hpc_es.envs.lab import Lab
from hpc_es.envs.manifest import (
    Manifest,
    complete_tasks,
    count_tasks,
    read_tasks,
    recorded_tasks,
    settle_tasks,
    write_tasks,
)
from hpc_es.errors import ConfigError, EnvError, StoreError
from hpc_es.launch import prepare
from hpc_es.methods.base import Tasks
from hpc_es.params.tiny_llama import write_tiny_llama
from hpc_es.store.journal import JournalWriter
from hpc_es.store.records import SCHEMA_VERSION, Started


def _config(folder: Path, *, env: str = "webshop", num_tasks: int = 5, **options: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "play", "dir": folder / "runs", "num_updates": 1},
            "model": {"path": str(folder / "model")},
            "task": {"env": env, "options": options, "train": {"split": None} if env == "webshop" else {}},
            "es": {"tasks_per_member": 4},
            "eval": {"num_tasks": num_tasks},
            "engine": {"kind": "transformers", "threads": 1},
        }
    )


def test_the_manifest_names_the_tasks_that_are_evaluated_and_says_which_can_succeed(tmp_path: Path) -> None:
    written = write_tasks(tmp_path / "tasks.json", _config(tmp_path, max_turns=7))
    assert read_tasks(tmp_path / "tasks.json") == written
    assert [task.id.rsplit(" ", 1)[0] for task in written.tasks] == [f"goal {i}" for i in range(5)]
    assert written.ceiling == 1.0
    described = json.loads((tmp_path / "tasks.json").read_text())
    assert {key: described[key] for key in ("env", "options", "num_tasks", "ceiling")} == {
        "env": "webshop",
        "options": {"max_turns": 7},
        "num_tasks": 5,
        "ceiling": 1.0,
    }
    assert [path.name for path in tmp_path.iterdir()] == ["tasks.json"]


def test_the_ceiling_is_the_share_of_tasks_that_can_succeed() -> None:
    tasks = [TaskFacts(str(i), reachable=i != 1) for i in range(4)]
    assert Manifest("lab", {}, tasks).ceiling == 0.75
    assert Manifest("lab", {}, []).ceiling is None


def test_webshops_128_evaluation_tasks_have_the_originals_ceiling(shared_data: Path, tmp_path: Path) -> None:
    config = _config(tmp_path, num_tasks=128, data_dir=str(shared_data / "webshop"))
    written = write_tasks(tmp_path / "tasks.json", config)
    assert sum(task.reachable for task in written.tasks) == 125
    assert len({task.id for task in written.tasks}) == 128


def test_a_run_without_evaluation_has_an_empty_manifest(tmp_path: Path) -> None:
    assert write_tasks(tmp_path / "tasks.json", _config(tmp_path, num_tasks=0)).tasks == []


def test_a_missing_manifest_is_none_and_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "tasks.json"
    assert read_tasks(path) is None
    write_tasks(path, _config(tmp_path))
    whole = path.read_bytes()
    for damage in (b"", whole[: len(whole) // 2], whole.replace(b"true", b"maybe"), whole.replace(b'"id"', b'"no"')):
        path.write_bytes(damage)
        with pytest.raises(StoreError, match=r"tasks\.json cannot be read as a manifest of evaluation tasks: .*remove"):
            read_tasks(path)


def test_reading_it_needs_no_torch() -> None:
    code = "import sys, hpc_es.envs.manifest; print([m for m in ('torch', 'numba', 'vllm') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_a_run_that_has_begun_keeps_its_tasks(tmp_path: Path) -> None:
    path = tmp_path / "tasks.json"
    settle_tasks(path, _config(tmp_path), has_begun=False)
    first = path.read_bytes()
    settle_tasks(path, _config(tmp_path), has_begun=True)
    assert path.read_bytes() == first
    settle_tasks(path, _config(tmp_path, num_tasks=6), has_begun=False)  # nothing has run yet: it may be another task
    assert len(read_tasks(path).tasks) == 6  # type: ignore[union-attr]


def test_a_begun_run_without_a_manifest_gets_one(tmp_path: Path) -> None:
    settle_tasks(tmp_path / "tasks.json", _config(tmp_path), has_begun=True)
    assert read_tasks(tmp_path / "tasks.json") is not None


def test_another_catalogue_is_refused_with_the_differences(shared_data: Path, tmp_path: Path) -> None:
    path = tmp_path / "tasks.json"
    settle_tasks(path, _config(tmp_path, num_tasks=7), has_begun=False)
    before, first = path.read_bytes(), read_tasks(path).tasks[0].id  # type: ignore[union-attr]
    another = _config(tmp_path, num_tasks=7, data_dir=str(shared_data / "webshop"))
    with pytest.raises(
        ConfigError, match=rf"task 0: '{first}' -> 'goal 0 B\w+'\n(.*\n)*  and 2 more\n.*another run.name"
    ):
        settle_tasks(path, another, has_begun=True)
    assert path.read_bytes() == before


def test_launching_writes_the_manifest_and_going_on_compares_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_llama(tmp_path / "model")
    config = _config(tmp_path)
    paths, _ = prepare.write_folder(config)
    prepare.check(config)
    assert len(read_tasks(paths.tasks).tasks) == 5  # type: ignore[union-attr]
    JournalWriter.create(
        paths, lambda generation, size: Started(0.0, SCHEMA_VERSION, "play", 1, 0, config.model_dump_json(), 0, {}, "h")
    ).close()
    prepare.check(config)
    changed = [TaskFacts("another"), *read_tasks(paths.tasks).tasks[1:]]  # type: ignore[union-attr]
    monkeypatch.setattr(manifest, "_facts", lambda *_: changed)
    with pytest.raises(ConfigError, match=r"task 0: 'goal 0 \w+' -> 'another'\n"):
        prepare.check(config)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (lambda task: 3, r"facts\(0\) must return TaskFacts"),
        (lambda task: TaskFacts(7), r"facts\(0\) must return TaskFacts: .*Expected `str`"),  # type: ignore[arg-type]
        (lambda task: TaskFacts("\ud800"), r"facts\(0\) must return TaskFacts: .* surrogates not allowed"),
        (lambda task: TaskFacts("x" * 1001), r"facts\(0\) must have an id of at most 1000 characters"),
        (lambda task: TaskFacts("x", horizon=-1), r"facts\(0\) must have an id .* a horizon that is None or from 0"),
        (lambda task: TaskFacts("x", horizon=2**70), r"facts\(0\) must have an id .* horizon that is None or from 0"),
        (lambda task: {}[task], "lab: facts\\(0\\) raised KeyError: 0"),
    ],
)
def test_an_environment_that_cannot_describe_its_tasks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any, message: str
) -> None:
    monkeypatch.setattr(Lab, "facts", lambda self, task: said(task))
    with pytest.raises(EnvError, match=message):
        write_tasks(tmp_path / "tasks.json", _config(tmp_path, env="lab"))


@pytest.mark.parametrize("num_tasks", [0, True, 2**80, 10**5000, "7", None], ids=lambda value: type(value).__name__)
def test_an_environment_that_cannot_say_how_many_tasks_it_has_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_tasks: object
) -> None:
    monkeypatch.setattr(Lab, "num_tasks", property(lambda self: num_tasks, lambda self, value: None), raising=False)
    with pytest.raises(EnvError, match=r"lab: num_tasks is .*; it must be an int from 1 to 9007199254740992"):
        write_tasks(tmp_path / "tasks.json", _config(tmp_path, env="lab"))


def test_more_tasks_than_there_are_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval.num_tasks=129 is more than the 128 tasks of webshop"):
        write_tasks(tmp_path / "tasks.json", _config(tmp_path, num_tasks=129))


def test_a_manifest_that_was_edited_is_refused(tmp_path: Path) -> None:
    """Its horizons and what can succeed at all decide what success rates are worth."""
    path = tmp_path / "tasks.json"
    written = write_tasks(path, _config(tmp_path))
    assert read_tasks(path) == written
    contents = json.loads(path.read_text())
    contents["tasks"][0]["reachable"] = False
    path.write_text(json.dumps(contents))
    with pytest.raises(StoreError, match="does not match its digest"):
        read_tasks(path)
    del contents["digest"]  # as the first release wrote it
    path.write_text(json.dumps(contents))
    assert read_tasks(path) is not None


def test_the_head_reads_the_number_of_tasks_and_creates_no_environment(tmp_path: Path) -> None:
    path, config = tmp_path / "tasks.json", _config(tmp_path)
    with pytest.raises(StoreError, match=r"tasks.json is missing: `hpc-es run "):
        recorded_tasks(path, config)
    settle_tasks(path, config, has_begun=False)
    assert recorded_tasks(path, config) == count_tasks(config)
    code = (
        "import sys, hpc_es.head.loop\n"
        "print([name for name in sys.modules if name.startswith(('hpc_es.engine', 'vllm', 'hpc_es.envs.sudoku'))])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    source = Path(hpc_es.__file__).parent / "head"
    assert not [file for file in source.glob("*.py") if re.search(r"envs\.make|make_for|inspect\(", file.read_text())]


def test_a_manifest_of_the_first_release_is_completed_when_its_run_resumes(tmp_path: Path) -> None:
    path, config = tmp_path / "tasks.json", _config(tmp_path)
    write_tasks(path, config)
    with pytest.raises(StoreError, match="does not have the number of training tasks"):
        recorded_tasks(path, config)
    tasks = read_tasks(path).tasks  # type: ignore[union-attr]
    complete_tasks(path, config)
    assert read_tasks(path).tasks == tasks  # type: ignore[union-attr]
    assert recorded_tasks(path, config).train > 0


def test_training_tasks_that_have_changed_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, config = tmp_path / "tasks.json", _config(tmp_path)
    settle_tasks(path, config, has_begun=False)
    before = recorded_tasks(path, config).train
    monkeypatch.setattr(manifest, "count_tasks", lambda config: Tasks(before + 1, 5))
    with pytest.raises(ConfigError, match=rf"has {before + 1} training tasks, but this run began with {before} "):
        settle_tasks(path, config, has_begun=True)
