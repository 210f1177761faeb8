"""The quickstart's tasks: what it reports is measured on puzzles that training never saw."""

from typing import Any

import pytest
from repository import CONFIGS

from hpc_es import envs
from hpc_es.config import Config, load
from hpc_es.envs.base import Env
from hpc_es.envs.sudoku import Sudoku
from hpc_es.params.models import get_model

CONFIG = CONFIGS / "quickstart.yaml"


@pytest.fixture(scope="module")
def config() -> Config:
    return load(CONFIG).config


def make(config: Config, laid_over: dict[str, Any]) -> Env:
    return envs.make(config.task.env, **(config.task.options | laid_over))


def test_no_solved_grid_of_a_held_out_task_is_trained_on(config: Config) -> None:
    train, held_out = make(config, config.task.train), make(config, config.eval.options)
    assert isinstance(train, Sudoku)
    assert isinstance(held_out, Sudoku)
    tested = held_out._puzzles[: config.eval.num_tasks]
    assert len({puzzle.givens for puzzle in tested}) == config.eval.num_tasks
    assert not {puzzle.solution for puzzle in tested} & {puzzle.solution for puzzle in train._puzzles}


@pytest.mark.model
def test_a_prompt_and_its_answer_fit_the_context_and_share_whole_cache_blocks(config: Config) -> None:
    transformers = pytest.importorskip("transformers")
    folder = get_model("smollm2-135m", CONFIG.parents[1] / config.model.path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    env = make(config, config.task.train)
    prompts = [tokenizer.encode(env.reset(task).messages[0].content) for task in range(40)]
    assert max(map(len, prompts)) < config.engine.max_model_len
    shared = 0
    while len({tuple(prompt[: shared + 1]) for prompt in prompts}) == 1:
        shared += 1
    assert config.engine.block_size
    assert shared % config.engine.block_size <= 2, f"{shared} shared tokens: the last of them are computed every turn"
