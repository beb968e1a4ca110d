"""Pipeline: what happens to a step's experiences between the workflows and the buffer.

The raw experiences are kept for looking at, the operators change and filter them in the YAML's
order, then group-relative advantages are computed, here and not in the trainer, because only here
are groups known to be whole. With that a group is sealed: it goes into the buffer as it is, and as
old as its oldest token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from trireme.algorithms.recipes import Recipe
from trireme.buffer.record import Record
from trireme.experience import Experience, group_by
from trireme.log import get_logger
from trireme.pipeline.operator import Operator
from trireme.pipeline.operators import pass_rates

logger = get_logger("explorer_experience_pipeline")

PASS_RATES = "pass_rate_calculator"
LARGEST = 1e18
"""Rewards are float32 numbers, whose squares end at 3e38."""


logger = get_logger("pipeline")


class Pipeline:
    """Raw copy ▸ operators ▸ advantages ▸ sealed groups."""

    def __init__(
        self, recipe: Recipe, *, raw: Record | None = None, operators: Sequence[Operator] = ()
    ) -> None:
        """`raw` keeps every experience as the workflow returned it."""
        self.recipe = recipe
        self.raw = raw
        self.operators = tuple(operators)
        self.pass_rates: dict[int, dict[int, float]] | None = None
        """Taskset -> row -> how often the last step solved it; None: nothing here computes it."""
        self._prepared = False

    async def run(
        self, experiences: Sequence[Experience]
    ) -> tuple[list[Experience], dict[str, float]]:
        """One explore step's experiences -> those to be trained, and metrics of what was done."""
        if not self._prepared:
            self._prepared = True
            for operator in self.operators:
                await operator.prepare()
        if self.raw is not None:
            await self.raw.write(experiences)
        kept, metrics = list(experiences), {}
        for operator in self.operators:
            if operator.name == PASS_RATES:
                self.pass_rates = pass_rates(kept)
            kept, found = await operator(kept)
            metrics |= {f"{operator.name}/{name}": value for name, value in found.items()}
        metrics["not_finite"] = float(_not_finite(kept))
        kept, found = self.recipe.advantages(kept)
        metrics |= found | {"made": float(len(experiences)), "kept": float(len(kept))}
        groups = group_by(kept, "task")
        if self.operators:
            tasks = group_by(experiences, "task")
            metrics["emptied_groups"] = float(len(tasks) - len(groups))
        for members in groups.values():
            version = min((e.version for e in members if e.version >= 0), default=-1)
            for experience in members:
                experience.info["group_version"] = version
        logger.info(
            "%d experiences of %d groups go on, of %d", len(kept), len(groups), len(experiences)
        )
        return kept, {f"experience_pipeline/{name}": value for name, value in metrics.items()}

    async def close(self) -> None:
        """Let go of what the operators hold."""
        if self._prepared:
            for operator in self.operators:
                await operator.close()


def _not_finite(experiences: Sequence[Experience]) -> int:
    """How many have a reward that spoils their group's advantages; the log names some of them."""
    bad = [
        e
        for e in experiences
        if e.reward is not None and not (math.isfinite(e.reward) and abs(e.reward) < LARGEST)
    ]
    if bad:
        named = ", ".join(f"{e.eid.uid} ({e.reward:g})" for e in bad[:5])
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        logger.info("no advantage can be computed from the rewards of %s%s", named, more)
    return len(bad)
