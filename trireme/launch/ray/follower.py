"""Follower: a trainer rank after the first: does what rank 0 tells it until rank 0 says stop."""

from __future__ import annotations

import asyncio
import logging

from trireme.launch.ray.made import Made
from trireme.launch.trainer_ranks import follow_plan, place_of
from trireme.log import setup_logging
from trireme.workflows.plugins import load_plugins


class FollowerPart:
    """One rank in a process of its own."""

    async def follow(self, made: Made, rank: int) -> None:
        """Be rank `rank`, from loading to the end. Raises what went wrong here."""
        load_plugins(made.plugins)
        assert made.rank0 is not None
        plan = made.plan
        close_log = setup_logging(plan.job_dir / "log", plan.config.log.level)
        place = place_of(plan, rank, plan.trainer_ranks, made.rank0)
        try:
            await asyncio.to_thread(follow_plan, plan, made.model_path, place)
        except Exception:
            logging.getLogger("trireme.trainer").exception("rank %d has failed", rank)
            raise
        finally:
            close_log()

    async def stop(self) -> None:
        """Rank 0 says when to stop; nothing is left to do."""
