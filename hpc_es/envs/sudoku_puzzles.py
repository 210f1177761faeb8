"""Solve, generate and read Sudoku puzzles.

Invariant: a generated puzzle has exactly one solution, and its solved grid alone decides which split it belongs to:
whatever the seeds, no solved grid of a held-out task ever appears in training.

A grid is a flat tuple of size * size digits, row by row; 0 is empty.
"""

import hashlib
import json
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import isqrt
from pathlib import Path
from typing import Literal

from hpc_es.errors import ConfigError

Grid = tuple[int, ...]
Split = Literal["train", "eval"]

SIZES = (4, 9)
MAX_BLANKS = {4: 10, 9: 50}
"""Most empty cells by size: as many as the generator reaches quickly from almost any solved grid."""
EVAL_SHARE = 4
"""One solved grid in EVAL_SHARE is held out."""
MAX_REPEATS = 1000
"""After this many known puzzles in a row, the split is taken to have no more."""

_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Puzzle:
    size: int
    givens: Grid
    solution: Grid
    name: str = field(default="", compare=False)
    """Name of the puzzle in its file."""

    @property
    def blanks(self) -> tuple[int, ...]:
        """The empty cells, row by row."""
        return tuple(cell for cell, digit in enumerate(self.givens) if not digit)


@lru_cache
def units(size: int) -> tuple[tuple[int, ...], ...]:
    """The cells of every row, then of every column, then of every box."""
    side = isqrt(size)
    rows = [tuple(range(r * size, (r + 1) * size)) for r in range(size)]
    columns = [tuple(range(c, size * size, size)) for c in range(size)]
    corners = [r * size + c for r in range(0, size, side) for c in range(0, size, side)]
    boxes = [tuple(corner + r * size + c for r in range(side) for c in range(side)) for corner in corners]
    return (*rows, *columns, *boxes)


@lru_cache
def _units_of_cells(size: int) -> tuple[tuple[int, ...], ...]:
    """For each cell, the indices of its row, column and box among the units."""
    return tuple(tuple(k for k, unit in enumerate(units(size)) if cell in unit) for cell in range(size * size))


@lru_cache
def _other_digits(size: int) -> tuple[tuple[int, ...], ...]:
    """For each set of digits, given as the bits of an index, the digits that are not in it."""
    return tuple(tuple(d for d in range(1, size + 1) if not taken >> d & 1) for taken in range(2 << size))


def is_solved(grid: Grid, size: int) -> bool:
    """Whether every row, column and box holds every digit once."""
    digits = set(range(1, size + 1))
    return all({grid[cell] for cell in unit} == digits for unit in units(size))


def solutions(grid: Grid, size: int, rng: random.Random | None = None) -> Iterator[Grid]:
    """Iterate over all solutions, in random order if `rng` is given."""
    cells, homes, left = list(grid), _units_of_cells(size), _other_digits(size)
    taken = [sum({1 << grid[cell] for cell in unit if grid[cell]}) for unit in units(size)]

    def options(cell: int) -> tuple[int, ...]:
        row, column, box = homes[cell]
        return left[taken[row] | taken[column] | taken[box]]

    def put(cell: int, digit: int) -> None:
        """Put a digit into a cell, or remove it if it is there."""
        for unit in homes[cell]:
            taken[unit] ^= 1 << digit

    def fill() -> Iterator[Grid]:
        empty = [cell for cell, digit in enumerate(cells) if not digit]
        if not empty:
            yield tuple(cells)
            return
        choices = list(map(options, empty))
        digits = min(choices, key=len)  # fewest options first, so that the search rarely backtracks
        cell = empty[choices.index(digits)]
        for digit in shuffled(digits, rng) if rng else digits:
            cells[cell] = digit
            put(cell, digit)
            yield from fill()
            put(cell, digit)
        cells[cell] = 0

    return fill()


def has_one_solution(grid: Grid, size: int) -> bool:
    found = solutions(grid, size)
    return next(found, None) is not None and next(found, None) is None


def shuffled(items: Sequence[int], rng: random.Random) -> list[int]:
    """A Fisher-Yates shuffle that uses only `random()`, whose values Python keeps the same between versions."""
    order = list(items)
    for last in range(len(order) - 1, 0, -1):
        other = int(rng.random() * (last + 1))
        order[last], order[other] = order[other], order[last]
    return order


def split_of(solution: Grid) -> Split:
    """The split that a solved grid belongs to."""
    digest = hashlib.blake2b(bytes(solution), digest_size=8).digest()
    return "eval" if int.from_bytes(digest, "little") % EVAL_SHARE == 0 else "train"


def generate(size: int, blanks: int, split: Split, seed: int, count: int) -> tuple[Puzzle, ...]:
    """Generate `count` different puzzles of a split; the first k are the same for every count.

    Errors: ConfigError when the split has fewer.
    """
    with _one_at_a_time:  # many threads create environments at once: one generates, the others use its puzzles
        return _generate(size, blanks, split, seed, count)


@lru_cache(maxsize=16)
def _generate(size: int, blanks: int, split: Split, seed: int, count: int) -> tuple[Puzzle, ...]:
    rng = random.Random(f"sudoku {size} {blanks} {split} {seed}")
    seen: dict[Grid, Puzzle] = {}
    repeats = 0
    while len(seen) < count:
        puzzle = _draw(size, blanks, split, rng)
        repeats = repeats + 1 if puzzle.givens in seen else 0
        seen.setdefault(puzzle.givens, puzzle)
        if repeats > MAX_REPEATS:
            raise ConfigError(
                f"num_tasks={count}: the {split} split has only about {len(seen)} {size}x{size} puzzles with {blanks} "
                "blanks; use fewer tasks or more blanks"
            )
    return tuple(seen.values())


def _draw(size: int, blanks: int, split: Split, rng: random.Random) -> Puzzle:
    while True:
        solution = next(solutions((0,) * size**2, size, rng))
        if split_of(solution) == split:
            givens = _dig(solution, size, blanks, rng)
            if givens is not None:
                return Puzzle(size, givens, solution)


def _dig(solution: Grid, size: int, blanks: int, rng: random.Random) -> Grid | None:
    """Empty `blanks` cells and keep the solution unique; None if this order of cells does not allow it."""
    grid = solution
    for cell in shuffled(list(range(size * size)), rng):
        if grid.count(0) == blanks:
            break
        emptied = (*grid[:cell], 0, *grid[cell + 1 :])
        if has_one_solution(emptied, size):
            grid = emptied
    return grid if grid.count(0) == blanks else None


@lru_cache(maxsize=16)
def read(path: Path, blanks: int | None, split: Split) -> tuple[Puzzle, ...]:
    """Read puzzles from a JSON-lines file with `puzzle` and `solution` as rows of digits, 0 for empty, in file order.

    Only puzzles with `blanks` empty cells (None: all) are kept, and where a line has a `split`, only those of `split`.
    Errors: ConfigError naming file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"path={path}: the puzzles cannot be read ({error})") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            puzzle = replace(_from_rows(record["puzzle"], record["solution"]), name=str(record.get("id", "")))
            kept = record.get("split", split) == split and blanks in (None, len(puzzle.blanks))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{path}, line {number}: {error!r}; each line must be an object with `puzzle` and `solution`, rows of "
                "digits with 0 for empty, and the solution must be correct and keep the givens"
            ) from error
        if kept:
            found.append(puzzle)
    return tuple(found)


def _from_rows(puzzle: list[list[int]], solution: list[list[int]]) -> Puzzle:
    size = len(puzzle)
    givens = tuple(int(digit) for row in puzzle for digit in row)
    solved = tuple(int(digit) for row in solution for digit in row)
    if size not in SIZES or len(givens) != size**2 or len(solved) != size**2:
        raise ValueError(f"the grid is not {' or '.join(f'{s}x{s}' for s in SIZES)}")
    if not is_solved(solved, size):
        raise ValueError("the solution breaks a rule")
    if any(given not in (0, digit) for given, digit in zip(givens, solved, strict=True)):
        raise ValueError("the solution changes a given")
    return Puzzle(size, givens, solved)
