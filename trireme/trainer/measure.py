"""Measures a train step: arithmetic, seconds of its phases, memory, and a profiler's trace.

The arithmetic is that of the packed layout: work that a shared prefix saves is not counted, nor is
recomputation by gradient checkpointing and the output head. A multiplication with its addition is
two operations. Attention counts the keys that a query sees, not those that a kernel's padding adds.
"""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trireme.config.memory import GIB
from trireme.config.shape import shape_of
from trireme.engines.torch.composite import text_model
from trireme.engines.torch.recurrent import count_states
from trireme.files import whole_file
from trireme.trainer.pack import PackedBatch

PEAKS: tuple[tuple[str, float], ...] = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("H200", 989.0),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
)
"""Dense bfloat16 TFLOP/s by the data sheets; the first entry whose name is part of the device's
applies, unless its number goes on there (RTX A1000)."""


def peak_flops(device: torch.device, *, half: bool, tflops: float | None = None) -> float | None:
    """Return the FLOP/s that a device could do: the user's `tflops`, else by its name; None if
    neither is known, as for float32, whose peak depends on torch's rounding settings.
    """
    if tflops is not None:
        return tflops * 1e12
    if device.type != "cuda" or not half:
        return None
    name = torch.cuda.get_device_name(device)
    if " MIG " in name:  # a slice of the device that the rest of the name says
        return None
    return next((peak * 1e12 for known, peak in PEAKS if re.search(rf"{known}(?!\d)", name)), None)


@dataclass(frozen=True)
class Passes:
    """Sizes that determine the cost of a decoder's pass."""

    trained: int
    """Trained weights of its linear layers that a token passes: of experts the chosen ones.
    Embeddings are looked up, and cost nothing."""
    frozen: int
    head: int
    """Weights of the output head; 0 for a model without one."""
    head_trained: bool
    query_width: int
    windows: tuple[int, ...]
    """The keys that a query of each layer with attention sees, see `window_of` of rows.py."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Passes | None:
        """Count a model's weights, before it is spread over ranks or after; None if it is an
        unknown kind of decoder.
        """
        text = model.config.get_text_config()
        shape = shape_of(text.to_dict())
        if shape is None:
            return None
        looked_up = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
        layers = [p for p in text_model(model).parameters() if p not in looked_up]
        linear = [(p.numel(), p) for p in layers if p.ndim == 2]
        if shape.experts:  # those of a layer are one tensor
            met = shape.chosen / shape.experts
            linear += [(int(p.numel() * met), p) for p in layers if p.ndim == 3]
        head = model.get_output_embeddings()
        weight = head.weight if head is not None else None
        window = getattr(text, "sliding_window", None) or 0
        window = window if getattr(text, "use_sliding_window", True) else 0
        kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * shape.layers
        chunk = getattr(text, "attention_chunk_size", None) or 0
        reach = {"sliding_attention": window, "chunked_attention": -chunk}
        recurrent, convolved = count_states(model)
        return cls(
            trained=sum(numbers for numbers, p in linear if p.requires_grad),
            frozen=sum(numbers for numbers, p in linear if not p.requires_grad),
            head=weight.numel() if isinstance(weight, Tensor) else 0,
            head_trained=isinstance(weight, Tensor) and weight.requires_grad,
            query_width=shape.query_width,
            states=6 * recurrent + 2 * convolved,
            windows=tuple(
                reach.get(kind, 0)
                for kind in kinds
                if kind not in ("linear_attention", "conv", "mlp", "moe")
            ),
        )

    states: int = 0
    """FLOPs of a token in the recurrences and convolutions of layers with a state: each number of a
    state decays, gets a product and is read, six operations; of a convolution it is multiplied and
    added."""

    def flops(self, tokens: Any, pairs: Any, nodes: Any, *, backward: bool) -> Any:
        """Return the FLOPs of one pass over `tokens` with `nodes` rows of logits; numbers, or
        tensors.

        `pairs`: the number of pairs of a query and a key that it sees, all layers together.
        """
        linear = (2 + 4 * backward) * self.trained + (2 + 2 * backward) * self.frozen
        linear += (1 + 2 * backward) * self.states
        head = (2 + (2 + 2 * self.head_trained) * backward) * self.head
        return tokens * linear + nodes * head + 4 * (1 + 2 * backward) * self.query_width * pairs


class Arithmetic:
    """The cost of models' passes, counted as they are made and read once per step."""

    def __init__(self, *models: PreTrainedModel) -> None:
        """Count nothing for models of unknown cost."""
        self._total: Tensor | None = None
        self.known = True
        for model in models:
            passes = Passes.of(model)
            if passes is None:
                self.known = False
            else:
                self._watch(model, passes)

    def take(self) -> float:
        """Return the FLOPs since the last call, on this rank."""
        total, self._total = self._total, None
        return 0.0 if total is None else float(total)

    def _watch(self, model: PreTrainedModel, passes: Passes) -> None:
        def count(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            layout = options.get("packed")
            if layout is not None:  # counted on the device: reading it here would wait for it
                backward = torch.is_grad_enabled()
                cost = passes.flops(*counted(layout, passes.windows), backward=backward)
                self._total = cost if self._total is None else self._total + cost

        text_model(model).register_forward_pre_hook(count, with_kwargs=True)


def counted(layout: PackedBatch, windows: Sequence[int]) -> tuple[int, Tensor, Tensor]:
    """Return the tokens of a layout, pairs of queries and keys in all layers, and nodes that need
    logits.
    """
    seen = (layout.positions + 1).double()
    pairs = torch.zeros_like(seen[0])
    for window in set(windows):
        in_one = seen.clamp(max=window) if window > 0 else seen
        in_one = (in_one if window >= 0 else (in_one - 1) % -window + 1).sum()
        pairs = pairs + windows.count(window) * in_one
    marked = torch.zeros_like(seen)
    marked[layout.predecessors] = 1.0
    return len(seen), pairs, marked.sum()


class Phases:
    """The seconds of each part of a train step, by the names of their metrics."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time spent inside to the metric `name`."""
        begun = time.monotonic()
        yield
        if self._device.type == "cuda":  # its work may be queued and not done
            torch.cuda.synchronize(self._device)
        self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - begun

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds


class Measures:
    """The measures of one backend's train steps."""

    def __init__(
        self,
        device: torch.device,
        models: Sequence[PreTrainedModel] = (),
        *,
        half: bool = False,
        tflops: float | None = None,
    ) -> None:
        self.arithmetic = Arithmetic(*models)
        self.phases = Phases(device)
        self.peak = peak_flops(device, half=half, tflops=tflops)
        """FLOP/s that the device could do; None if not known."""


def peak_memory(device: torch.device) -> float:
    """Return the peak memory of this process's device in GiB since the last call; on a CPU the
    process's memory since it started.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / GIB


@dataclass(frozen=True)
class Profile:
    """The train steps that are profiled."""

    steps: frozenset[int]
    folder: Path
    """The folder of the traces; all ranks see it."""

    def stem(self, step: int) -> str | None:
        """Return the prefix of the names of a step's files; None if it is not profiled."""
        return str(self.folder / f"step_{step}") if step in self.steps else None


@contextmanager
def profiled(stem: str | None, rank: int, device: torch.device) -> Iterator[None]:
    """Run torch's profiler over the block if there is a `stem` for its files; on a GPU also take a
    snapshot of its memory. Raises OSError if they cannot be written.
    """
    if stem is None:
        yield
        return
    kinds = [torch.profiler.ProfilerActivity.CPU]
    gpu = device.type == "cuda"
    if gpu:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.memory._record_memory_history(device=device)
    try:
        with torch.profiler.profile(activities=kinds, record_shapes=True) as profiler:
            yield
            if gpu:
                torch.cuda.synchronize(device)
        if gpu:
            with whole_file(Path(f"{stem}_rank_{rank}_memory.pickle")) as path:
                torch.cuda.memory._dump_snapshot(str(path))
    finally:
        if gpu:
            torch.cuda.memory._record_memory_history(enabled=None, device=device)
    with whole_file(Path(f"{stem}_rank_{rank}.json")) as path:
        profiler.export_chrome_trace(str(path))
