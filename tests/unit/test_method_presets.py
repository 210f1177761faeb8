"""configs/methods: every published setting, held against the papers' tables."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from repository import CONFIGS
from typer.testing import CliRunner, Result

from hpc_es.cli import app
from hpc_es.config import load, yaml12
from hpc_es.config.load import Loaded
from hpc_es.methods.es import schedules
from hpc_es.methods.es.subspaces import advice

METHODS = CONFIGS / "methods"
WHOLE = {
    "endless-terminals": "terminal",
    "agentic-esopt/webarena-lite": "webarena",
}
"""Presets that name their run, model and task, whose environment does not exist yet."""

HEURISTICS = tuple(f"agentic-esopt/ahd-{kind}-{t}" for kind in ("eoh", "sample") for t in (1000, 2000))
"""Presets that name their run, model and task, too, and whose environment exists."""

GREEDY = {"sampling.temperature": 0}
ASYNC = {"staleness.mode": "natural", "staleness.max_lag": 1}
SUDOKU = {
    "run.num_updates": 100,
    "es.population": 32,
    "es.tasks_per_member": 32,
    "es.alpha.start": 5e-4,
    "sampling.temperature": 0.7,
    "sampling.top_p": 0.8,
    "sampling.top_k": 20,
    "sampling.presence_penalty": 1.5,
    "sampling.max_tokens": 64,
    "eval.every": 10,
    "eval.num_tasks": 32,
    "eval.repeats": 3,
    "task.options.size": 9,
}
REACT = {
    "sampling.temperature": 1,
    "sampling.top_p": 1,
    "sampling.top_k": 40,
    "sampling.presence_penalty": 2,
    "es.population": 16,
    "es.tasks_per_member": 16,
    "es.alpha.start": 5e-4,
}


def cosine(start: float, end: float) -> dict[str, Any]:
    return {"es.sigma.kind": "cosine", "es.sigma.start": start, "es.sigma.end": end}


def constant(sigma: float) -> dict[str, Any]:
    return {"es.sigma.kind": "constant", "es.sigma.start": sigma, "es.sigma.end": None}


def ahd(num_updates: int, population: int) -> dict[str, Any]:
    scalars = {"run.num_updates": num_updates, "es.population": population, "es.alpha.start": 5e-4}
    return {**cosine(1e-3, 0), **scalars, "es.tasks_per_member": 1}


PUBLISHED: dict[str, dict[str, Any]] = {
    "es-at-scale": {
        **GREEDY,
        **constant(1e-3),
        "es.population": 30,
        "es.alpha.start": 5e-4,
        "es.tasks_per_member": 200,
        "sampling.max_tokens": 1024,
        "run.num_updates": 500,
        "es.shaping": "zscore",
    },
    "async-es": {
        **ASYNC,
        "run.num_updates": 200,
        "es.population": 16,
        "es.tasks_per_member": 16,
        "eval.every": 10,
        "eval.num_tasks": 128,
        "launch.workers": 4,
        "slurm.workers": 4,
    },
    "endless-terminals": {
        **ASYNC,
        **constant(1.5e-3),
        "run.num_updates": 120,
        "es.population": 30,
        "es.tasks_per_member": 256,
        "es.alpha.start": 7.5e-4,
        "sampling.temperature": 0.6,
        "sampling.top_p": 1,
        "sampling.max_tokens": 2048,
        "task.options.max_turns": 16,
        "eval.repeats": 3,
        "launch.workers": 4,
        "slurm.workers": 4,
    },
    "agentic-esopt/sudoku-h5": {**SUDOKU, **cosine(1e-3, 2.5e-4), "task.options.blanks": 5},
    "agentic-esopt/sudoku-h10": {**SUDOKU, **cosine(1e-3, 2.5e-4), "task.options.blanks": 10},
    "agentic-esopt/sudoku-h15": {**SUDOKU, **cosine(7e-4, 5e-4), "task.options.blanks": 15},
    "agentic-esopt/sudoku-h5-vanilla": {**SUDOKU, **constant(1e-3), "task.options.blanks": 5},
    "agentic-esopt/sudoku-h10-vanilla": {**SUDOKU, **constant(1e-3), "task.options.blanks": 10},
    "agentic-esopt/sudoku-h15-vanilla": {**SUDOKU, **constant(5e-4), "task.options.blanks": 15},
    "agentic-esopt/math": {**REACT, **cosine(1e-3, 5e-4), "run.num_updates": 25, "sampling.max_tokens": 4096},
    "agentic-esopt/docvqa": {
        **REACT,
        **cosine(1e-3, 5e-4),
        "run.num_updates": 40,
        "sampling.max_tokens": 512,
        "engine.max_model_len": 32768,
    },
    "agentic-esopt/webarena-lite": {
        **constant(1.5e-3),
        "run.num_updates": 70,
        "es.population": 8,
        "es.tasks_per_member": 8,
        "es.alpha.start": 2.5e-4,
        "sampling.temperature": 0.7,
        "sampling.top_p": 0.8,
        "sampling.top_k": 20,
        "sampling.max_tokens": 2048,
        "task.options.max_turns": 30,
        "eval.every": 10,
        "eval.repeats": 3,
    },
    "agentic-esopt/ahd-eoh-1000": ahd(50, 10),
    "agentic-esopt/ahd-eoh-2000": ahd(50, 30),
    "agentic-esopt/ahd-sample-1000": ahd(50, 20),
    "agentic-esopt/ahd-sample-2000": ahd(100, 20),
    "copes": {
        **GREEDY,
        **constant(1e-3),
        "es.population": 40,
        "es.subspaces": 4,
        "es.alpha.start": 5e-4,
        "es.tasks_per_member": 64,
        "run.num_updates": 16,
        "es.shaping": "zscore",
    },
    "subspaces": {"es.subspaces": 4},
    "mirrored": {"es.mirrored": True},
    "centred-ranks": {"es.shaping": "centred_ranks"},
    "momentum": {"es.optimiser.kind": "momentum", "es.optimiser.beta1": 0.9},
    "adam": {
        "es.optimiser.kind": "adam",
        "es.optimiser.beta1": 0.9,
        "es.optimiser.beta2": 0.999,
        "es.optimiser.epsilon": 1e-8,
    },
}


def loaded(tmp_path: Path, *presets: str) -> Loaded:
    """A minimal run of 40 members that extends presets."""
    (tmp_path / "base.yaml").write_text("es:\n  population: 40\n")
    lines = "".join(f"  - {METHODS / preset}.yaml\n" for preset in presets)
    path = tmp_path / "run.yaml"
    minimal = "run: {name: x}\nmodel: {path: models/x}\ntask: {env: sudoku}\n"
    path.write_text(f"extends:\n  - base.yaml\n{lines}{minimal}")
    return load(
        path, [] if any("run.num_updates" in PUBLISHED[preset] for preset in presets) else ["run.num_updates=9"]
    )


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_has_the_published_settings(tmp_path: Path, preset: str) -> None:
    config = loaded(tmp_path, preset).config
    for key, expected in PUBLISHED[preset].items():
        value: Any = config
        for part in key.split("."):
            value = value[part] if isinstance(value, dict) else getattr(value, part)
        assert value == expected, key
    assert advice(config.es.population, config.es.subspaces) is None


def test_every_preset_is_in_the_table() -> None:
    files = {str(path.relative_to(METHODS).with_suffix("")) for path in METHODS.rglob("*.yaml")}
    assert files == {*PUBLISHED, "agentic-esopt/sudoku"}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_sets_nothing_that_the_run_itself_must_say(tmp_path: Path, preset: str) -> None:
    origins = loaded(tmp_path, preset).origins
    ours = [key for key, origin in origins.items() if "/methods/" in origin]
    sections = ("run.num_updates", "es.", "sampling.", "eval.", "staleness.", "launch.workers", "slurm.workers")
    of_the_run = ("run.name", "model.path", "task.env", "task.step_timeout") if preset in (*WHOLE, *HEURISTICS) else ()
    allowed = (*sections, "engine.max_model_len", "task.options.", *of_the_run)
    assert all(key.startswith(allowed) for key in ours)


def test_presets_can_be_laid_over_each_other(tmp_path: Path) -> None:
    config = loaded(tmp_path, "copes", "mirrored", "adam").config
    assert (config.es.subspaces, config.es.mirrored, config.es.optimiser.kind) == (4, True, "adam")


def test_the_published_sigma_of_heuristic_design_ends_at_nothing(tmp_path: Path) -> None:
    sigma = loaded(tmp_path, "agentic-esopt/ahd-eoh-1000").config.es.sigma
    values = [schedules.value(sigma.kind, sigma.start, sigma.end, update=u, num_updates=50) for u in range(1, 51)]
    assert (values[0], values[-1]) == (1e-3, 0)
    assert all(value > 0 for value in values[:-1])


# --- environments that do not exist yet ---------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "env"), WHOLE.items())
def test_a_preset_without_its_environment_is_shown_and_planned_but_not_run(
    preset: str, env: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = str(METHODS / f"{preset}.yaml")
    shown = invoke("config", "show", file)
    assert shown.exit_code == 0
    assert f"task.env={env}" in shown.stdout
    planned = invoke("plan", file, "--parameters", "8e9", "--tokens-in", "900", "--tokens-out", "100")
    assert planned.exit_code == 0, planned.output
    for command in (("run", file), ("submit", file), ("prepare", file), ("env", "check", env), ("env", "play", env)):
        refused = invoke(*command)
        assert refused.exit_code == 2
        assert f"the environment {env} is not part of hpc_es yet" in refused.stderr
    assert list(tmp_path.iterdir()) == []


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


# --- sources --------------------------------------------------------------------------------------------------------

SOURCES = re.compile(r" # (paper|code|published|chosen|unknown)\b")
"""The comment of each key in a preset (docs/presets.md)."""
PRESETS = sorted(path for folder in ("methods", "staleness", "tasks") for path in (CONFIGS / folder).rglob("*.yaml"))


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: str(path.relative_to(CONFIGS).with_suffix("")))
def test_every_key_says_where_its_value_is_from(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = yaml12.parse(text, str(path))
    assert isinstance(tree, dict)
    tree.pop("extends", None)
    lines = text.splitlines()
    numbers = {int(origin.rpartition(":")[2]) for _, origin in yaml12.origins(tree)}
    assert [lines[number - 1] for number in sorted(numbers) if not SOURCES.search(lines[number - 1])] == []


def test_the_page_of_the_presets_agrees_with_their_comments() -> None:
    command = [sys.executable, str(CONFIGS.parent / "tools" / "presets_table.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=CONFIGS.parent)
    assert done.returncode == 0, done.stdout + done.stderr


def test_published_values_are_not_marked_as_chosen_or_unknown() -> None:
    """The table above against the comments: the two must not part."""
    for preset, published in PUBLISHED.items():
        path = METHODS / f"{preset}.yaml"
        tree = yaml12.parse(path.read_text(encoding="utf-8"), str(path))
        assert isinstance(tree, dict)
        lines = path.read_text(encoding="utf-8").splitlines()
        for key, origin in yaml12.origins(tree):
            named = SOURCES.search(lines[int(origin.rpartition(":")[2]) - 1])
            if key in published and preset != "momentum":  # its beta1 is our choice, Polyak's is the method
                assert named is not None
                assert named[1] in ("paper", "code", "published"), (preset, key)
