"""Routing: the experts that vLLM's routers choose for each token, stored by the slots of its keys
and values, so that those of a cached prefix are found as well.

vLLM 0.32 reports experts with its V2 model runner alone. Its capturer, which holds those of one
step, works with the V1 runner too (routed_experts_capturer.py in its layers/fused_moe); the rest is
here. A CUDA graph that was recorded before would not call it, so there are none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch

from trireme.engines.torch.routing import RoutingShape
from trireme.ext.vllm.options import ROUTED

_WHOLE = ("FullAttentionSpec", "MLAAttentionSpec")
"""vLLM's kinds of caches that have a slot for every token of a request."""
_LEFT = 4
"""As many times the requests at once may have ended without anybody asking yet."""


class SlotRouting:
    """The experts of all tokens in a model runner's cache."""

    def __init__(self, runner: Any) -> None:
        """Record from now on. Raises ValueError for a model, or kernels, of which vLLM captures
        nothing.
        """
        capture: Any = import_module("vllm.model_executor.layers.fused_moe.routed_experts_capturer")
        layer: Any = import_module("vllm.model_executor.layers.fused_moe.layer")
        self._runner = runner
        self._capturer = capture.RoutedExpertsCapturer(runner.max_num_tokens, runner.vllm_config)
        model = runner.get_model()
        capture.bind_routed_experts_capturer(model, self._capturer)
        sources = layer.MoERunner, capture.RoutedExpertsCaptureSource
        layers = {part.layer_id for part in model.modules() if isinstance(part, sources)}
        device = self._capturer.device_buffer.device
        self._layers = torch.tensor(sorted(layers), device=device)
        groups = runner.kv_cache_config.kv_cache_groups
        kinds = [type(group.kv_cache_spec).__name__ for group in groups]
        group = next((n for n, kind in enumerate(kinds) if kind in _WHOLE), None)
        if group is None:
            raise ValueError(
                f"vLLM caches this model by {', '.join(kinds)}: expected a layer that sees all "
                "earlier tokens, by whose slots experts are recorded"
            )
        self._blocks = runner.input_batch.block_table[group]
        slots = runner.kv_cache_config.num_blocks * groups[group].kv_cache_spec.block_size
        chosen = self._capturer.shape_per_token[1]
        experts = runner.model_config.get_num_experts()
        shape = RoutingShape(len(layers), experts, chosen)
        sizes = slots, shape.layers, shape.chosen
        self._table = torch.zeros(sizes, dtype=shape.dtype, device=device)
        self._ended: dict[str, np.ndarray] = {}
        """The experts of requests that vLLM has ended and nobody has asked for, by our names."""
        self._taken: set[str] = set()
        """The names of requests that were asked for, or given up, before vLLM ended them here."""
        self._scheduled: Mapping[str, int] = {}
        """The tokens of each request in the last step, which vLLM counts in the next one."""
        plain = runner.execute_model

        def execute_model(scheduled: Any, *args: Any, **options: Any) -> Any:
            self._keep(scheduled.finished_req_ids)  # before others get their slots
            out = plain(scheduled, *args, **options)
            self._scheduled = scheduled.num_scheduled_tokens
            self._note(scheduled.total_num_scheduled_tokens)
            return out

        runner.execute_model = execute_model

    def take(self, name: str) -> np.ndarray | None:
        """Return the experts [N, L, K] of a request's tokens that are computed; None if it has no
        slots any more.
        """
        if name in self._ended:
            return self._ended.pop(name)
        for number in self._runner.requests:
            if self._name(number) == name:
                self._taken.add(name)
                return self._of(number)
        return None

    def forget(self, names: Sequence[str]) -> None:
        """Keep no record of these requests, ended or not."""
        live = set(map(self._name, self._runner.requests)) if names else set[str | None]()
        for name in names:
            if self._ended.pop(name, None) is None and name in live:
                self._taken.add(name)

    def _note(self, tokens: int) -> None:
        """Store the experts of a step's tokens."""
        if tokens:
            slots = self._blocks.slot_mapping.gpu[:tokens].long()
            new = self._capturer.device_buffer[:tokens].index_select(1, self._layers)
            self._table[slots] = new.to(self._table.dtype)

    def _keep(self, numbers: Iterable[str]) -> None:
        """Copy the experts of requests that end."""
        for number in numbers:
            name = self._name(number)
            if name is None:
                continue
            if name in self._taken:
                self._taken.remove(name)
            elif (own := self._of(number)) is not None:
                self._ended[name] = own
        while len(self._ended) > _LEFT * self._runner.max_num_reqs:
            self._ended.pop(next(iter(self._ended)))

    def _name(self, number: str) -> str | None:
        """Return our name of a request of vLLM's; None for one that is scored."""
        request = self._runner.requests.get(number)
        params = None if request is None else request.sampling_params
        return None if params is None else (params.extra_args or {}).get(ROUTED)

    def _of(self, number: str) -> np.ndarray | None:
        row = self._runner.input_batch.req_id_to_index.get(number)
        if row is None:
            return None
        blocks = self._blocks.get_numpy_array()[row, : self._blocks.num_blocks_per_row[row]]
        size = self._blocks.block_size
        before = int(self._runner.input_batch.num_computed_tokens_cpu[row])
        # slots that are not written yet have the experts of another request
        count = before + self._scheduled.get(number, 0)
        slots = (blocks[:, None].astype(np.int64) * size + np.arange(size)).reshape(-1)[:count]
        return self._table[torch.from_numpy(slots).to(self._table.device)].numpy(force=True)
