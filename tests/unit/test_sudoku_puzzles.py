"""Generated puzzles: one solution each, the same every time, and no way from training to the held-out tasks."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpc_es.envs.sudoku_puzzles import MAX_BLANKS, generate, has_one_solution, is_solved, solutions, split_of
from hpc_es.errors import ConfigError

ROOT_GRID = (1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1)


@pytest.mark.parametrize(("size", "blanks"), [(4, 1), (4, 10), (9, 5), (9, 20), (9, 50)])
def test_a_generated_puzzle_has_the_wanted_blanks_and_one_solution(size: int, blanks: int) -> None:
    for puzzle in generate(size, blanks, "train", 0, 3):
        assert len(puzzle.blanks) == blanks
        assert is_solved(puzzle.solution, size)
        assert list(solutions(puzzle.givens, size)) == [puzzle.solution]


def test_no_solved_grid_is_in_both_splits_whatever_the_seeds() -> None:
    held_out = {puzzle.solution for seed in range(3) for puzzle in generate(4, 3, "eval", seed, 300)}
    trained = {puzzle.solution for seed in range(3) for puzzle in generate(4, 3, "train", seed, 900)}
    assert not held_out & trained
    assert len(held_out | trained) == 288  # all the 4x4 grids there are


def test_the_puzzles_of_a_split_differ_from_one_another() -> None:
    puzzles = generate(4, 2, "eval", 0, 400)
    assert len({puzzle.givens for puzzle in puzzles}) == 400


def test_a_longer_list_begins_with_the_shorter_one() -> None:
    assert generate(4, 3, "train", 5, 20)[:7] == generate(4, 3, "train", 5, 7)
    assert generate(4, 3, "train", 5, 7) != generate(4, 3, "train", 6, 7)


def test_the_generator_draws_the_same_puzzles_on_every_machine() -> None:
    """A change here changes what a recorded run was trained on."""
    assert "".join(map(str, generate(4, 3, "train", 0, 1)[0].givens)) == "4010134224313120"
    assert (
        "".join(map(str, generate(9, 5, "eval", 0, 1)[0].givens))
        == "495782016372614985806095724607143859139258467584967231201879543948531672753426198"
    )


def test_asking_for_more_puzzles_than_there_are_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"num_tasks=5000: the eval split has only about 1[01][0-9][0-9] 4x4 puzzles with 1 blanks"
    ):
        generate(4, 1, "eval", 0, 5000)


def test_digging_reaches_the_most_blanks_allowed() -> None:
    for size, blanks in MAX_BLANKS.items():
        assert len(generate(size, blanks, "eval", 1, 2)) == 2


def test_the_solver_counts_solutions() -> None:
    assert len(list(solutions((0,) * 16, 4))) == 288
    assert not has_one_solution((0,) * 16, 4)
    assert not has_one_solution((1, 1) + (0,) * 14, 4)
    assert has_one_solution((0, *ROOT_GRID[1:]), 4)
    assert set(solutions((0,) * 16, 4, random.Random(0))) == set(solutions((0,) * 16, 4))


def test_a_grid_that_repeats_a_digit_is_not_solved() -> None:
    assert is_solved(ROOT_GRID, 4)
    assert not is_solved((2, *ROOT_GRID[1:]), 4)
    rows_and_columns_only = (1, 2, 3, 4, 2, 3, 4, 1, 3, 4, 1, 2, 4, 1, 2, 3)
    assert not is_solved(rows_and_columns_only, 4)


def test_about_a_quarter_of_the_grids_is_held_out() -> None:
    held_out = sum(split_of(grid) == "eval" for grid in solutions((0,) * 16, 4))
    assert 50 <= held_out <= 94


def test_many_threads_that_want_the_same_puzzles_draw_them_once() -> None:
    with ThreadPoolExecutor(8) as pool:
        sets = list(pool.map(lambda _: generate(4, 5, "train", 12345, 100), range(8)))
    assert all(puzzles is sets[0] for puzzles in sets)
