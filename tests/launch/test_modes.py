"""Whichever side ends first, what is raised is the first cause."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from trireme.aio import first_failure
from trireme.buffer.buffer import OtherSideFailed
from trireme.launch.modes import run_both
from trireme.launch.results import StageResult


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


@pytest.mark.parametrize("why", ["", "a resume", "servers of the user's", "an adapter"])
def test_the_probe_is_calibrated_while_trainer_and_engine_have_the_same_weights(why: str) -> None:
    order: list[str] = []

    class Side:
        """Notes what is asked of it, as trainer and as explorer."""

        def __getattr__(self, name: str) -> Any:
            async def asked(*_: Any) -> Any:
                order.append(name)
                return 3 if name == "train" else StageResult(None, "both", "")

            return asked

    urls = ("http://a",) if why == "servers of the user's" else ()
    engine = SimpleNamespace(urls=urls)
    plan = SimpleNamespace(has_adapter=why == "an adapter", engine=engine)
    resumed = object() if why == "a resume" else None
    result = StageResult(None, "both", "")
    stage: Any = SimpleNamespace(result=lambda: result, plan=plan, resumed=resumed)
    trainer: Any = Side()
    asyncio.run(run_both(stage, trainer, trainer))
    before = ["refresh", "calibrate"] if why else ["calibrate"]
    assert order[: len(before) + 1] == [*before, "explore"]
    assert "train" in order and order.count("calibrate") == 1
