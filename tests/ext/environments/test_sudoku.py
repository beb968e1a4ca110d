"""Sudoku: every puzzle has one solution, and what is not possible is said."""

from __future__ import annotations

import asyncio

import pytest

from tests.model.fake import make
from trireme.ext.environments.sudoku import Sudoku, make_puzzle, solutions
from trireme.task import Task
from trireme.workflows.workflow import resolve

GIVEN = (0, 3, 1, 4, 1, 4, 0, 0, 4, 0, 3, 1, 3, 0, 4, 0)
WAY = ["r1c1=2", "r2c3=2", "r2c4=3", "r3c2=2", "r4c2=1", "r4c4=2"]


@pytest.mark.parametrize(("size", "empty"), [(4, 6), (4, 10), (9, 40)])
def test_a_puzzle_has_one_solution_and_it_keeps_the_rules(size: int, empty: int) -> None:
    for number in range(3):
        puzzle = make_puzzle(number, size=size, empty=empty)
        (full,) = solutions(puzzle)
        assert puzzle.count(0) == empty
        assert all(given in (0, digit) for given, digit in zip(puzzle, full, strict=True))
        side, every = int(size**0.5), set(range(1, size + 1))
        for i in range(size):
            block = [
                full[(i // side * side + r) * size + i % side * side + c]
                for r in range(side)
                for c in range(side)
            ]
            assert set(full[i * size : (i + 1) * size]) == set(full[i::size]) == set(block) == every


def test_two_solutions_are_found_where_there_are_two() -> None:
    full = (1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1)
    open_cells = {0, 1, 8, 9}  # 1 2 over 2 1, in two blocks: they may be swapped
    grid = tuple(0 if cell in open_cells else digit for cell, digit in enumerate(full))
    assert len(solutions(grid)) == 2 and len(solutions(grid, limit=1)) == 1


def test_a_number_is_a_puzzle() -> None:
    assert make_puzzle.__wrapped__(7) == make_puzzle.__wrapped__(7) != make_puzzle(8)
    with pytest.raises(ValueError, match="a Sudoku of size 6: expected 4 or 9"):
        make_puzzle(1, size=6)


def test_a_puzzle_is_solved_move_by_move() -> None:
    env = Sudoku(GIVEN)
    rules, _ = env.reset()
    assert rules.endswith("r1 . 3 1 4\nr2 1 4 . .\nr3 4 . 3 1\nr4 3 . 4 .")
    seen = [env.step(move) for move in WAY]
    assert [reward for _, reward, _, _ in seen] == [0, 0, 0, 0, 0, 1]
    assert seen[-1][2] and not seen[-2][2]
    assert env.reset()[0] == rules


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("two in the corner", "Say a move, r1c2=3 for example."),
        ("r1c5=2", "r1c5=2 is not possible: all numbers go from 1 to 4."),
        ("r0c1=2", "r0c1=2 is not possible: all numbers go from 1 to 4."),
        ("r1c2=1", "r1c2 is given: it stays 3."),
        ("r1c1=4", "r1c1=4 is not possible: its row, column or block has a 4."),
    ],
)
def test_what_is_not_possible_changes_nothing_and_says_why(action: str, said: str) -> None:
    env = Sudoku(GIVEN)
    before = env.text
    seen, reward, done, info = env.step(action)
    assert seen == f"{said}\n{before}"
    assert (reward, done, info["valid"]) == (0, False, False)


def test_a_cell_of_ones_own_can_be_changed_and_emptied() -> None:
    env = Sudoku((0,) * 16)
    for action, digit in [("R1 C2 = 3", 3), ("r1c2=4", 4), ("no r1c1=1 but r1c2=0", 0)]:
        assert env.step(action)[3]["valid"] and env.grid[1] == digit


def test_the_workflow_plays_the_puzzle_of_the_tasks_number() -> None:
    puzzle = make_puzzle(3, size=4, empty=2)
    (full,) = solutions(puzzle)
    moves = [
        f"<action>r{c // 4 + 1}c{c % 4 + 1}={full[c]}</action>" for c in range(16) if not puzzle[c]
    ]

    async def main() -> list:
        task = Task({"prompt": 3}, workflow_args={"size": 4, "empty": 2})
        return await resolve("sudoku_workflow").call(task, make(moves), 1, 0)

    (e,) = asyncio.run(main())
    assert e.reward == 1.0 and e.metrics["actual_env_steps"] == 2
