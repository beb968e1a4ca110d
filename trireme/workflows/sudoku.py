"""Sudoku workflow: episodes in which a puzzle is filled in, one move a turn.

`workflow_args`: size (4 or 9), empty (cells), per_step. The prompt column is the puzzle's number.
"""

from __future__ import annotations

from trireme.envs.sudoku import Sudoku, make_puzzle
from trireme.workflows.gym import GymWorkflow


class SudokuWorkflow(GymWorkflow):
    """The action is what stands in <action>, or else the whole reply."""

    def make_env(self) -> Sudoku:
        """The puzzle of the task's number."""
        options = {k: int(v) for k, v in self.workflow_args.items() if k in ("size", "empty")}
        return Sudoku(make_puzzle(int(self.task_desc), **options))
