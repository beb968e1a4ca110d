"""LoRA: trains low-rank additions to frozen weights (arXiv:2106.09685), through peft.

The reference model is the same network with the additions that training began with: switched off
where they began at 0, else a frozen copy of the adapter. The base is never copied.

With DoRA (arXiv:2402.09353) the length of each output's weights is trained as well as their
direction.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from trireme.checkpoint.save import write_weights
from trireme.checkpoint.saved import assign
from trireme.engines.adapter import A, B
from trireme.engines.weight_group import fingerprint

if TYPE_CHECKING:
    from trireme.trainer.backend import Backend

_ADAPTER, _START = "default", "start"
_BASE_LAYER = ".base_layer."


@dataclass(frozen=True)
class Lora:
    """The settings of the one adapter, from `model.lora_configs`."""

    rank: int = 32
    """Rank of the addition."""
    alpha: float = 32
    """The addition is scaled by alpha / rank, with `rslora` by alpha / sqrt(rank)."""
    rslora: bool = False
    dora: bool = False
    path: str | None = None
    """A folder of peft's, whose configuration then takes the place of all else here."""
    dropout: float = 0.0
    """Share of an adapter's inputs that is dropped in training."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Names of the linear layers that get one."""
    exclude_modules: str | tuple[str, ...] | None = None
    """Names of those that get none."""

    @property
    def leaves_base_alone(self) -> bool:
        """True if it can be made without the base's numbers: DoRA takes their norms."""
        if self.path is None:
            return not self.dora
        return _config(self).init_lora_weights in (True, False, "gaussian")  # others change them


class Adapter:
    """The adapter on a model, which is changed in place: its linear layers gain the additions."""

    def __init__(self, model: PreTrainedModel, lora: Lora) -> None:
        """Freezes the model's own weights. The additions begin at 0, or as they lie at `path`.

        Raises ValueError for an adapter of another model.
        """
        from peft import PeftModel, get_peft_model  # slow to load, and seldom needed

        self._model = model
        with warnings.catch_warnings():  # peft asks by a name that transformers has replaced
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
            self._peft = get_peft_model(model, _config(lora))
        assert isinstance(self._peft, PeftModel)
        turned = [n for n, layer in self._layers() if isinstance(layer.get_base_layer(), Conv1D)]
        config: Any = self._peft.peft_config[_ADAPTER]
        if turned and config.use_dora:
            raise ValueError(
                f"model.lora_configs[0].use_dora: {turned[0]} keeps its weight transposed, and a "
                "row's norm cannot be taken there: leave use_dora out for this model"
            )
        self._dtypes_as_trained(model)
        self.starts_at_zero = lora.path is None
        if lora.path is not None:
            self.load(_read(Path(lora.path)), whence=f"the adapter in {lora.path}")

    @contextmanager
    def reference(self) -> Iterator[None]:
        """The model as it was before training."""
        if self.starts_at_zero:
            with self._peft.disable_adapter():
                yield
            return
        layers = [layer for _, layer in self._layers()]
        for layer in layers:  # not by peft's own way, which would have the copy trained
            layer._active_adapter = _START
        try:
            yield
        finally:
            for layer in layers:
                layer._active_adapter = _ADAPTER

    def keep_start(self) -> None:
        """Keep a frozen copy of the additions as they are, for `reference`. Where they are 0 they
        are switched off instead.
        """
        if self.starts_at_zero:
            return
        from peft import set_peft_model_state_dict

        self._peft.add_adapter(_START, copy.copy(self._peft.peft_config[_ADAPTER]))
        set_peft_model_state_dict(self._peft, self.weights(), adapter_name=_START)
        self._peft.set_adapter(_ADAPTER)
        for name, parameter in self._model.named_parameters():
            if f".{_START}" in name:
                parameter.requires_grad_(False)

    def weights(self) -> dict[str, Tensor]:
        """The additions alone, by name."""
        from peft import get_peft_model_state_dict

        return get_peft_model_state_dict(self._peft, adapter_name=_ADAPTER)

    def load(self, weights: Mapping[str, Tensor], *, whence: str = "") -> None:
        """Take additions that `weights` gave, or that lie in a file. Raises ValueError, and changes
        nothing, where names or shapes are others.
        """
        current = self.weights()
        saved = whence or "the saved LoRA adapter"
        why = "it is of another model" if whence else "model.lora_configs has changed since"
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
        """The additions as engines take them, see engines/adapter.py. Raises ValueError with DoRA,
        which is more than an addition, and for one on an embedding.
        """
        for name, layer in self._layers():
            if layer.use_dora.get(_ADAPTER):
                raise ValueError(
                    "a DoRA adapter cannot travel alone: its weights are pushed merged"
                )
            if _ADAPTER not in layer.lora_A:
                raise ValueError(
                    f"an adapter of '{name}', which is no linear layer, cannot travel alone: its "
                    "weights are pushed merged"
                )
            scale = layer.scaling[_ADAPTER]
            yield f"{name}{A}", layer.lora_A[_ADAPTER].weight.detach()
            yield f"{name}{B}", layer.lora_B[_ADAPTER].weight.detach() * scale

    def each_base(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that are not trained, under their plain names."""
        for key, tensor in self._model.state_dict().items():
            if ".lora_" not in key:
                yield self.plain_name(key), tensor.detach()

    def each_merged(self) -> Iterator[tuple[str, Tensor]]:
        """The model's weights with the additions added, under the names they had without them,
        each computed when it is asked for.
        """
        layers = dict(self._layers())
        for key, tensor in self._model.state_dict().items():
            if ".lora_" in key:
                continue
            owner = key.partition(_BASE_LAYER)[0]
            if key.endswith(f"{_BASE_LAYER}weight") and owner in layers:
                with torch.no_grad():
                    tensor = _merged(layers[owner], tensor)
            yield self.plain_name(key), tensor.detach()

    @staticmethod
    def plain_name(key: str) -> str:
        """The name in the plain model of a tensor of the adapted one."""
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

    def _layers(self) -> Iterator[tuple[str, Any]]:
        from peft.tuners.lora import LoraLayer

        for name, module in self._model.named_modules():
            if isinstance(module, LoraLayer):
                yield name, module

    def _dtypes_as_trained(self, model: PreTrainedModel) -> None:
        """Make the trained parameters float32, also on a base in bfloat16."""
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()

    def trains(self) -> str:
        """A line with the number of the model's parameters that are trained."""
        counts = [(p.numel(), p.requires_grad) for p in self._model.parameters()]
        trained, total = sum(n for n, grad in counts if grad), sum(n for n, _ in counts)
        return f"LoRA: trainable {trained:,} of {total:,} parameters ({trained / total:.2%})"


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
    """Base + addition in float32, or this rank's rows of it; with DoRA scaled row by row."""
    merged = base.float() + layer.get_delta_weight(_ADAPTER)
    if not layer.use_dora.get(_ADAPTER):
        return merged
    length = torch.linalg.norm(merged, dim=1, keepdim=True)
    return merged * (layer.lora_magnitude_vector[_ADAPTER].weight.unsqueeze(1) / length)


class AdapterSource:
    """The source for engines that have the base: the additions alone. See sync/probe.py."""

    def __init__(self, backend: Backend) -> None:
        self.score = backend.score
        self._backend = backend
        self._unmoved: dict[str, float] | None = None

    def weights(self) -> dict[str, Tensor]:
        """The additions as engines take them."""
        return dict(self.each_weight())

    def each_weight(self, dtype: str | None = None) -> Generator[tuple[str, Tensor]]:
        """Yield the additions one after the other."""
        return self._backend.each_weight(dtype, "adapter")

    def unmoved(self, dtype: str) -> dict[str, float]:
        """Fingerprints of the base, which engines have from its folder."""
        if self._unmoved is None:
            each = self._backend.each_weight(dtype, "base")
            marks = (fingerprint({name: tensor}, dtype) for name, tensor in each)
            self._unmoved = {name: mark for part in marks for name, mark in part.items()}
        return self._unmoved
