"""Shell: makes the engine's module over weights from a folder, or over the trainer's own tensors.

Configuration, attention and train/eval flags are the shell's; the parameters may be shared. The
token ids that end a model's reply are read here too.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from trireme.config.lookup import need_weight_files
from trireme.config.memory import KV_TOKENS, MAX_ROWS, PREFIX_TOKENS
from trireme.engines.torch import rows
from trireme.engines.torch.composite import auto_class
from trireme.engines.torch.linear import quicken
from trireme.engines.weights import refuse_unusable

# Layers that attend to tokens by position and have no other state.
_PLAIN_LAYERS = {"full_attention", "sliding_attention", "attention"}
# Keys that configurations without a list of layers have for state other than keys and values.
_RECURRENT_KEYS = (
    "state_size",
    "ssm_state_size",
    "mamba_d_state",
    "linear_num_key_heads",
    "lru_width",
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class TorchSettings:
    """The settings of an embedded engine."""

    max_model_len: int
    seed: int = 42
    max_rows: int = MAX_ROWS
    """The most requests that decode at once; others wait in order."""
    kv_tokens: int = KV_TOKENS
    """The most tokens that they hold."""
    prefix_tokens: int = PREFIX_TOKENS
    """The size of the prefix cache; 0: none."""
    dtype: str = "float32"
    device: str = "cpu"
    keep_kv: bool = False
    """Whether an update in flight keeps old keys and values, in place of computing them again."""
    trust_remote_code: bool = False
    fast: bool = True
    """Whether a faster pass of forward.py, where one suits the model, replaces transformers'."""

    def module(self, model: str | Path, share_with: PreTrainedModel | None) -> PreTrainedModel:
        """Make the engine's module: of a folder, or over the tensors of `share_with`."""
        if share_with is not None:
            return share_shell(share_with)
        return load_shell(
            model,
            device=self.device,
            dtype=self.dtype,
            trust_remote_code=self.trust_remote_code,
        )


def load_shell(
    path: str | Path, *, device: str, dtype: str, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load a separate model. Raises ValueError for layers whose state is not keys and values."""
    rows.register()
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    refuse_recurrent(config, "the embedded engine cannot run it")
    model = auto_class(config).from_pretrained(
        path,
        config=config,
        dtype=DTYPES[dtype],
        attn_implementation=rows.NAME,
        trust_remote_code=trust_remote_code,
    )
    model.to(device)
    quicken(model)
    return model.eval().requires_grad_(False)


def share_shell(module: PreTrainedModel) -> PreTrainedModel:
    """Make a second module over the parameters and buffers of `module`; nothing is copied."""
    rows.register()
    refuse_recurrent(module.config, "the embedded engine cannot run it")
    config = copy.deepcopy(module.config)
    config._attn_implementation = rows.NAME
    with torch.device("meta"):
        shell = type(module)(config)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        _assign(shell, name, parameter)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        _assign(shell, name, buffer)
    quicken(shell)
    return shell.eval()


def refuse_recurrent(config: PreTrainedConfig, consequence: str) -> None:
    """Raise ValueError if layers of the language model have a state other than keys and values.

    `consequence` ends the sentence: it names what cannot be done with such a model.
    """
    text = config.get_text_config()
    others = sorted({*(getattr(text, "layer_types", None) or ())} - _PLAIN_LAYERS)
    others += [key for key in _RECURRENT_KEYS if not others and getattr(text, key, None)]
    if others:
        raise ValueError(
            f"model_type '{config.model_type}' has layers that are not plain attention "
            f"({', '.join(others)}): {consequence}"
        )


def load_weights(module: PreTrainedModel, source: Mapping[str, Tensor] | str | Path) -> None:
    """Overwrite the weights in place. Raises ValueError, and changes nothing, if names or shapes
    differ, or numbers are not finite.
    """
    if isinstance(source, str | Path):
        files = need_weight_files(source)
        source = {name: tensor for file in files for name, tensor in load_file(file).items()}
    weights = dict(source)
    state = module.state_dict()
    pointers = {state[name].data_ptr() for name in weights if name in state}
    missing = [n for n, t in state.items() if n not in weights and t.data_ptr() not in pointers]
    foreign = [name for name in weights if name not in state]
    if missing or foreign:
        raise ValueError(
            f"these weights do not belong to this model: {len(missing)} tensors are missing "
            f"({', '.join(missing[:3])}), {len(foreign)} are not known ({', '.join(foreign[:3])})"
        )
    for name, tensor in weights.items():
        if state[name].shape != tensor.shape:
            raise ValueError(
                f"weight '{name}' is {list(tensor.shape)}: expected {list(state[name].shape)}"
            )
    refuse_unusable({n: t for n, t in weights.items() if state[n].is_floating_point()})
    with torch.no_grad():
        for name, tensor in weights.items():
            state[name].copy_(tensor)


def _assign(root: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    module = root.get_submodule(owner)
    table = module._parameters if leaf in module._parameters else module._buffers
    table[leaf] = tensor  # pyright: ignore[reportArgumentType]


def end_tokens(model: Any, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the end-of-sequence ids of the generation configuration, the model and the
    tokenizer.
    """
    token_ids: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for owner in (generation, model.config, tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        if ids is not None:
            token_ids.update(ids if isinstance(ids, list | tuple) else [ids])
    return token_ids


def end_tokens_of(path: str, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the same ids for a model's folder, without loading its weights."""
    generation = None
    if (Path(path) / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(path)
    config = AutoConfig.from_pretrained(path)
    return end_tokens(SimpleNamespace(generation_config=generation, config=config), tokenizer)
