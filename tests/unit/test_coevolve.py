"""The pure parts of EoH and Sample: prompts and answers, ranks, parents, survival, rewards, sigma."""

import math
import time
from collections import Counter

import pytest

from hpc_es.methods.coevolve import population, prompts, rewards
from hpc_es.records import Context, PoolChange


def pool(*scores: float) -> dict[str, Context]:
    return {f"h{place}": Context(f"h{place}", "text", score=score) for place, score in enumerate(scores)}


# --- population ---------------------------------------------------------------------------------------------------


def test_the_best_rank_first_and_invalid_ones_have_no_rank() -> None:
    assert [each.id for each in population.ranked(pool(-7.0, math.nan, -6.5, -7.0))] == ["h2", "h0", "h3"]


def test_probabilities_follow_one_over_rank_and_size() -> None:
    assert population.probabilities(2) == pytest.approx([4 / 7, 3 / 7])  # 1/3 : 1/4
    assert sum(population.probabilities(10)) == pytest.approx(1)


def test_parents_are_drawn_by_rank_with_replacement_from_the_runs_seed() -> None:
    contexts = pool(-1.0, -2.0)

    def drawn(seed: int) -> list[tuple[str, ...]]:
        chosen = (population.parents(contexts, "e1", run_seed=seed, generation=3, slot=slot) for slot in range(2000))
        return [tuple(each.id for each in pair) for pair in chosen]

    assert drawn(0) == drawn(0) != drawn(1)
    counts = Counter(parent for pair in drawn(0) for parent in pair)
    assert counts["h0"] / 4000 == pytest.approx(4 / 7, abs=0.03)
    assert ("h0", "h0") in drawn(0)


def test_parents_do_not_depend_on_the_order_of_the_pool() -> None:
    contexts = pool(-1.0, -2.0, -3.0)
    turned = dict(reversed(contexts.items()))
    for slot in range(20):
        one, two = (population.parents(each, "m1", run_seed=0, generation=0, slot=slot) for each in (contexts, turned))
        assert one == two


def test_operators_have_as_many_parents_as_published_and_an_empty_pool_has_none() -> None:
    for operator, count in {"i1": 0, "e1": 2, "e2": 2, "m1": 1, "m2": 1}.items():
        assert len(population.parents(pool(-1.0), operator, run_seed=0, generation=0, slot=0)) == count
        assert population.parents({}, operator, run_seed=0, generation=0, slot=0) == ()


def test_survivors_are_the_best_new_objectives() -> None:
    children = [
        Context("same", "", score=-2.000001),
        Context("invalid", "", score=math.nan),
        Context("best", "", score=-0.5),
        Context("twice", "", score=-0.5),
    ]
    kept = population.survivors(pool(-1.0, -2.0, -3.0), children, 4)
    assert [each.id for each in kept] == ["best", "h0", "h1", "h2"]
    assert population.change(pool(-1.0, -2.0, -3.0), children, 3) == PoolChange(("best",), ("h2",))
    assert population.change(pool(-1.0), [Context("invalid", "", score=math.nan)]) is None


# --- rewards ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("child", "worst", "reward"),
    [
        (6.0, 9.0, 1.0),
        (7.5, 9.0, -0.5),
        (8.5, 9.0, -1.5),  # valid, yet less than an invalid one
        (math.nan, 9.0, -1.0),
        (math.nan, 7.25, -0.25),
        (20.0, 9.0, -1.0),
        (20.0, 7.0, 0.0),
    ],
)
def test_the_reward_of_a_child_is_the_improvement_on_its_parent(child: float, worst: float, reward: float) -> None:
    assert rewards.improvement(7.0, child, worst) == reward


def test_samples_get_minus_their_objective_and_invalid_ones_a_deviation_less_than_the_worst() -> None:
    assert rewards.of_samples([6.0, 8.0, math.nan]) == [-6.0, -8.0, -9.0]
    assert rewards.of_samples([7.0, 7.0, math.nan]) == [-7.0, -7.0, -8.0]
    assert rewards.of_samples([-3000.0, math.nan]) == [3000.0, 2970.0]
    assert rewards.of_samples([math.nan, math.nan]) == [0.0, 0.0]


def test_sigma_falls_by_generation_and_ends_at_exactly_nothing() -> None:
    sigmas = [rewards.sigma_of_generation(generation, 25) for generation in range(25)]
    assert (sigmas[0], sigmas[12], sigmas[24]) == (1e-3, pytest.approx(5e-4), 0.0)
    assert sigmas == sorted(sigmas, reverse=True)


# --- prompts and answers ------------------------------------------------------------------------------------------

CODE = "def priority(el, n, w):\n    return 0.0"


@pytest.mark.parametrize(
    "answer",
    [
        f"{{Constant.}}\n```python\n{CODE}\n```",
        f"The idea: {{Constant.}}\n\n```\n{CODE}\n```\nThis is simple.",
        f"{{Constant.}}\n{CODE}\n",
        f"{{Constant.}}\n{CODE}\nThis returns a constant.",
        f"{{Constant.}}\n```python\n{CODE}",
    ],
)
def test_description_and_program_are_found_however_they_are_wrapped(answer: str) -> None:
    assert prompts.read(answer) == prompts.Heuristic("Constant.", CODE)


@pytest.mark.parametrize("answer", ["", "{only an idea}", "```python\nx = 1\n```", "```", "{" * 1000, "import this"])
def test_an_answer_without_a_function_holds_no_heuristic(answer: str) -> None:
    assert prompts.read(answer) is None


def test_the_text_of_a_heuristic_is_read_as_the_same_heuristic() -> None:
    heuristic = prompts.Heuristic("Constant.", CODE)
    assert prompts.read(heuristic.text) == heuristic


@pytest.mark.parametrize("piece", ["{", "```\n", "import ", "def ", "\n", "{}", "` ", "def x\n```\n"])
def test_reading_takes_no_longer_for_hostile_answers(piece: str) -> None:
    began = time.process_time()
    prompts.read(piece * 1_000_000)
    assert time.process_time() - began < 1


@pytest.mark.parametrize("problem", prompts.PROBLEMS)
@pytest.mark.parametrize("operator", prompts.OPERATORS)
def test_a_prompt_names_the_function_and_shows_the_parents(problem: str, operator: str) -> None:
    shown = [f"parent {number}" for number in range(population.NUM_PARENTS[operator])]
    text = prompts.ask(problem, operator, shown)
    assert prompts.PROBLEMS[problem].signature in text
    assert all(parent in text for parent in shown)
