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
from trireme.engines.adapter import is_of_adapter, plain_name
from trireme.engines.sampling import log_probabilities
from trireme.engines.torch import rows
from trireme.engines.torch.composite import load_whole, may_stay
from trireme.engines.torch.linear import quicken
from trireme.engines.torch.recurrent import carry_states, is_recurrent, refuse_unknown
from trireme.engines.torch.rows import Pass, RowStore
from trireme.engines.torch.specimen import make_specimen
from trireme.engines.weights import refuse_unusable

_PROOF, _READ = (5, 3, 8, 2, 7, 1, 6, 9, 4), 4
"""A row of the proof, and the tokens of it that are read at once."""
_AGREEMENT = 5e-4  # nats, float32
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
    records_routing: bool = False
    """Whether completions have the experts that computed their tokens; for a mixture of experts."""

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
    """Load a separate model. Raises ValueError for layers of an unknown kind, or with states that
    the engine decodes otherwise than the model reads, and for missing tensors.
    """
    rows.register()
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    prove_states(config, trust_remote_code=trust_remote_code)
    model = load_whole(
        path,
        config,
        device=device,
        dtype=DTYPES[dtype],
        attn_implementation=rows.NAME,
        trust_remote_code=trust_remote_code,
    )
    quicken(model)
    carry_states(model)
    return model.eval().requires_grad_(False)


def share_shell(module: PreTrainedModel) -> PreTrainedModel:
    """Make a second module over the parameters and buffers of `module`; nothing is copied. An
    adapter of peft's is left out.
    """
    rows.register()
    prove_states(module.config)
    config = copy.deepcopy(module.config)
    config._attn_implementation = rows.NAME
    with torch.device("meta"):
        shell = type(module)(config)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not is_of_adapter(name):
            _assign(shell, plain_name(name), parameter)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        _assign(shell, name, buffer)
    quicken(shell)
    carry_states(shell)
    return shell.eval()


@torch.inference_mode()
def prove_states(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> None:
    """Raise ValueError if layers of the language model have a state, and a specimen of it decodes
    other log-probabilities token by token than it computes at once.
    """
    refuse_unknown(config)
    if not is_recurrent(config):
        return
    model = make_specimen(config, attention="eager", trust_remote_code=trust_remote_code)
    tokens = torch.tensor([_PROOF, _PROOF[::-1]]) % model.config.get_text_config().vocab_size
    expected = log_probabilities(model(input_ids=tokens, use_cache=False).logits.float())
    model.set_attn_implementation(rows.NAME)
    try:
        carry_states(model)
        store = RowStore(64)
        store.reserve(2, len(_PROOF))
        parts = [row[:_READ].tolist() for row in tokens]
        read = Pass.of(store, parts, [0, 1], [0, 0], device=torch.device("cpu"))
        passes = [(tokens[:, :_READ], read)]
        for at in range(_READ, len(_PROOF)):
            starts, ones = torch.full((2,), at, dtype=torch.long), torch.ones(2, dtype=torch.long)
            passes.append((tokens[:, at : at + 1], Pass(store, None, starts, ones, 1, at + 1)))
        got = [
            model(input_ids=ids, position_ids=one.positions, use_cache=False, rows=one).logits
            for ids, one in passes
        ]
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"model_type '{config.model_type}': the embedded engine cannot run it: {error}"
        ) from error
    worst = float((log_probabilities(torch.cat(got, 1).float()) - expected).abs().max())
    if not worst < _AGREEMENT:
        raise ValueError(
            f"model_type '{config.model_type}': token by token its layers give log-probabilities "
            f"that differ by {worst:.3g} from those of a whole text (at most {_AGREEMENT:g} "
            "allowed): the embedded engine cannot run it"
        )


def load_weights(module: PreTrainedModel, source: Mapping[str, Tensor] | str | Path) -> None:
    """Overwrite the weights in place; a composite's towers may stay what they are. Raises
    ValueError, and changes nothing, if names or shapes differ, or numbers are not finite.
    """
    if isinstance(source, str | Path):
        files = need_weight_files(source)
        source = {name: tensor for file in files for name, tensor in load_file(file).items()}
    weights = dict(source)
    state = module.state_dict()
    pointers = {state[name].data_ptr() for name in weights if name in state}
    lacking = [n for n, t in state.items() if n not in weights and t.data_ptr() not in pointers]
    stay = may_stay(module, weights) if lacking else set()
    missing = [name for name in lacking if name not in stay]
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
