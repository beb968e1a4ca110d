"""LoRA: trains low-rank additions to frozen weights (arXiv:2106.09685), through peft.

The reference model is the same network with the additions switched off, so that no copy is kept.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trireme.checkpoint.save import write_weights
from trireme.checkpoint.saved import assign

_ADAPTER = "default"
_BASE_LAYER = ".base_layer."


@dataclass(frozen=True)
class Lora:
    """What `model.lora_configs` says of the one adapter."""

    rank: int = 32
    """Rank of the addition."""
    alpha: float = 32
    """The addition is scaled by alpha / rank."""
    dropout: float = 0.0
    """Share of an adapter's inputs that is dropped in training."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Names of the linear layers that get one."""
    exclude_modules: str | tuple[str, ...] | None = None
    """Names of those that get none."""


class Adapter:
    """The adapter on a model, which is changed in place: its linear layers gain the additions."""

    def __init__(self, model: PreTrainedModel, lora: Lora) -> None:
        """Freezes the model's own weights. The additions begin at 0."""
        from peft import LoraConfig, PeftModel, get_peft_model  # slow to load, and seldom needed

        targets, excluded = lora.target_modules, lora.exclude_modules
        config = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]
            lora_dropout=lora.dropout,
            target_modules=targets if isinstance(targets, str) else list(targets),
            exclude_modules=list(excluded) if isinstance(excluded, tuple) else excluded,
            task_type="CAUSAL_LM",
        )
        self._model = model
        self._peft = get_peft_model(model, config)
        assert isinstance(self._peft, PeftModel)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The model as it was before training."""
        with self._peft.disable_adapter():
            yield

    def weights(self) -> dict[str, Tensor]:
        """The additions alone, by name."""
        from peft import get_peft_model_state_dict

        return get_peft_model_state_dict(self._peft)

    def load(self, weights: dict[str, Tensor]) -> None:
        """Take additions that `weights` gave."""
        own = self.weights()
        if set(own) != set(weights):
            raise ValueError(
                f"the saved LoRA adapter has other layers than this one ({len(weights)}, not "
                f"{len(own)}, or other names): model.lora_configs has changed since"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                assign(tensor, weights[name])

    def merged(self) -> dict[str, Tensor]:
        """The model's state dict with the additions added, under the names it had without them."""
        return dict(self.each_merged())

    def each_merged(self) -> Iterator[tuple[str, Tensor]]:
        """`merged` one after the other, each computed when it is asked for."""
        from peft.tuners.lora import LoraLayer

        layers = {
            name: module
            for name, module in self._model.named_modules()
            if isinstance(module, LoraLayer)
        }
        for key, tensor in self._model.state_dict().items():
            if ".lora_" in key:
                continue
            owner = key.partition(_BASE_LAYER)[0]
            if key.endswith(f"{_BASE_LAYER}weight") and owner in layers:
                with torch.no_grad():
                    tensor = tensor + layers[owner].get_delta_weight(_ADAPTER)  # pyright: ignore
            yield self.plain_name(key), tensor.detach()

    @staticmethod
    def plain_name(key: str) -> str:
        """What a tensor of the adapted model is called in the plain one."""
        return key.replace(_BASE_LAYER, ".")

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """`weights` as peft reads them: adapter_config.json and adapter_model.safetensors."""
        folder.mkdir(exist_ok=True)
        config = copy.copy(self._peft.peft_config[_ADAPTER])
        config.inference_mode = True
        for key, value in vars(config).items():
            if isinstance(value, set):  # whose order is another one in each process
                setattr(config, key, sorted(value))
        config.save_pretrained(str(folder))
        write_weights(folder / "adapter_model.safetensors", weights)

    def trains(self) -> str:
        """How many of the model's parameters are trained, in a line."""
        counts = [(p.numel(), p.requires_grad) for p in self._model.parameters()]
        trained, total = sum(n for n, grad in counts if grad), sum(n for n, _ in counts)
        return f"LoRA: trainable {trained:,} of {total:,} parameters ({trained / total:.2%})"
