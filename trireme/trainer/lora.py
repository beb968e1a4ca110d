"""LoRA: trains low-rank additions to frozen weights (arXiv:2106.09685), through peft.

The reference model is the same network with the adapter's initial weights: switched off if these
were 0, else a frozen copy of the adapter. The base is never copied.

With DoRA (arXiv:2402.09353) the length of each output's weights is trained as well as their
direction.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from trireme.checkpoint.save import write_weights
from trireme.checkpoint.saved import assign
from trireme.config.lookup import LEAVES_BASE
from trireme.engines.adapter import BASE_LAYER, A, B, is_of_adapter, plain_name
from trireme.engines.torch.composite import towers

Part = Literal["merged", "text", "towers", "base", "adapter"]
"""A part of the weights: all, of a composite the language model or its towers, and with LoRA the
base or the adapter. An adapter is merged into the first two."""

_ADAPTER, _START = "default", "start"


@dataclass(frozen=True)
class Lora:
    """The settings of the one adapter, from `model.lora_configs`."""

    rank: int = 32
    """Rank of the update."""
    alpha: float = 32
    """The update is scaled by alpha / rank, with `rslora` by alpha / sqrt(rank)."""
    rslora: bool = False
    dora: bool = False
    path: str | None = None
    """A folder of peft's, whose configuration then replaces all other settings here."""
    dropout: float = 0.0
    """Share of an adapter's inputs that are dropped in training."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Names of the linear layers with an adapter."""
    exclude_modules: str | tuple[str, ...] | None = None
    """Names of the layers among these without one."""

    @property
    def leaves_base_alone(self) -> bool:
        """True if it can be made without the base's weights: DoRA needs their norms."""
        if self.path is None:
            return not self.dora
        return _config(self).init_lora_weights in LEAVES_BASE


class Adapter:
    """The adapter on a model, which is changed in place: adapters are added to its linear
    layers.
    """

    def __init__(self, model: PreTrainedModel, lora: Lora) -> None:
        """Freezes the model's own weights. The adapter begins at 0, or with the weights at `path`.

        Raises ValueError for an adapter of another model, and for one on a weight that several
        layers share: merged it would be the weight of all of them.
        """
        from peft import PeftModel, get_peft_model  # slow to import, and rarely needed

        self._model = model
        with warnings.catch_warnings():  # peft uses a name that transformers has replaced
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
            self._peft = get_peft_model(model, _config(_on_text(lora, model)))
        assert isinstance(self._peft, PeftModel)
        turned = [n for n, layer in self._layers() if isinstance(layer.get_base_layer(), Conv1D)]
        config: Any = self._peft.peft_config[_ADAPTER]
        if turned and config.use_dora:
            raise ValueError(
                f"model.lora_configs[0].use_dora: {turned[0]} keeps its weight transposed, and a "
                "row's norm cannot be taken there: leave use_dora out for this model"
            )
        if shared := self._on_shared_weights():
            raise ValueError(
                f"model.lora_configs[0].target_modules: {' and '.join(shared)} are one weight "
                "(tie_word_embeddings), which cannot be merged with an adapter of one of them: "
                "leave both out for this model"
            )
        self._dtypes_as_trained(model)
        self.starts_at_zero = lora.path is None
        if lora.path is not None:
            self.load(_read(Path(lora.path)), whence=f"the adapter in {lora.path}")

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Restore the model as it was before training, inside the block."""
        if self.starts_at_zero:
            with self._peft.disable_adapter():
                yield
            return
        layers = [layer for _, layer in self._layers()]
        for layer in layers:  # not with peft's own switch, which would make the copy trainable
            layer._active_adapter = _START
        try:
            yield
        finally:
            for layer in layers:
                layer._active_adapter = _ADAPTER

    def keep_start(self) -> None:
        """Store a frozen copy of the current adapter for `reference`. If it is 0 it is switched off
        instead.
        """
        if self.starts_at_zero:
            return
        from peft import set_peft_model_state_dict

        config: Any = copy.copy(self._peft.peft_config[_ADAPTER])
        config.init_lora_weights = True  # others would subtract their start from the base again
        self._peft.add_adapter(_START, config)
        set_peft_model_state_dict(self._peft, self.weights(), adapter_name=_START)
        self._peft.set_adapter(_ADAPTER)
        for name, parameter in self._model.named_parameters():
            if f".{_START}" in name:
                parameter.requires_grad_(False)

    def weights(self) -> dict[str, Tensor]:
        """Return the adapter's weights, by name."""
        from peft import get_peft_model_state_dict

        return get_peft_model_state_dict(self._peft, adapter_name=_ADAPTER)

    def load(self, weights: Mapping[str, Tensor], *, whence: str = "") -> None:
        """Load weights from `weights` or a file. Raises ValueError, and changes nothing, if names
        or shapes differ.
        """
        current = self.weights()
        saved = whence or "the saved LoRA adapter"
        why = "it belongs to another model" if whence else "model.lora_configs has changed since"
        if set(current) != set(weights):
            odd = sorted(set(current) ^ set(weights))[0]
            raise ValueError(
                f"{saved} has other layers than this one ({len(weights)} tensors, not "
                f"{len(current)}, or other names: {odd}): {why}"
            )
        for name, tensor in current.items():
            if tensor.shape != weights[name].shape:
                raise ValueError(
                    f"{saved} has {name} of {list(weights[name].shape)}, and this one of "
                    f"{list(tensor.shape)}: {why}"
                )
        with torch.no_grad():
            for name, tensor in current.items():
                assign(tensor, weights[name])

    def travelling(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapter in the engines' form, see engines/adapter.py. Raises ValueError with
        DoRA, which is more than an addition, and for an adapter on an embedding.
        """
        for name, layer in self._layers():
            if layer.use_dora.get(_ADAPTER):
                raise ValueError(
                    "a DoRA adapter cannot travel alone: its weights are pushed merged"
                )
            if _ADAPTER not in layer.lora_A:
                raise ValueError(
                    f"an adapter of '{name}', which is not a linear layer, cannot travel alone: "
                    "its weights are pushed merged"
                )
            scale = layer.scaling[_ADAPTER]
            yield f"{name}{A}", layer.lora_A[_ADAPTER].weight.detach()
            yield f"{name}{B}", layer.lora_B[_ADAPTER].weight.detach() * scale

    def each_base(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the frozen weights, under their plain names."""
        for key, tensor in self._model.state_dict().items():
            if not is_of_adapter(key):
                yield plain_name(key), tensor.detach()

    def each_merged(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's weights with the adapter merged, under their original names, each
        computed on demand.
        """
        layers = dict(self._layers())
        for key, tensor in self._model.state_dict().items():
            if is_of_adapter(key):
                continue
            owner = key.partition(BASE_LAYER)[0]
            if key.endswith(f"{BASE_LAYER}weight") and owner in layers:
                with torch.no_grad():
                    tensor = _merged(layers[owner], tensor)
            yield plain_name(key), tensor.detach()

    plain_name = staticmethod(plain_name)

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write `weights` in peft's form: adapter_config.json and adapter_model.safetensors."""
        folder.mkdir(exist_ok=True)
        config = copy.copy(self._peft.peft_config[_ADAPTER])
        config.inference_mode = True
        for key, value in vars(config).items():
            if isinstance(value, set):  # its order differs between processes
                setattr(config, key, sorted(value))
        config.save_pretrained(str(folder))
        write_weights(folder / "adapter_model.safetensors", weights)

    def _layers(self) -> Iterator[tuple[str, Any]]:
        from peft.tuners.lora import LoraLayer

        for name, module in self._model.named_modules():
            if isinstance(module, LoraLayer):
                yield name, module

    def _on_shared_weights(self) -> list[str]:
        """Return the names of layers that share a weight, if one of them has an adapter."""
        owners: dict[int, list[str]] = {}
        for name, weight in self._model.named_parameters(remove_duplicate=False):
            owners.setdefault(id(weight), []).append(plain_name(name).removesuffix(".weight"))
        adapted = (getattr(layer.get_base_layer(), "weight", None) for _, layer in self._layers())
        return next((owners[id(w)] for w in adapted if len(owners.get(id(w), ())) > 1), [])

    def _dtypes_as_trained(self, model: PreTrainedModel) -> None:
        """Make the trained parameters float32, also on a base in bfloat16."""
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()

    def trains(self) -> str:
        """Return a line with the number of the model's parameters that are trained."""
        counts = [(p.numel(), p.requires_grad) for p in self._model.parameters()]
        trained, total = sum(n for n, grad in counts if grad), sum(n for n, _ in counts)
        return f"LoRA: trainable {trained:,} of {total:,} parameters ({trained / total:.2%})"


def _on_text(lora: Lora, model: PreTrainedModel) -> Lora:
    """Exclude a composite's towers, whose layers have the names of the text's."""
    sighted = tuple(name.rpartition(".")[0] for name, _ in towers(model))
    excluded = lora.exclude_modules or ()
    if isinstance(excluded, str):
        excluded = tuple(n for n, _ in model.named_modules() if re.fullmatch(excluded, n))
    return replace(lora, exclude_modules=(*excluded, *sighted)) if sighted else lora


def _config(lora: Lora) -> Any:
    from peft import LoraConfig, PeftConfig

    if lora.path is not None:
        config = PeftConfig.from_pretrained(lora.path)
        config.inference_mode = False
        config.lora_dropout = lora.dropout  # pyright: ignore[reportAttributeAccessIssue]
        return config
    targets, excluded = lora.target_modules, lora.exclude_modules
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules=list(excluded) if isinstance(excluded, tuple) else excluded,
        task_type="CAUSAL_LM",
    )


def _read(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def _merged(layer: Any, base: Tensor) -> Tensor:
    """Return base + addition in float32, or this rank's rows of it; with DoRA scaled row by row."""
    merged = base.float() + layer.get_delta_weight(_ADAPTER)
    if not layer.use_dora.get(_ADAPTER):
        return merged
    length = torch.linalg.norm(merged, dim=1, keepdim=True)
    return merged * (layer.lora_magnitude_vector[_ADAPTER].weight.unsqueeze(1) / length)
