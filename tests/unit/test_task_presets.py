"""configs/tasks: each loads, makes its environments, and has the published settings."""

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from repository import CONFIGS

from hpc_es import envs
from hpc_es.config import load

TASKS = CONFIGS / "tasks"
FRAGMENTS = {"qwen3.5-4b"}
RUNNABLE = sorted(path for path in TASKS.glob("*.yaml") if path.stem not in FRAGMENTS)


@pytest.mark.parametrize("path", RUNNABLE, ids=lambda path: path.stem)
def test_a_task_loads_and_has_enough_tasks_to_train_and_to_evaluate_on(path: Path, shared_data: Path) -> None:
    config = load(path, _where_its_data_lies(path, shared_data)).config
    if config.task.env == "twx" and not (shutil.which("java") and find_spec("textworld_express")):
        pytest.skip("twx needs Java and textworld-express")
    train, held_out = (envs.make_for(config, kind) for kind in ("train", "eval"))
    assert train.num_tasks >= config.es.tasks_per_member
    assert held_out.num_tasks >= config.eval.num_tasks
    if config.task.env != "ahd":  # its prompt is always the same: instances differ, which the model does not see
        assert train.reset(0) != held_out.reset(0)


def _where_its_data_lies(path: Path, shared_data: Path) -> list[str]:
    """Presets name a folder below the working directory. DocVQA's own files are not to be had: drawn pages stand in."""
    named = load(path).config.task.options.get("data_dir")
    if named is None:
        return []
    found = shared_data / Path(named).name
    return [f"task.options.data_dir={found if found.is_dir() else 'null'}"]


@pytest.mark.parametrize(("blanks", "sigma"), [(5, (1e-3, 2.5e-4)), (10, (1e-3, 2.5e-4)), (15, (7e-4, 5e-4))])
def test_sudoku_has_the_published_settings(blanks: int, sigma: tuple[float, float]) -> None:
    config = load(TASKS / f"sudoku_h{blanks}.yaml").config
    es, sampling = config.es, config.sampling
    assert (config.run.num_updates, es.population, es.tasks_per_member, es.alpha.start) == (100, 32, 32, 5e-4)
    assert (es.sigma.kind, es.sigma.start, es.sigma.end) == ("cosine", *sigma)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.presence_penalty) == (0.7, 0.8, 20, 1.5)
    assert (sampling.max_tokens, config.eval.num_tasks, config.eval.every, config.eval.repeats) == (64, 32, 10, 3)
    assert {envs.make_for(config, "eval").facts(task).horizon for task in range(32)} == {blanks}
    assert _turns(config) == 3 * blanks


def test_sudoku_with_20_blanks_is_the_one_with_15_but_for_its_length() -> None:
    ours, nearest = (load(TASKS / f"sudoku_h{blanks}.yaml").config for blanks in (20, 15))
    assert (ours.es, ours.sampling, ours.eval, ours.model) == (
        nearest.es,
        nearest.sampling,
        nearest.eval,
        nearest.model,
    )
    assert _turns(ours) == 60


@pytest.mark.parametrize("name", ["dapo", "aime", "gsm8k"])
def test_mathematics_follows_the_published_protocol(name: str) -> None:
    options = load(TASKS / f"math_tool_{name}.yaml").config.task.options
    assert (options["tools"], options["require_tool"], options["max_turns"]) == (["bash"], True, 50)
    assert options["hint"] is False


def test_docvqa_is_evaluated_on_as_many_questions_as_the_published_percentages_point_to() -> None:
    config = load(TASKS / "docvqa.yaml").config
    assert (config.eval.num_tasks, config.eval.repeats) == (100, 4)


@pytest.mark.parametrize("name", ["docvqa", "math_tool_dapo", "sudoku_h5"])
def test_a_preset_of_qwen3_5_says_itself_whether_the_model_thinks(name: str) -> None:
    loaded = load(TASKS / f"{name}.yaml")
    assert loaded.config.task.chat_options == {"enable_thinking": False}
    assert (
        loaded.origins["task.chat_options.enable_thinking"]
        .rpartition(":")[0]
        .endswith("qwen3.5-4b.yaml" if name.startswith("sudoku") else f"{name}.yaml")
    )


def _turns(config) -> int:
    """Number of turns of an episode whose answers are all refused."""
    env, turns = envs.make_for(config, "train"), 1
    env.reset(0)
    while not env.step("pass").done:
        turns += 1
    return turns


def test_sudoku_plays_the_puzzles_of_a_file_where_one_is_given(shared_data: Path) -> None:
    path = f"task.options.path={shared_data / 'sudoku' / '{split}.jsonl'}"
    config = load(TASKS / "sudoku_h20.yaml", [path]).config
    assert envs.make_for(config, "eval").num_tasks == 32


def test_countdown_and_conciseness_have_the_settings_of_es_at_scale() -> None:
    for name, tasks, tokens in (("countdown", 200, 1024), ("conciseness", 24, 128)):
        config = load(TASKS / f"{name}.yaml").config
        es, sampling = config.es, config.sampling
        assert (es.population, es.sigma.start, es.alpha.start, es.tasks_per_member) == (30, 1e-3, 5e-4, tasks)
        assert (sampling.temperature, sampling.max_tokens) == (0, tokens)
