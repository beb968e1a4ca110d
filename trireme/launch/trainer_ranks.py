"""Trainer ranks: makes rank 0 of a plan's trainer, or has this process be one of the others.

Whatever starts the processes (Ray, a launcher of subprocesses, torchrun) needs to tell each only
the plan, the model and its `Place`.
"""

from __future__ import annotations

import logging

from trireme.algorithms.recipes import Recipe
from trireme.config import Plan
from trireme.launch.parts.training import make_learning, make_recipe, make_sharded_backend
from trireme.trainer.follow import follow
from trireme.trainer.fsdp2 import Fsdp2Backend
from trireme.trainer.learning import Learning
from trireme.trainer.orders import Orders
from trireme.trainer.ranks import Place, Ranks

logger = logging.getLogger(__name__)


class TrainerRanks:
    """Rank 0, and through it all others."""

    def __init__(self, plan: Plan, model_path: str, recipe: Recipe, place: Place) -> None:
        """Waits for the other ranks."""
        logger.info("%d trainer ranks meet at %s", place.world, place.address)
        self._group = Ranks(place)
        self._orders = Orders(self._group)

        def load() -> tuple[Fsdp2Backend, Learning]:
            group, orders = self._group, self._orders
            backend = make_sharded_backend(plan, model_path, recipe, group, orders)
            return backend, make_learning(plan, model_path, recipe, group)

        self.backend, self.learning = self._orders.guarded(load, doing="loading")

    def close(self) -> None:
        """Send the others home."""
        self._orders.close()


def place_of(plan: Plan, rank: int, world: int, address: str, device: str | None = None) -> Place:
    """The place of one rank by the plan's keys; `address` is host:port of rank 0, free to take."""
    trainer = plan.config.trainer
    return Place(
        rank,
        world,
        address,
        sequence=trainer.ulysses_sequence_parallel_size,
        device=device or plan.device,
        timeout=trainer.collective_timeout,
    )


def follow_plan(plan: Plan, model_path: str, place: Place) -> None:
    """Be one of the other ranks until rank 0 says stop.

    The user's plugins must be loaded. Raises what went wrong here, having told rank 0.
    """
    recipe = make_recipe(plan)
    follow(
        place,
        lambda ranks: make_sharded_backend(plan, model_path, recipe, ranks),
        recipe,
        lambda ranks: make_learning(plan, model_path, recipe, ranks),
    )
