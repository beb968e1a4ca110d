"""The table of experts by slots, without vLLM: a runner in its form."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

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
