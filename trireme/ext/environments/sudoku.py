"""Sudoku: a puzzle with one solution, filled in a cell at a time.

The same number, size and count of empty cells are always the same puzzle. A digit that is already
in the row, the column or the block is refused, so a full grid is a solved one.
"""

from __future__ import annotations

import random
import re
from functools import lru_cache
from math import isqrt
from typing import Any

_MOVE = re.compile(r"r(\d+)\s*c(\d+)\s*=\s*(\d+)", re.IGNORECASE)
Grid = tuple[int, ...]
"""Row by row; 0 is an empty cell."""


@lru_cache(maxsize=4096)
def make_puzzle(number: int, *, size: int = 4, empty: int = 6) -> Grid:
    """Make the puzzle of a number: `empty` cells are empty, or as many as leave it one solution.

    Raises ValueError for a size that is not 4 or 9.
    """
    if size not in (4, 9):
        raise ValueError(f"a Sudoku of size {size}: expected 4 or 9")
    source = random.Random(f"sudoku {size} {number}")
    grid = list(_full(size, source))
    cells = list(range(size * size))
    source.shuffle(cells)
    for cell in cells:
        if grid.count(0) == empty:
            break
        digit, grid[cell] = grid[cell], 0
        if len(solutions(tuple(grid))) > 1:
            grid[cell] = digit
    return tuple(grid)


def solutions(grid: Grid, limit: int = 2) -> list[Grid]:
    """Return the ways to fill the grid, at most `limit`."""
    empty = [cell for cell, digit in enumerate(grid) if not digit]
    if not empty:
        return [grid]
    # the cell with the fewest digits left: errors show soon
    cell, left = min(((c, allowed(grid, c)) for c in empty), key=lambda pair: len(pair[1]))
    grids: list[Grid] = []
    for digit in left:
        if len(grids) < limit:
            grids += solutions((*grid[:cell], digit, *grid[cell + 1 :]), limit - len(grids))
    return grids


def allowed(grid: Grid, cell: int) -> list[int]:
    """Return the digits that are neither in the cell's row nor in its column or block."""
    taken = {grid[other] for other in _seen_from(cell, isqrt(len(grid)))}
    return [digit for digit in range(1, isqrt(len(grid)) + 1) if digit not in taken]


class Sudoku:
    """One episode with one puzzle."""

    def __init__(self, puzzle: Grid) -> None:
        self.puzzle = self.grid = puzzle
        self.size = isqrt(len(puzzle))

    def reset(self) -> tuple[str, dict[str, Any]]:
        """Return the rules, and the puzzle."""
        self.grid = self.puzzle
        side = isqrt(self.size)
        rules = (
            f"Sudoku: fill the empty cells so that every row, every column and every block of "
            f"{side} by {side} holds each of the digits 1 to {self.size}. One move at a time: "
            "r1c2=3 writes 3 in row 1, column 2, and r1c2=0 empties it."
        )
        return f"{rules}\n{self.text}", {"env_state_hash": self.text}

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Make the last move in the text. The reward is 1 when the puzzle is solved.

        An impossible move changes nothing and gives the reason; `info["valid"]` is False then.
        """
        wrong = self._move(action)
        solved = 0 not in self.grid
        seen = f"{wrong}\n{self.text}" if wrong else self.text
        return seen, float(solved), solved, {"valid": not wrong, "env_state_hash": self.text}

    @property
    def text(self) -> str:
        """Return one line per row: its name, and its cells with a dot for an empty one."""
        rows = (self.grid[i : i + self.size] for i in range(0, len(self.grid), self.size))
        return "\n".join(
            f"r{i} {' '.join(str(d or '.') for d in row)}" for i, row in enumerate(rows, 1)
        )

    def _move(self, action: str) -> str | None:
        """Make the move; returns the reason if it is impossible."""
        moves = _MOVE.findall(action)
        if not moves:
            return "Say a move, r1c2=3 for example."
        row, column, digit = map(int, moves[-1])
        name = f"r{row}c{column}"
        if not (1 <= row <= self.size and 1 <= column <= self.size and digit <= self.size):
            return f"{name}={digit} is not possible: all numbers go from 1 to {self.size}."
        cell = (row - 1) * self.size + column - 1
        if self.puzzle[cell]:
            return f"{name} is given: it stays {self.puzzle[cell]}."
        if digit and digit not in allowed(self.grid, cell):
            return f"{name}={digit} is not possible: its row, column or block has a {digit}."
        self.grid = (*self.grid[:cell], digit, *self.grid[cell + 1 :])
        return None


def _full(size: int, source: random.Random) -> Grid:
    """Make a solved grid: a regular one with permuted digits, lines and bands."""
    side = isqrt(size)
    digits = source.sample(range(1, size + 1), size)

    def lines() -> list[int]:
        bands = source.sample(range(side), side)
        return [band * side + line for band in bands for line in source.sample(range(side), side)]

    rows, columns = lines(), lines()
    return tuple(digits[(r % side * side + r // side + c) % size] for r in rows for c in columns)


@lru_cache(maxsize=128)
def _seen_from(cell: int, size: int) -> tuple[int, ...]:
    """Return the other cells of the cell's row, column and block."""
    side, (row, column) = isqrt(size), divmod(cell, size)
    return tuple(
        other
        for other in range(size * size)
        if other != cell
        and (
            other // size == row
            or other % size == column
            or (other // size // side, other % size // side) == (row // side, column // side)
        )
    )
