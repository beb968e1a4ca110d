"""The table of experts by slots, without vLLM: a runner in its form."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trireme.ext.vllm.engine import VllmEngine
from trireme.ext.vllm.options import ROUTED
from trireme.ext.vllm.routing import SlotRouting


def slot_routing(computed: int, scheduled: int) -> SlotRouting:
    """Slots with their own numbers as experts, of blocks of four tokens; request 7-a, ours 7, has
    the blocks 2 and 5.
    """
    params = SimpleNamespace(extra_args={ROUTED: "7"})
    runner: Any = SimpleNamespace(
        requests={"7-a": SimpleNamespace(sampling_params=params)},
        input_batch=SimpleNamespace(
            req_id_to_index={"7-a": 0}, num_computed_tokens_cpu=np.array([computed])
        ),
        max_num_reqs=2,
    )
    routing = object.__new__(SlotRouting)
    routing._runner = runner
    routing._blocks = SimpleNamespace(
        get_numpy_array=lambda: np.array([[2, 5, 0]]), num_blocks_per_row=[2], block_size=4
    )
    routing._table = torch.arange(24)[:, None, None]
    routing._scheduled = {"7-a": scheduled}
    routing._ended, routing._taken = {}, set()
    return routing


def slots(experts: np.ndarray | None) -> list[int]:
    """The slots that a record was read from."""
    assert experts is not None
    return experts.reshape(-1).tolist()


def test_a_record_has_the_tokens_that_are_computed_and_not_the_rest_of_a_block() -> None:
    assert slots(slot_routing(0, 3).take("7")) == [8, 9, 10]  # in the midst of its prompt
    assert slots(slot_routing(3, 2).take("7")) == [8, 9, 10, 11, 20]
    assert slots(slot_routing(7, 1).take("7")) == [8, 9, 10, 11, 20, 21, 22, 23]


def test_requests_that_end_before_anybody_asks_keep_their_record_once() -> None:
    routing = slot_routing(4, 1)
    routing._keep(["7-a"])
    assert slots(routing.take("7")) == [8, 9, 10, 11, 20]
    routing._runner.requests.clear()
    assert routing.take("7") is None
    asked = slot_routing(4, 1)
    asked.take("7")
    asked._keep(["7-a"])
    assert asked._ended == {} and asked._taken == set()


def test_no_record_is_kept_of_requests_whose_callers_were_cancelled() -> None:
    routing = slot_routing(4, 1)
    routing.forget(["7", "of another worker"])  # vLLM has not ended it yet
    routing._keep(["7-a"])
    assert routing._ended == {} and routing._taken == set()
    routing._keep(["7-a"])
    routing.forget(["7"])
    assert routing._ended == {} and routing._taken == set()


def test_the_next_record_that_is_asked_for_reports_cancelled_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Any, ...]] = []

    class Llm:
        async def generate(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
            await asyncio.Event().wait()
            yield

        async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
            asked.append((method, *args))
            return [None]

    monkeypatch.setattr(
        "trireme.ext.vllm.engine._params", lambda *_, **__: SimpleNamespace(extra_args={})
    )
    engine: Any = object.__new__(VllmEngine)
    engine._llm, engine._records_routing, engine._adapter = Llm(), True, None
    engine._count, engine._given_up, engine._failure = itertools.count(4), [], None
    request: Any = SimpleNamespace(stop_reason=None, pictures=(), ids=[1, 2])

    async def main() -> None:
        calls = [asyncio.ensure_future(engine._sample(request, {}, None)) for _ in range(2)]
        await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        assert await engine._routing(request, "6") is None
        assert await engine._routing(request, "7") is None

    asyncio.run(main())
    name = "trireme_routing"
    assert asked == [(name, "6", ["4", "5"]), (name, "7", [])]
