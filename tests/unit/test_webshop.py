"""WebShop against what was recorded from the original, and as an environment."""

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hpc_es import envs
from hpc_es.envs.base import StepResult
from hpc_es.envs.check import check_env
from hpc_es.envs.webshop import Catalogue, WebShop
from hpc_es.envs.webshop.env import goal_ids
from hpc_es.errors import ConfigError, EnvError


@cache
def _golden(folder: Path) -> dict[str, Any]:
    return json.loads(gzip.decompress((folder / "golden.json.gz").read_bytes()))


@cache
def _catalogue(folder: Path | None = None) -> Catalogue:
    return Catalogue(folder, seed=0)


@pytest.fixture
def golden(shared_data: Path) -> dict[str, Any]:
    return _golden(shared_data / "webshop")


@pytest.fixture
def real(shared_data: Path) -> Catalogue:
    return _catalogue(shared_data / "webshop")


def _webshop(**options: Any) -> WebShop:
    env = envs.make("webshop", **options)
    assert isinstance(env, WebShop)
    return env


# --- as the original ---------------------------------------------------------------------------------------------


def test_goals_are_the_originals_to_the_letter(real: Catalogue, golden: dict[str, Any]) -> None:
    assert len(real.goals) == golden["n_goals"]
    assert real.goals[: len(golden["goals_head"])] == golden["goals_head"]
    assert [list(goal) for goal in real.goals[:3]] == [list(goal) for goal in golden["goals_head"][:3]]


def test_prices_are_drawn_with_the_seed(real: Catalogue, golden: dict[str, Any]) -> None:
    recorded = golden["product_prices_head"]
    assert {asin: real.price(asin) for asin in recorded} == recorded


def test_rewards_and_their_parts_agree_exactly(real: Catalogue, golden: dict[str, Any]) -> None:
    for case in golden["reward_cases"]:
        asked = (case["goal"], case["asin"], case["price"], case["options"])
        assert real.reward(*asked) == case["reward"], asked
        parts = vars(real.rewarded(*asked))
        assert {name: parts[name] for name in case["info"] if name in parts} == {
            name: value for name, value in case["info"].items() if name in parts
        }


def test_searches_list_the_same_products_as_lucene(real: Catalogue, golden: dict[str, Any]) -> None:
    cases = golden["lucene_top50"]
    same_10 = sum(real.search(case["query"])[:10] == case["hits"][:10] for case in cases)
    assert same_10 >= 0.98 * len(cases)


def test_pages_and_clickables_agree_to_the_letter(shared_data: Path, golden: dict[str, Any]) -> None:
    env = _webshop(data_dir=shared_data / "webshop", seed=0)
    for recorded in golden["trajectories"]:
        env.reset(recorded["goal_index"])
        for step in recorded["trajectory"]:
            if step["action"] is not None:
                result = env.step(step["action"])
                assert (result.reward, result.done) == (step["reward"], step["done"])
                assert result.invalid == (step["action"] == "click[nonsense]")
                assert result.info["observation"] == step["obs"]
            assert env.observation == step["obs"]
            if not step["done"]:
                assert env.available_actions == step["avail"]


def test_reachable_goals_are_those_that_an_oracle_reached_in_the_original(real: Catalogue) -> None:
    assert sum(real.ceiling(goal) == 1.0 for goal in real.goals[:500]) == 480


def test_searching_for_the_instruction_shows_the_target_as_often_as_in_the_original(real: Catalogue) -> None:
    found = [goal["asin"] in real.search(goal["instruction_text"].lower())[:10] for goal in real.goals[:500]]
    assert sum(found) == 454


# --- splits ------------------------------------------------------------------------------------------------------


def test_evaluation_is_128_fixed_goals_that_training_never_sees() -> None:
    assert list(goal_ids("eval", 10_000)) == list(range(128))
    assert goal_ids("train", 10_000) == range(500, 10_000)
    assert goal_ids(None, 10_000) == range(10_000)
    evaluation = _webshop(split="eval")
    assert (evaluation.num_tasks, evaluation.goal_ids) == (128, range(128))


def test_a_task_of_a_split_is_the_goal_that_the_split_lists() -> None:
    train = _webshop(split="train")
    train.reset(3)
    assert train.catalogue.goals[train.goal_ids[3]]["instruction_text"] in train.observation


def test_a_catalogue_too_small_to_train_on_says_so(tmp_path: Path) -> None:
    _write_catalogue(tmp_path, [_item("A1")], {"A1": _instruction("find red lamps", "soft light")})
    assert _webshop(data_dir=tmp_path).num_tasks == 1
    with pytest.raises(ConfigError, match="split=train is empty: this catalogue has 1 synthetic goals"):
        _webshop(data_dir=tmp_path, split="train")
    with pytest.raises(ConfigError, match=r"goals=human needs items_human_ins\.json"):
        _webshop(data_dir=tmp_path, goals="human")


# --- the environment ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "eval", None])
def test_it_keeps_the_contract_of_environments(split: str | None) -> None:
    check_env(lambda: envs.make("webshop", split=split))


def _buy_the_goal(env: WebShop, task: int) -> StepResult:
    env.reset(task)
    goal = env.catalogue.goals[env.goal_ids[task]]
    env.step(f"search[<q> {goal['query']}]")
    while goal["asin"].lower() not in env.available_actions["clickables"]:
        env.step("click[next >]")
    for name in (goal["asin"], *goal["goal_options"].values()):
        assert not env.step(f"click[{name}]").invalid
    return env.step("click[buy now]")


def test_buying_exactly_what_is_asked_for_is_a_success() -> None:
    env = _webshop(split="eval")
    task = next(t for t in env.goal_ids if env.catalogue.ceiling(env.catalogue.goals[t]) == 1.0)
    result = _buy_the_goal(env, task)
    assert (result.reward, result.success, result.terminated, result.observation) == (1.0, True, True, None)


def test_an_imperfect_purchase_is_not_a_success() -> None:
    score, success = (_webshop(split="eval", reward=reward) for reward in ("score", "success"))
    for env in (score, success):
        env.reset(0)
        for action in ("search[tea]", f"click[{env.catalogue.search('tea')[0]}]"):
            env.step(action)
    bought = score.step("click[buy now]")
    assert 0 <= bought.reward < 1
    assert not bought.success
    assert bought.terminated
    assert success.step("click[buy now]").reward == 0.0


def test_the_fifteenth_turn_is_the_last() -> None:
    env = _webshop()
    env.reset(0)
    results = [env.step("search[lamp]") for _ in range(15)]
    assert [result.done for result in results] == [False] * 14 + [True]
    assert (results[-1].truncated, results[-1].terminated, results[-1].reward) == (True, False, 0.0)
    with pytest.raises(EnvError, match="no episode is running"):
        env.step("search[lamp]")


def test_a_refused_action_changes_nothing_and_costs_the_penalty() -> None:
    env = _webshop(invalid_penalty=0.1)
    env.reset(0)
    env.step("search[lamp]")
    before = env.observation, env.available_actions
    for action in (
        "click[buy now]",
        "click[search]",
        "buy",
        "search[]",
        "Search[lamp]",
        "please search[lamp]",
        "click[]",
    ):
        result = env.step(action)
        assert (result.invalid, result.reward, result.done) == (True, -0.1, False), action
        assert (env.observation, env.available_actions) == before
    assert not env.step("search[lamp]").invalid


# --- the prompt --------------------------------------------------------------------------------------------------


def test_the_prompt_has_task_page_and_actions_and_the_last_turns_only() -> None:
    env = _webshop(history=2)
    first = env.reset(0).messages[-1].content
    assert env.observation in first
    assert "search[<your query>]" in first
    assert "turns so far" not in first
    for query in ("lamp", "blanket", "tea"):
        result = env.step(f"<think>search[no]</think><action> Search[{query}] </action>")
    assert result.observation is not None
    prompt = result.observation.messages[-1].content
    assert env.observation in prompt
    assert "click[next >]" in prompt
    assert "Turn 4 of 15" in prompt
    assert "search[lamp]" not in prompt
    assert prompt.index("[Turn 2] your action: search[blanket]") < prompt.index("[Turn 3] your action: search[tea]")
    assert prompt.count(env.catalogue.goals[0]["instruction_text"]) == 2  # the task and the page, not the history


def test_the_last_action_of_an_answer_counts() -> None:
    env = _webshop()
    env.reset(0)
    answer = "<think>Maybe <action>search[tea]</action>?</think><action>Search[Lamp]</action>"
    assert env.step(answer).info["action"] == "search[lamp]"


def test_a_prompt_that_is_too_long_loses_its_history() -> None:
    env = _webshop()
    env.reset(0)
    result = env.step("search[lamp] " + "x" * 13_000)
    assert result.observation is not None
    assert "turns so far" not in result.observation.messages[-1].content


def test_plain_style_asks_for_the_bare_action_and_takes_it() -> None:
    env = _webshop(style="plain")
    assert "<think>" not in env.reset(0).messages[-1].content
    assert not env.step("\nsearch[lamp]\n").invalid


# --- small catalogues written by the tests -----------------------------------------------------------------------


def _item(asin: str, **fields: Any) -> dict[str, Any]:
    return {
        "asin": asin,
        "name": f"Lamp {asin}",
        "full_description": "",
        "images": ["x"],
        "product_category": "Home › Lamps",
        "small_description": ["soft light"],
        "customization_options": "",
        "category": "garden",
        "query": "Table Lamps ",
        "pricing": "$12.5",
        **fields,
    }


def _instruction(text: str, *attributes: str) -> dict[str, Any]:
    return {"attributes": list(attributes), "instruction": text, "instruction_attributes": list(attributes)}


def _values(*values: str) -> list[dict[str, str]]:
    return [{"value": value} for value in values]


def _write_catalogue(folder: Path, items: list[dict[str, Any]], instructions: dict[str, Any]) -> None:
    (folder / "items_shuffle.json").write_text(json.dumps(items))
    (folder / "items_ins_v2.json").write_text(json.dumps(instructions))


def _open_item(folder: Path, **fields: Any) -> WebShop:
    _write_catalogue(folder, [_item("A1", **fields)], {"A1": _instruction("find lamps", "soft light")})
    env = _webshop(data_dir=folder)
    env.reset(0)
    env.step("search[lamp]")
    env.step("click[a1]")
    return env


def test_a_value_that_two_options_share_belongs_to_the_last(tmp_path: Path) -> None:
    env = _open_item(tmp_path, customization_options={"Top": _values("Red", "blue"), "Base": _values("red")})
    assert env.available_actions["clickables"][-2:] == ["red", "blue"]
    env.step("click[red]")
    env._session.catalogue = _Paid(env.catalogue)  # type: ignore[union-attr, assignment]
    env.step("click[buy now]")
    assert '{"base": "red"}' in env.observation


def _bought_options(folder: Path, *actions: str) -> str:
    env = _open_item(folder, customization_options={"Size": _values("S/M", "L")})
    for action in (*actions, "click[buy now]"):
        env._session.catalogue = _Paid(env.catalogue)  # type: ignore[union-attr, assignment]
        assert not env.step(action).invalid, action
    return env.observation.split(" [SEP] ")[8]


def test_chosen_options_last_until_the_results_are_seen_again(tmp_path: Path) -> None:
    assert _bought_options(tmp_path, "click[s | m]", "click[L]") == '{"size": "l"}'
    assert _bought_options(tmp_path, "click[l]", "click[features]", "click[< prev]") == '{"size": "l"}'
    assert _bought_options(tmp_path, "click[l]", "click[< prev]", "click[a1]") == "{}"
    assert _bought_options(tmp_path, "click[l]", "search[lamp]", "click[a1]") == "{}"
    assert _bought_options(tmp_path, "click[l]", "click[back to search]", "search[lamp]", "click[a1]") == "{}"


class _Paid:
    """A catalogue whose reward needs no nouns."""

    def __init__(self, real: Catalogue) -> None:
        self.real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def rewarded(self, *args: Any) -> Any:
        return type("Paid", (), {"total": 0.5})()


def test_an_option_called_like_a_button_works_as_the_button(tmp_path: Path) -> None:
    env = _open_item(tmp_path, customization_options={"Kind": _values("features", "attributes", "< prev")})
    assert env.available_actions["clickables"][-1] == "attributes"
    env.step("click[attributes]")
    assert env.observation.endswith("< Prev [SEP] soft light [SEP] garden [SEP] table lamps [SEP] Home › Lamps")
    env.step("click[< prev]")
    env.step("click[< prev]")
    assert "Total results: 1" in env.observation


def test_white_space_is_shown_as_html_shows_it(tmp_path: Path) -> None:
    env = _open_item(tmp_path, small_description=["a", "", " \n", "\u00a0b "], full_description=" \n c\nd ")
    env.step("click[features]")
    assert env.observation.endswith("< Prev [SEP] a [SEP]  [SEP] b")
    env.step("click[< prev]")
    env.step("click[description]")
    assert env.observation.endswith("< Prev [SEP] c\nd")


def test_a_page_name_in_the_query_leads_back_as_in_the_original(tmp_path: Path) -> None:
    env = _open_item(tmp_path)
    env.step("search[lamp item_page]")
    env.step("click[a1]")
    env.step("click[reviews]")
    env.step("click[< prev]")
    assert "Page 1 (Total results: 1)" in env.observation
    env.step("search[lamp search_results]")
    env.step("click[a1]")
    env.step("click[< prev]")
    assert env.observation.endswith("Page 0 (Total results: 1) [SEP] Next >")


def test_goals_with_human_instructions_come_from_their_file(tmp_path: Path) -> None:
    _write_catalogue(tmp_path, [_item("A1", pricing="$985.0"), _item("A2")], {})
    told = {"instruction": "a lamp.", "instruction_attributes": ["soft light"], "instruction_options": ["red"]}
    untold = {**told, "instruction_attributes": []}
    human = {"A1": [untold, told], "A2": [{**told, "instruction": ".another lamp"}]}
    (tmp_path / "items_human_ins.json").write_text(json.dumps(human))
    goals = sorted(Catalogue(tmp_path, goals="human").goals, key=lambda goal: goal["asin"])
    assert [goal["asin"] for goal in goals] == ["A1", "A2"]
    assert (goals[0]["instruction_text"], goals[0]["price_upper"], goals[0]["weight"]) == ("a lamp", 1_000_000, 1)
    assert goals[1]["instruction_text"].startswith("another lamp, and price lower than ")
    assert goals[0]["goal_options"] == ["red"]
