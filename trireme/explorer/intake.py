"""Intake: puts the experiences of external agents into the buffer (`mode: serve`).

Invariants:
- A commit is an explore step with a number of its own, also after a restart. `ship` returns when
  the buffer has its experiences.
- What could not be put stays here under the same ids, and goes first with the next commit.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Sequence

from trireme.buffer.buffer import Buffer, Closed
from trireme.checkpoint.layout import JobFolder
from trireme.experience import Experience, group_by
from trireme.explorer.metrics import run_metrics
from trireme.files import write_json
from trireme.pipeline.pipeline import Pipeline
from trireme.sync.synchronizer import ExplorerSync

Report = Callable[[str, int, dict[str, float]], None]


class Intake:
    """Commit ▸ Pipeline.run ▸ Buffer.put."""

    def __init__(
        self,
        *,
        pipeline: Pipeline,
        buffer: Buffer,
        sync: ExplorerSync,
        folder: JobFolder,
        report: Report,
        dropped: Callable[[], int] = lambda: 0,
    ) -> None:
        """`report(part, step, metrics)` hears of each commit; `dropped()`: sessions lost so far."""
        self.pipeline = pipeline
        self.buffer = buffer
        self.sync = sync
        self.folder = folder
        self.report = report
        self.dropped = dropped
        self.step = 0
        if folder.explorer_meta.exists():
            self.step = json.loads(folder.explorer_meta.read_text())["latest_iteration"]
        self._sealed: deque[tuple[int, list[Experience], dict[str, float]]] = deque()
        self._one = asyncio.Lock()

    async def ship(self, experiences: Sequence[Experience]) -> None:
        """Whole groups -> the buffer. Without any: until the buffer has what came before.

        Raises RuntimeError where the trainer has ended, and what `Buffer.put` raises.
        """
        if experiences:
            self.step += 1
            step = self.step
            # before the put: a number that is used twice would hide the second commit's groups
            write_json(self.folder.explorer_meta, {"latest_iteration": step, "taskset_states": []})
            for experience in experiences:
                experience.eid.batch = step
            kept, metrics = await self.pipeline.run(experiences)
            metrics |= run_metrics(experiences) | {
                "rollout/tasks": len(group_by(experiences, "task")),
                "rollout/experiences": len(experiences),
            }
            self._sealed.append((step, kept, metrics))
        # a caller that goes away must not leave us in doubt whether the buffer has them
        await asyncio.shield(self._store())

    @property
    def unstored(self) -> int:
        """Experiences of commits that have not been answered."""
        return sum(len(kept) for _, kept, _ in self._sealed)

    async def _store(self) -> None:
        async with self._one:
            while self._sealed:
                step, kept, metrics = self._sealed[0]
                try:
                    if kept:
                        await self.buffer.put(kept)
                except Closed as error:
                    raise RuntimeError(
                        f"the trainer has ended: the {len(kept)} experiences of commit {step} are "
                        "not stored"
                    ) from error
                self._sealed.popleft()
                metrics |= self.sync.metrics() | {"rollout/dropped_sessions": self.dropped()}
                self.report("explorer", step, metrics)
