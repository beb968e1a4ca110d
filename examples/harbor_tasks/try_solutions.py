"""Tries task folders before a run: each solution has to earn 1, and doing nothing 0.

python examples/harbor_tasks/try_solutions.py FOLDER [--no-sandbox]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from trireme.ext.harbor.task_box import total
from trireme.ext.harbor.workflow import HarborSettings, reward_of_task


async def tried(root: Path, settings: HarborSettings) -> list[tuple[str, float, float]]:
    """Each task with what its solution earns, and what doing nothing does."""
    rows = []
    for toml in sorted(root.glob("*/task.toml")):
        solved = await reward_of_task(toml.parent, solve=True, settings=settings)
        nothing = await reward_of_task(toml.parent, solve=False, settings=settings)
        rows.append((toml.parent.name, total(solved), total(nothing)))
    return rows


def main() -> None:
    """A line a task; exit code 1 where one is not as it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    named = "workflow_args.no_sandbox: true of a run"
    parser.add_argument("--no-sandbox", action="store_true", help=named)
    given = parser.parse_args()
    try:
        rows = asyncio.run(tried(given.folder, HarborSettings(no_sandbox=given.no_sandbox)))
    except ValueError as error:
        sys.exit(str(error))
    for name, solved, nothing in rows:
        print(f"{name}: solution {solved:g}, nothing {nothing:g}")
    sys.exit(not rows or any(abs(s - 1) > 1e-9 or n for _, s, n in rows))


if __name__ == "__main__":
    main()
