"""Whichever side ends first, what is raised is the first cause."""

from __future__ import annotations

import asyncio

import pytest

from trireme.aio import first_failure
from trireme.buffer.buffer import OtherSideFailed


@pytest.mark.parametrize("cause_waits", [0.0, 0.05])
def test_a_side_that_fails_because_of_the_other_gives_way_to_it(cause_waits: float) -> None:
    cause = ValueError("the engine broke")

    async def breaks() -> None:
        await asyncio.sleep(cause_waits)
        raise cause

    async def follows() -> None:
        raise OtherSideFailed("the other side has failed") from cause

    with pytest.raises(ValueError, match="the engine broke"):
        asyncio.run(first_failure(follows(), breaks(), consequence=OtherSideFailed))


def test_the_first_failure_ends_the_others() -> None:
    ended: list[bool] = []

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def breaks() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(first_failure(waits(), breaks()))
    assert ended == [True]
