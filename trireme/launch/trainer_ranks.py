"""Trainer ranks: makes rank 0 of a plan's trainer, or has this process be one of the others.

Whatever starts the processes (Ray, a launcher of subprocesses, torchrun) needs to tell each only
the plan, the model and its `Place`.
"""

from __future__ import annotations

import logging

from trireme.algorithms.recipes import Recipe, get_recipe
from trireme.config import Plan
from trireme.launch.training import make_backend, make_learning
from trireme.trainer.backend import Backend
from trireme.trainer.learning import Learning
from trireme.trainer.orders import Commands, Orders, follow
from trireme.trainer.ranks import Place, Ranks
from trireme.trainer.step import commands

logger = logging.getLogger(__name__)


class TrainerRanks:
    """Rank 0, and through it all others."""

    def __init__(self, plan: Plan, model_path: str, recipe: Recipe, place: Place) -> None:
        """Waits for the other ranks."""
        logger.info("%d trainer ranks meet at %s", place.world, place.address)
        self._group = Ranks(place)
        self._orders = Orders(self._group)

        def load() -> tuple[Backend, Learning]:
            group = self._group
            backend = make_backend(plan, model_path, recipe, group, self._orders)
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
    recipe = get_recipe(plan.config.algorithm)

    def make(ranks: Ranks) -> Commands:
        backend = make_backend(plan, model_path, recipe, ranks)
        return commands(backend, recipe, make_learning(plan, model_path, recipe, ranks))

    follow(place, make)
