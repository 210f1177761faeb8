"""Sudoku for agents: one cell per turn, a new prompt every turn, no undo.

Protocol of Agentic ESOpt (9x9, `blanks` empty cells = the minimum successful horizon H*, at most 3 * blanks turns):
the prompt shows rules, current board, empty cells and the last feedback, but no history. An answer in an unknown format
or for a given or filled cell is refused with feedback and costs a turn. Any digit in an empty cell is accepted, even if
it breaks a rule, and cannot be undone. Reward is 1 if the final grid is valid and keeps the givens.

Invariant: givens and filled cells never change within an episode.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from math import isqrt
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, validate_call

from hpc_es.data import data_path
from hpc_es.envs import sudoku_puzzles as puzzles
from hpc_es.envs.base import Env, Message, Observation, StepResult, TaskFacts
from hpc_es.envs.sudoku_puzzles import MAX_BLANKS, Puzzle, Split
from hpc_es.errors import ConfigError, EnvError

TURNS_PER_BLANK = 3
DEFAULT_BLANKS = {4: 3, 9: 5}
"""Default number of empty cells by size."""
EXAMPLES_SEED = 99


class Sudoku(Env):
    instant = True

    @validate_call
    def __init__(
        self,
        *,
        size: Literal[4, 9] = 9,
        blanks: Annotated[int, Field(ge=1)] | None = None,
        split: Split = "train",
        num_tasks: Annotated[int, Field(ge=1)] | None = None,
        seed: Annotated[int, Field(ge=0)] = 0,
        path: Path | None = None,
        action: Literal["move", "digit"] = "move",
        prompt: Literal["full", "short"] = "full",
        examples: Annotated[int, Field(ge=0, le=16)] = 0,
        partial_credit: bool = False,
    ) -> None:
        """Puzzles come from the generator, or from `path`.

        size: side of the grid, 4 or 9.
        blanks: empty cells per puzzle, H*; default 5 (9x9) or 3 (4x4), or with `path` all puzzles of the file.
        num_tasks: number of puzzles; default 256, or with `path` all that match.
        seed: seed of the generator.
        path: JSON-lines file with `puzzle` and `solution`; `{split}` in the path stands for the split.
        action: with `move` an answer is `set <row> <col> <value>`. With `digit` the prompt names the next empty cell,
            row by row, and the answer is its digit, one of `choices`: a single token, for small models.
        prompt: `short` is for small models. It shows the board and the empty cells without the rules, or with
            action=digit the digits that the cell's row, column and box already hold.
        examples: number of solved examples (other puzzles, the same in every prompt) before a short prompt.
        partial_credit: whether the reward is the share of blanks that are filled correctly, instead of 1 or 0.
        """
        self._action = action
        self._prompt = prompt
        if examples and prompt == "full":
            raise ConfigError(f"option examples={examples} needs a short prompt; set prompt: short")
        self._examples = _examples(size, examples, action)
        self._partial_credit = partial_credit
        if path is None:
            self._puzzles = _generated(size, blanks, split, seed, num_tasks or 256)
        else:
            self._puzzles = _from_file(path, size, blanks, split, num_tasks)
        self.num_tasks = len(self._puzzles)
        self._running = False

    def reset(self, task: int) -> Observation:
        if not 0 <= task < self.num_tasks:
            raise EnvError(f"task {task} does not exist; tasks are 0..{self.num_tasks - 1}")
        self._puzzle: Puzzle = self._puzzles[task]
        self._grid = list(self._puzzle.givens)
        self._turns_left = TURNS_PER_BLANK * len(self._puzzle.blanks)
        self._feedback = ""
        self._running = True
        return self._observe()

    def step(self, text: str) -> StepResult:
        if not self._running:
            raise EnvError("no episode is running; call reset first")
        refusal = self._play(text)
        self._turns_left -= 1
        terminated = 0 not in self._grid
        truncated = not terminated and self._turns_left == 0
        if not (terminated or truncated):
            return StepResult(self._observe(), 0.0, False, False, invalid=refusal)
        self._running = False
        solved = puzzles.is_solved(tuple(self._grid), self._puzzle.size)
        reward = self._share_correct() if self._partial_credit else float(solved)
        return StepResult(None, reward, terminated, truncated, success=solved, invalid=refusal)

    def facts(self, task: int) -> TaskFacts:
        """The puzzle's name in its file, or its givens row by row; H* is the number of blanks."""
        super().facts(task)
        puzzle = self._puzzles[task]
        givens = "".join(str(digit or ".") for digit in puzzle.givens)
        return TaskFacts(puzzle.name or givens, horizon=len(puzzle.blanks))

    def _play(self, text: str) -> bool:
        """Play the move in the answer and store the feedback; return True if it is refused."""
        size = self._puzzle.size
        move = self._read(text)
        if move is None:
            self._feedback = f"Refused: not understood. Answer with {self._format()}."
            return True
        row, column, digit = move
        if not all(1 <= number <= size for number in move):
            self._feedback = f"Refused: row, column and value are numbers from 1 to {size}."
            return True
        cell = (row - 1) * size + column - 1
        if self._grid[cell]:
            kind = "a given" if self._puzzle.givens[cell] else "already filled"
            self._feedback = f"Refused: row {row} column {column} is {kind} and cannot be changed."
            return True
        self._grid[cell] = digit
        self._feedback = f"Accepted: row {row} column {column} is now {digit}."
        return False

    def _read(self, text: str) -> tuple[int, int, int] | None:
        if self._action == "move":
            return parse_move(text)
        digit = parse_digit(text)
        return None if digit is None else (*_row_column(self._grid.index(0), self._puzzle.size), digit)

    def _format(self) -> str:
        return "set <row> <col> <value>" if self._action == "move" else f"one digit from 1 to {self._puzzle.size}"

    def _share_correct(self) -> float:
        blanks = self._puzzle.blanks
        return sum(self._grid[cell] == self._puzzle.solution[cell] for cell in blanks) / len(blanks)

    def _observe(self) -> Observation:
        if self._prompt == "full":
            text = _full_prompt(self._grid, self._puzzle.size, self._action, self._feedback)
        else:
            refused = f"{self._feedback}\n" if self._feedback.startswith("Refused") else ""
            text = f"{self._examples}{refused}{_short_prompt(self._grid, self._puzzle.size, self._action)}"
        choices = tuple(str(d) for d in range(1, self._puzzle.size + 1)) if self._action == "digit" else None
        return Observation((Message("user", text),), choices)


def _generated(size: int, blanks: int | None, split: Split, seed: int, count: int) -> tuple[Puzzle, ...]:
    blanks = blanks if blanks is not None else DEFAULT_BLANKS[size]
    if blanks > MAX_BLANKS[size]:
        raise ConfigError(f"option blanks={blanks}: generated {size}x{size} puzzles have at most {MAX_BLANKS[size]}")
    return puzzles.generate(size, blanks, split, seed, count)


def _from_file(path: Path, size: int, blanks: int | None, split: Split, count: int | None) -> tuple[Puzzle, ...]:
    path = data_path(Path(str(path).replace("{split}", split)))
    found = tuple(puzzle for puzzle in puzzles.read(path, blanks, split) if puzzle.size == size)
    wanted = f"{size}x{size} puzzles" + (f" with {blanks} blanks" if blanks is not None else "")
    if not found:
        raise ConfigError(f"option path={path}: the file has no {wanted} of split {split}")
    if count is not None and count > len(found):
        raise ConfigError(f"option num_tasks={count}: {path} has {len(found)} {wanted} of split {split}")
    return found[:count]


_SEPARATOR = r"[\s,;:=()\[\]{}<>*`_'\"|]"
_NUMBER = r"(\d{1,3})(?!\d)"
_BEFORE = rf"(?:{_SEPARATOR}|cell|position|at|the|row|col(?:umn)?)*"
_BETWEEN = rf"(?:{_SEPARATOR}|row|col(?:umn)?|value|val|digit|to|as|and|->|→)+"
_PLAIN = rf"\bset\b{_BEFORE}{_NUMBER}{_BETWEEN}{_NUMBER}{_BETWEEN}{_NUMBER}"
_LABELLED = (
    rf"\br(?:ow)?{_SEPARATOR}*{_NUMBER}{_SEPARATOR}*(?:and{_SEPARATOR}+)?"
    rf"c(?:ol(?:umn)?)?{_SEPARATOR}*{_NUMBER}{_SEPARATOR}*"
    rf"(?:(?:v(?:al(?:ue)?)?|digit|to|as|is|and|->|→){_SEPARATOR}*)*{_NUMBER}"
)
_MOVE = re.compile(rf"{_PLAIN}|{_LABELLED}", re.ASCII | re.IGNORECASE)
_LONE_DIGIT = re.compile(r"(?<!\w)\d(?!\w)", re.ASCII)


def parse_move(text: str) -> tuple[int, int, int] | None:
    """Row, column and value of the last move in an answer, even if out of range; None if there is no move.

    The last move counts, because models that reason end with their choice. Case and surrounding text do not matter:
    `set 1 2 3`, `SET(1, 2, 3)`, `set row 1 col 2 value 3`, `set (1,2) = 3`, `r1c2=3`,
    `{"row": 1, "col": 2, "value": 3}`.
    """
    found = list(_MOVE.finditer(text))
    if not found:
        return None
    row, column, digit = (int(number) for number in found[-1].groups() if number is not None)
    return row, column, digit


def parse_digit(text: str) -> int | None:
    """The last digit in an answer that is not part of a longer number or word."""
    found = _LONE_DIGIT.findall(text)
    return int(found[-1]) if found else None


def _row_column(cell: int, size: int) -> tuple[int, int]:
    return cell // size + 1, cell % size + 1


def _full_prompt(grid: Sequence[int], size: int, action: str, feedback: str) -> str:
    side = isqrt(size)
    rows = "\n".join(
        f"row {r + 1}: " + " ".join(str(d or ".") for d in grid[r * size : (r + 1) * size]) for r in range(size)
    )
    empty = [_row_column(cell, size) for cell, digit in enumerate(grid) if not digit]
    if action == "move":
        answer = (
            "Make one move. Answer with one line and nothing else:\nset <row> <col> <value>\n"
            "Rows and columns are numbered from 1."
        )
    else:
        row, column = empty[0]
        answer = f"Which digit goes into row {row} column {column}? Answer with one digit and nothing else."
    return (
        f"You are solving a {size}x{size} Sudoku, one cell a turn. Every row, every column and every {side}x{side} box "
        f"must hold each digit from 1 to {size} exactly once. Givens and cells that you have filled cannot be changed: "
        "there is no undo.\n\n"
        f"Board (. is empty):\n{rows}\n\n"
        f"Empty cells (row, column): {' '.join(f'({r},{c})' for r, c in empty)}\n"
        f"Last feedback: {feedback or 'none, this is the first move.'}\n\n"
        f"{answer}"
    )


def _short_prompt(grid: Sequence[int], size: int, action: str) -> str:
    cell = grid.index(0)
    if action == "digit":
        held = ("".join(str(grid[c]) for c in unit if grid[c]) for unit in puzzles.units(size) if cell in unit)
        return "row {} column {} box {} missing ".format(*held)
    rows = "\n".join("".join(str(d or ".") for d in grid[r * size : (r + 1) * size]) for r in range(size))
    empty = (_row_column(c, size) for c, digit in enumerate(grid) if not digit)
    return f"Sudoku\n{rows}\nempty {' '.join(f'({r},{c})' for r, c in empty)}\nmove "


@lru_cache
def _examples(size: int, count: int, action: str) -> str:
    """Examples for a short prompt: puzzles of the training split with the digit of their first empty cell."""
    text = ""
    for puzzle in puzzles.generate(size, DEFAULT_BLANKS[size], "train", EXAMPLES_SEED, count):
        cell = puzzle.blanks[0]
        row, column = _row_column(cell, size)
        digit = puzzle.solution[cell]
        answer = f"{digit}" if action == "digit" else f"set {row} {column} {digit}"
        text += f"{_short_prompt(puzzle.givens, size, action)}{answer}\n\n"
    return text
