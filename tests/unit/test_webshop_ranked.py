"""WebShop for small models: ranked actions and short prompts; and what is known of its tasks before anybody plays."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from repository import CONFIGS

from hpc_es import envs
from hpc_es.config import load
from hpc_es.envs.base import TaskFacts
from hpc_es.envs.check import check_env
from hpc_es.envs.webshop import WebShop, prompt
from hpc_es.envs.webshop.catalogue import made_up
from hpc_es.errors import ConfigError, EnvError


def _webshop(**options: Any) -> WebShop:
    env = envs.make("webshop", **options)
    assert isinstance(env, WebShop)
    return env


def _ranked(**options: Any) -> WebShop:
    return _webshop(**{"style": "short", "actions": "rank", **options})


# --- ranked actions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["plain", "short"])
def test_ranked_play_keeps_the_contract_of_environments(style: str) -> None:
    check_env(lambda: envs.make("webshop", actions="rank", style=style, split="train"))


def test_every_choice_is_accepted_and_all_that_can_be_clicked_is_one() -> None:
    env, rng = _ranked(max_turns=30), random.Random(0)
    for _ in range(100):
        observation = env.reset(rng.randrange(env.num_tasks))
        while observation is not None:
            assert observation.choices
            clickable = [f"click[{name}]" for name in env.available_actions["clickables"] if name != "search"]
            chosen = [f"click[{value}]" for value in env._visit().options.values() if env._visit().place == "item"]
            clicks = [choice for choice in observation.choices if choice.startswith("click")]
            assert clicks == [click for click in clickable if click not in chosen]
            assert (len(clicks) < len(observation.choices)) == env.available_actions["has_search_bar"]
            result = env.step(rng.choice(observation.choices))
            assert not result.invalid
            observation = result.observation  # type: ignore[assignment]


def test_searches_are_for_the_instruction_and_for_shorter_parts_of_it() -> None:
    env = _ranked()
    text = "find tall lamps with soft light with color: red, and size: l, and price lower than 60.00 dollars"
    goal = {**env.catalogue.goals[0], "instruction_text": text, "goal_options": {"color": "red", "size": "l"}}
    assert prompt.searches(goal) == [
        f"search[{text}]",
        "search[find tall lamps with soft light with color: red, and size: l]",
        "search[find tall lamps with soft light]",
    ]
    bare = {**goal, "instruction_text": "Find  [tall] lamps", "goal_options": {}}
    assert prompt.searches(bare) == ["search[find tall lamps]"]
    human = {**goal, "instruction_text": "a red lamp, and price lower than 60.00 dollars", "goal_options": ["red"]}
    assert prompt.searches(human) == ["search[a red lamp, and price lower than 60.00 dollars]", "search[a red lamp]"]


def test_an_option_is_offered_until_it_is_chosen_and_never_where_its_brackets_would_be_misread(tmp_path: Path) -> None:
    values = [{"value": value} for value in ("large", "m [medium]", "small")]
    texts = {
        "name": "Lamp",
        "full_description": "",
        "category": "garden",
        "query": "lamps",
        "product_category": "Lamps",
    }
    item = {
        "asin": "A1",
        **texts,
        "small_description": [""],
        "pricing": "$12.5",
        "customization_options": {"size": values},
    }
    told = {"A1": {"attributes": ["soft"], "instruction": "find lamps", "instruction_attributes": ["soft"]}}
    (tmp_path / "items_shuffle.json").write_text(json.dumps([item]))
    (tmp_path / "items_ins_v2.json").write_text(json.dumps(told))
    env = _ranked(data_dir=tmp_path)
    env.reset(0)
    for action in ("search[lamps]", "click[a1]"):
        observation = env.step(action).observation
    assert observation is not None
    assert observation.choices is not None
    assert observation.choices[-3:] == ("click[buy now]", "click[large]", "click[small]")
    assert env.step("click[m [medium]]").invalid
    for action, left in (("click[large]", "click[small]"), ("click[small]", "click[large]")):
        observation = env.step(action).observation
        assert observation is not None
        assert observation.choices is not None
        assert observation.choices[-2:] == ("click[buy now]", left)


def test_ranking_leaves_no_room_for_thought() -> None:
    with pytest.raises(ConfigError, match="actions=rank cannot be combined with style=think"):
        _webshop(actions="rank")


# --- short prompts -----------------------------------------------------------------------------------------------


def test_a_short_prompt_has_an_example_but_no_list_and_shows_the_task_once_and_long_texts_cut_off() -> None:
    env, whole = _ranked(max_text=20, history=1), _webshop()
    env.reset(0), whole.reset(0)
    for action in ("search[<r>]", "click[next >]"):
        result = env.step(action)
        assert result.info == whole.step(action).info  # only the prompt is shorter, not the shop
    assert result.observation is not None
    text = result.observation.messages[-1].content
    assert "For example: search[red lamp]" in text
    assert "click[next >]" not in text.partition("page now:")[2]
    assert text.count(env.catalogue.goals[0]["instruction_text"]) == 1
    pages = [line.split(" [SEP] ") for line in text.splitlines() if "[SEP]" in line]
    assert [len(page) for page in pages] == [3 + 30, 4 + 30]  # the page before, and this one with < Prev
    shown = [part for page in pages for part in page]
    assert all(len(part) <= 20 + len("...") for part in shown if not part.startswith("[Turn"))
    assert any(part.endswith("...") for part in shown)


# --- what is known of a task -------------------------------------------------------------------------------------


def test_the_reachable_goals_of_the_original_are_as_many_as_its_oracles(shared_data: Path) -> None:
    folder = shared_data / "webshop"
    every, evaluation = _webshop(data_dir=folder), _webshop(data_dir=folder, split="eval")
    reachable = [every.facts(task).reachable for task in range(every.num_tasks)]
    assert (sum(reachable), len(reachable)) == (6452, 6910)
    assert (sum(reachable[:500]), sum(reachable[:128])) == (480, 125)
    assert [evaluation.facts(task) for task in range(128)] == [every.facts(task) for task in range(128)]


def test_a_task_is_named_by_its_goal_and_product_whatever_split_and_seed_it_is_seen_in() -> None:
    every, train, other = _webshop(), _webshop(split="train"), _webshop(seed=5)
    assert train.facts(3) == every.facts(503) == TaskFacts(f"goal 503 {every.catalogue.goals[503]['asin']}")
    assert other.facts(7).id == every.facts(7).id
    for task in (-1, train.num_tasks):
        with pytest.raises(EnvError, match=f"task {task} does not exist"):
            train.facts(task)


def test_asking_for_facts_does_not_disturb_an_episode() -> None:
    env = _webshop()
    env.reset(0)
    env.step("search[lamp]")
    before = env.observation
    env.facts(1)
    assert env.observation == before


# --- configurations ----------------------------------------------------------------------------------------------


def test_the_published_setting() -> None:
    config = load(CONFIGS / "tasks" / "webshop.yaml").config
    es, options = config.es, config.task.options
    assert (config.run.num_updates, es.population, es.tasks_per_member) == (200, 16, 16)
    assert (config.eval.num_tasks, config.eval.every, config.staleness.max_lag) == (128, 10, 1)  # type: ignore[union-attr]
    assert (options["max_turns"], options["history"], options["style"], options["reward"]) == (
        15,
        2,
        "think",
        "success",
    )
    assert (config.sampling.max_tokens, config.engine.max_model_len - config.sampling.max_tokens) == (512, 4096)


def test_the_published_setting_penalises_invalid_actions_in_training_and_counts_only_success_in_evaluation() -> None:
    override = f"task.options.data_dir={made_up()}"
    config = load(CONFIGS / "tasks" / "webshop.yaml", [override]).config
    rewards = {}
    for kind in ("train", "eval"):
        env = envs.make_for(config, kind)  # type: ignore[arg-type]
        env.reset(0)
        rewards[kind] = env.step("nothing").reward
    assert rewards == {"train": -0.01, "eval": 0.0}
