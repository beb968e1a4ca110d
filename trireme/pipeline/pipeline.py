"""Pipeline: what happens to a step's experiences between the workflows and the buffer.

The raw experiences are kept for looking at, then group-relative advantages are computed, here and
not in the trainer, because only here are groups known to be whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from trireme.algorithms.recipes import Recipe
from trireme.buffer.record import Record
from trireme.experience import Experience


class Pipeline:
    """Raw copy ▸ advantages."""

    def __init__(self, recipe: Recipe, *, raw: Record | None = None) -> None:
        """`raw` keeps every experience as the workflow returned it."""
        self.recipe = recipe
        self.raw = raw
        self.pass_rates: dict[int, dict[int, float]] | None = None
        """Taskset -> row -> how often the last step solved it; None: nothing here computes it."""

    async def run(
        self, experiences: Sequence[Experience]
    ) -> tuple[list[Experience], dict[str, float]]:
        """One explore step's experiences -> those to be trained, and metrics of what was done."""
        if self.raw is not None:
            await self.raw.write(experiences)
        kept, metrics = self.recipe.advantages(list(experiences))
        return kept, {f"experience_pipeline/{name}": value for name, value in metrics.items()}
