"""Trainer ranks under Ray: one that fails before it has met rank 0 is not waited for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.limits import HANG_S

pytest.importorskip("ray")

from trireme.ext.ray.run import Actors


class Standing:
    """What the actors ask of their stage."""

    plan = None


def test_a_rank_that_fails_before_the_meeting_ends_the_opening() -> None:
    async def main() -> None:
        async def fails() -> None:
            raise ValueError("no module named plugin")

        stage: Any = Standing()
        actors = Actors(stage)
        actors._following = [asyncio.ensure_future(fails())]
        opening: asyncio.Future[None] = asyncio.ensure_future(asyncio.sleep(60))
        with pytest.raises(RuntimeError, match="trainer rank 1 failed: no module named plugin"):
            await asyncio.wait_for(actors._while_following(opening), HANG_S)
        assert opening.cancelled()

    asyncio.run(main())
