"""The Sudoku environment: protocol, parsing, reward. The puzzles have their own tests."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_es.envs import make
from hpc_es.envs.base import Observation
from hpc_es.envs.check import check_env
from hpc_es.envs.sudoku import Sudoku, parse_digit, parse_move
from hpc_es.errors import ConfigError, EnvError


def blanks_and_digits(env: Sudoku, task: int) -> list[tuple[int, int, int]]:
    """Row, column and right digit of each empty cell."""
    puzzle = env._puzzles[task]
    return [(*divmod(cell, puzzle.size), puzzle.solution[cell]) for cell in puzzle.blanks]


def moves(env: Sudoku, task: int) -> list[str]:
    return [f"set {row + 1} {column + 1} {digit}" for row, column, digit in blanks_and_digits(env, task)]


@pytest.fixture
def shared_sudoku(shared_data: Path) -> Path:
    """The published puzzles."""
    return shared_data / "sudoku"


@pytest.fixture
def env() -> Sudoku:
    return Sudoku(blanks=4, num_tasks=3)


def test_a_generated_puzzle_is_called_by_its_givens(env: Sudoku) -> None:
    other = Sudoku(blanks=4, num_tasks=2)
    names = [env.facts(task).id for task in range(3)]
    assert names[:2] == [other.facts(task).id for task in range(2)]
    assert len(set(names)) == 3
    assert all(re.fullmatch(r"[1-9.]{81}", name) and name.count(".") == 4 for name in names)
    with pytest.raises(EnvError, match=r"tasks are 0\.\.2"):
        env.facts(3)


@pytest.mark.parametrize("size", [4, 9])
@pytest.mark.parametrize("action", ["move", "digit"])
@pytest.mark.parametrize("prompt", ["full", "short"])
@pytest.mark.parametrize("partial_credit", [True, False])
def test_every_variant_keeps_the_contract(size: int, action: str, prompt: str, partial_credit: bool) -> None:
    options = {"size": size, "action": action, "prompt": prompt, "partial_credit": partial_credit}
    check_env(lambda: make("sudoku", blanks=4, num_tasks=2, **options))


def test_the_right_moves_solve_the_puzzle_in_one_turn_each(env: Sudoku) -> None:
    env.reset(0)
    *first, last = [env.step(move) for move in moves(env, 0)]
    assert len(first) + 1 == env.facts(0).horizon
    assert not any(result.done or result.invalid or result.reward for result in first)
    assert last.terminated
    assert last.success
    assert last.reward == 1


def test_a_wrong_digit_is_accepted_cannot_be_undone_and_costs_the_reward(env: Sudoku) -> None:
    env.reset(0)
    (row, column, digit), *_ = blanks_and_digits(env, 0)
    wrong = digit % 9 + 1
    assert not env.step(f"set {row + 1} {column + 1} {wrong}").invalid
    again = env.step(moves(env, 0)[0])
    assert again.invalid
    assert again.observation
    assert "already filled" in again.observation.messages[0].content
    *_, last = [env.step(move) for move in moves(env, 0)[1:]]
    assert last.terminated
    assert not last.success
    assert last.reward == 0


def test_a_refused_answer_changes_nothing_says_why_and_costs_a_turn(env: Sudoku) -> None:
    def board(text: str) -> str:
        return text[text.index("Board") : text.index("Last feedback")]

    start = env.reset(0).messages[0].content
    given_cell = next(cell for cell, digit in enumerate(env._puzzles[0].givens) if digit)
    row, column = divmod(given_cell, 9)
    refused = {
        "I give up": "not understood",
        f"set {row + 1} {column + 1} 5": "is a given",
        "set 0 1 5": "numbers from 1 to 9",
        "set 1 10 5": "numbers from 1 to 9",
        "set 1 1 0": "numbers from 1 to 9",
    }
    for answer, reason in refused.items():
        result = env.step(answer)
        assert result.invalid
        assert result.observation
        text = result.observation.messages[0].content
        assert reason in text
        assert board(text) == board(start)
    for turn in range(len(refused), 12):
        result = env.step("")
        assert result.truncated == (turn == 11)
    assert not result.terminated
    assert result.reward == 0


def test_the_last_turn_may_still_solve_the_puzzle(env: Sudoku) -> None:
    env.reset(0)
    for _ in range(8):
        assert not env.step("?").done
    *_, last = [env.step(move) for move in moves(env, 0)]
    assert last.terminated
    assert not last.truncated
    assert last.success


def test_each_prompt_is_fresh_and_shows_only_board_empty_cells_and_last_feedback(env: Sudoku) -> None:
    start = env.reset(0).messages
    (row, column, digit), *rest = blanks_and_digits(env, 0)
    result = env.step(moves(env, 0)[0])
    assert result.observation
    (message,) = result.observation.messages
    assert len(start) == 1
    assert message.role == "user"
    assert f"Accepted: row {row + 1} column {column + 1} is now {digit}" in message.content
    empty = " ".join(f"({r + 1},{c + 1})" for r, c, _ in rest)
    assert f"Empty cells (row, column): {empty}\n" in message.content
    env.step("nonsense")
    result = env.step("more nonsense")
    assert result.observation
    assert "Accepted" not in result.observation.messages[0].content


@pytest.mark.parametrize("mode", ["move", "digit"])
def test_partial_credit_is_the_share_of_blanks_filled_correctly(mode: str) -> None:
    env = Sudoku(size=4, blanks=4, num_tasks=1, action=mode, partial_credit=True)  # type: ignore[arg-type]
    env.reset(0)
    for number, (row, column, digit) in enumerate(blanks_and_digits(env, 0)):
        played = digit if number < 3 else digit % 4 + 1
        result = env.step(str(played) if mode == "digit" else f"set {row + 1} {column + 1} {played}")
    assert result.terminated
    assert result.reward == 0.75
    assert not result.success


def test_partial_credit_counts_cells_filled_before_the_turns_ran_out() -> None:
    env = Sudoku(size=4, blanks=2, num_tasks=1, partial_credit=True)
    env.reset(0)
    env.step(moves(env, 0)[0])
    results = [env.step("?") for _ in range(5)]
    assert results[-1].truncated
    assert results[-1].reward == 0.5


def test_in_digit_mode_the_prompt_names_the_next_empty_cell_row_by_row() -> None:
    env = Sudoku(size=4, blanks=3, num_tasks=1, action="digit")
    observation: Observation | None = env.reset(0)
    for row, column, digit in blanks_and_digits(env, 0):
        assert observation
        assert observation.choices == ("1", "2", "3", "4")
        assert f"row {row + 1} column {column + 1}?" in observation.messages[0].content
        result = env.step(str(digit))
        observation = result.observation
    assert result.success


def test_a_short_prompt_that_names_the_cell_shows_the_digits_of_its_row_column_and_box() -> None:
    env = Sudoku(size=4, blanks=3, num_tasks=1, action="digit", prompt="short")
    text = env.reset(0).messages[0].content
    row, column, box = re.fullmatch(r"row (\d+) column (\d+) box (\d+) missing ", text).groups()  # type: ignore[union-attr]
    r, c, digit = blanks_and_digits(env, 0)[0]
    grid = env._puzzles[0].givens
    assert row == "".join(str(d) for d in grid[4 * r : 4 * r + 4] if d)
    assert column == "".join(str(d) for d in grid[c::4] if d)
    corner = r // 2 * 8 + c // 2 * 2
    assert box == "".join(str(grid[corner + offset]) for offset in (0, 1, 4, 5) if grid[corner + offset])
    assert str(digit) not in row + column + box


@pytest.mark.parametrize("action", ["move", "digit"])
def test_examples_lead_every_short_prompt_and_are_right(action: str) -> None:
    env = Sudoku(size=4, blanks=2, num_tasks=3, action=action, prompt="short", examples=3)  # type: ignore[arg-type]
    prompts = [env.reset(task).messages[0].content for task in range(3)]
    *examples, question = prompts[0].split("\n\n")
    assert len(examples) == 3
    assert all(prompt.startswith("\n\n".join(examples)) for prompt in prompts)
    assert question
    assert question not in examples
    refused = env.step("?").observation
    assert refused
    assert refused.messages[0].content.startswith("\n\n".join(examples) + "\n\nRefused: not understood")
    if action == "digit":
        for example in examples:
            *held, digit = re.findall(r"\d+", example)
            assert digit not in "".join(held)


def test_a_full_prompt_takes_no_examples() -> None:
    with pytest.raises(ConfigError, match="examples=2 needs a short prompt"):
        make("sudoku", examples=2)


@pytest.mark.parametrize(
    "answer",
    [
        "set 1 2 3",
        "SET 1 2 3",
        "  set 1, 2, 3.",
        "set(1,2,3)",
        "set [1][2] = 3",
        "set (1, 2) to 3",
        "set (1,2) -> 3",
        "set cell (1, 2) to 3",
        "set row 1 col 2 value 3",
        "set row=1 column=2 value=3",
        "Set Row 1, Column 2 to 3",
        "row 1 col 2 value 3",
        "Row: 1, Column: 2, Value: 3",
        "r1c2=3",
        "R1C2 = 3",
        '{"row": 1, "col": 2, "value": 3}',
        "```\nset 1 2 3\n```",
        "**set 1 2 3**",
        "`set 1 2 3`",
        "<answer>set 1 2 3</answer>",
        "set <1> <2> <3>",
        "I could set 4 4 4, but column 4 has a 4 already.\nset 1 2 3",
        "My move is set 1 2 3 because 3 is missing in row 1.",
        "set\n1\n2\n3",
    ],
)
def test_the_usual_variants_of_a_move_are_understood(answer: str) -> None:
    assert parse_move(answer) == (1, 2, 3)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "1 2 3",
        "set",
        "set 1 2",
        "set 123",
        "set 3 in row 1",
        "reset 1 2 3",
        "set -1 2 3",
        "set 1 2 1234",
        "set a b c",
    ],
)
def test_an_answer_without_a_move_is_not_guessed(answer: str) -> None:
    assert parse_move(answer) is None


@pytest.mark.parametrize(
    ("answer", "digit"),
    [("3", 3), (" 3\n", 3), ("The digit is 3.", 3), ("1 or 3", 3), ("(3)", 3), ("", None), ("31", None), ("r3", None)],
)
def test_a_digit_is_the_last_that_stands_alone(answer: str, digit: int | None) -> None:
    assert parse_digit(answer) == digit


@given(st.text())
def test_no_answer_raises(text: str) -> None:
    parse_digit(text)
    move = parse_move(text)
    assert move is None or all(0 <= number <= 999 for number in move)


@given(st.text(max_size=50), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_a_plain_move_on_the_last_line_is_found_after_any_prose(prose: str, row: int, column: int, digit: int) -> None:
    assert parse_move(f"{prose}.\nset {row} {column} {digit}") == (row, column, digit)


def test_a_file_gives_the_puzzles_of_its_split_with_the_wanted_blanks(shared_sudoku: Path) -> None:
    env = Sudoku(path=shared_sudoku / "{split}.jsonl", split="eval", blanks=10)
    assert env.num_tasks == 32
    assert all(len(puzzle.blanks) == 10 for puzzle in env._puzzles)
    assert re.fullmatch(r"eval-\d{6}", env.facts(0).id)
    env.reset(31)
    results = [env.step(move) for move in moves(env, 31)]
    assert results[-1].success
    assert Sudoku(path=shared_sudoku / "train.jsonl").num_tasks == 128
    with pytest.raises(ConfigError, match="no 9x9 puzzles of split eval"):
        Sudoku(path=shared_sudoku / "train.jsonl", split="eval")
    with pytest.raises(ConfigError, match=r"num_tasks=33: .* has 32"):
        Sudoku(path=shared_sudoku / "train.jsonl", blanks=5, num_tasks=33)


def test_a_file_that_cannot_be_used_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.jsonl: the puzzles cannot be read"):
        Sudoku(path=tmp_path / "missing.jsonl")
    good = [[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 1]]
    puzzle = [[0, 2, 3, 4], *good[1:]]
    wrong = [[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 1, 2]]
    lines = {
        "the solution breaks a rule": {"puzzle": puzzle, "solution": wrong},
        "the solution changes a given": {"puzzle": [[2, 0, 3, 4], *good[1:]], "solution": good},
        "the grid is not": {"puzzle": puzzle[:3], "solution": good[:3]},
        "KeyError": {"puzzle": puzzle},
        "TypeError": 7,
    }
    for complaint, line in lines.items():
        path = tmp_path / "puzzles.jsonl"
        path.write_text(json.dumps({"puzzle": puzzle, "solution": good}) + "\n\n" + json.dumps(line) + "\n")
        with pytest.raises(ConfigError, match=f"line 3: .*{complaint}"):
            Sudoku(path=path, size=4)
