"""The compiled passes against transformers' own in float64, and where they leave them the work."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from tests.ext.fast_engine.test_lean import CONFIGS, make
from tests.trainer.own_pass import gradients
from tests.trainer.samples import backend_of, experiences
from trireme.batch import Batch, flatten, of_tokens
from trireme.engines.sampling import log_probabilities
from trireme.engines.torch.composite import text_model
from trireme.engines.torch.linear import quicken
from trireme.ext.fast_trainer import passes
from trireme.ext.fast_trainer.call import Call, Compiled
from trireme.ext.fast_trainer.passes import make_pass
from trireme.trainer.compiled import compile_blocks
from trireme.trainer.model import (
    checkpoint_activations,
    hidden_states,
    load_model,
    token_logprobs,
)
from trireme.trainer.pack import pack_for
from trireme.trainer.ranks import blocks

CPU = torch.device("cpu")
_AGREEMENT = 2e-5
"""Of a tensor's largest number, which the module in float32 reaches as well."""


def _rows() -> list[list[int]]:
    """Rows of one token and of many, beyond the queries and the keys that are attended together;
    replies that branch early and late, equal ones, and one that another extends.
    """
    draw = torch.Generator().manual_seed(3)

    def ids(n: int) -> list[int]:
        return torch.randint(3, 90, (n,), generator=draw).tolist()

    prompt, branch = ids(37), ids(9)
    replies = [ids(1), ids(33), branch + ids(70), branch + ids(5), branch + ids(16)]
    step = [*ids(50), 5]
    rows = [*(prompt + reply for reply in replies), prompt + replies[1], ids(2)]
    return [*rows, step, step + ids(8), ids(180)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the compiled functions that were called."""
    names: list[str] = []
    invoke = Compiled.invoke

    def noted(self: Compiled, name: str, one: Any) -> None:
        names.append(name)
        invoke(self, name, one)

    monkeypatch.setattr(Compiled, "invoke", noted)
    return names


def _own(folder: Path, batch: Batch) -> dict[str, Tensor]:
    """Log-probabilities and gradients by transformers in float64, a row at a time."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float64
    )
    parts = []
    for number, ids in enumerate(batch.tokens):
        logits = model(torch.from_numpy(ids)[None], use_cache=False).logits[0]
        here = batch.sample_ids == number
        scores = logits[batch.positions[here] - 1] / batch.temperatures[here, None]
        parts.append(log_probabilities(scores).gather(1, batch.targets[here, None])[:, 0])
    return gradients(model, torch.cat(parts))


def _ours(model: PreTrainedModel, batch: Batch) -> dict[str, Tensor]:
    return gradients(model, token_logprobs(model, batch)[0])


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        *((kind, {}) for kind in CONFIGS),
        # of no width that vectors have: 20, 44, heads of 6, four of keys
        ("qwen3", {"hidden_size": 20, "intermediate_size": 44, "head_dim": 6}),
        ("llama3", {"hidden_size": 64, "num_attention_heads": 1, "num_hidden_layers": 1}),
    ],
)
def test_logprobs_and_gradients_are_those_of_transformers(kind, sizes, tmp_path, calls):
    folder = make(tmp_path, kind, max_position_embeddings=512, **sizes)
    batch = of_tokens(_rows(), temperature=0.8)
    model = load_model(folder, device="cpu")
    expected, got = _own(folder, batch), _ours(model, batch)
    assert calls[-2:] == ["forward", "backward"]
    assert expected.keys() == got.keys()
    for name, exact in expected.items():
        gap = (got[name].double() - exact).abs().max() / exact.abs().max()
        assert gap < _AGREEMENT, f"{name}: {gap:.3g}"
    with torch.no_grad():
        assert torch.equal(token_logprobs(model, batch)[0], got["logprobs"])


def test_the_number_of_threads_changes_no_bit(tmp_path):
    model = load_model(make(tmp_path, "qwen3", max_position_embeddings=512), device="cpu")
    packed = pack_for(model, CPU, of_tokens(_rows()))
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            hidden = hidden_states(model, packed)
            slope = torch.linspace(-1, 1, hidden.numel()).view_as(hidden)
            weights = list(text_model(model).layers.parameters())  # pyright: ignore
            results.append([hidden, *torch.autograd.grad(hidden, weights, slope)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_a_row_has_the_same_bits_alone(tmp_path):
    model = load_model(make(tmp_path, "llama", max_position_embeddings=512), device="cpu")
    rows = _rows()
    together = pack_for(model, CPU, of_tokens(rows), share_prefix=False)
    with torch.no_grad():
        parts = hidden_states(model, together).split([len(row) - 1 for row in rows])
        for row, part in zip(rows, parts, strict=True):
            alone = pack_for(model, CPU, of_tokens([row]))
            assert torch.equal(hidden_states(model, alone), part)


def test_a_copy_computes_by_its_own_weights(tmp_path, calls):
    model = load_model(make(tmp_path, "qwen3"), device="cpu")
    batch = of_tokens([[5, 6, 7, 8]])
    before = token_logprobs(model, batch)[0]
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    assert torch.equal(token_logprobs(model, batch)[0], before)
    assert not torch.equal(token_logprobs(other, batch)[0], before)
    assert calls.count("forward") == 4  # the first was the specimen's


def test_frozen_weights_get_no_gradient(tmp_path, calls):
    model = load_model(make(tmp_path, "qwen2"), device="cpu")
    base: Any = text_model(model)
    whole = _ours(model, batch := of_tokens(_rows()[:4]))
    base.embed_tokens.requires_grad_(False)
    base.layers[1].self_attn.k_proj.requires_grad_(False)
    base.norm.requires_grad_(False)
    some = _ours(model, batch)
    frozen = {"model.embed_tokens.weight", "model.norm.weight"}
    frozen |= {f"model.layers.1.self_attn.k_proj.{kind}" for kind in ("weight", "bias")}
    assert whole.keys() - some.keys() == frozen
    assert all(torch.equal(whole[name], one) for name, one in some.items())
    assert calls[-1] == "backward"


def test_gradients_of_micro_batches_add_up(tmp_path):
    model = load_model(make(tmp_path, "qwen3"), device="cpu")
    rows = _rows()[:5]
    once = _ours(model, of_tokens([*rows, *rows[:2]]))
    model.zero_grad()
    weights = torch.linspace(-1, 1, len(once["logprobs"]))
    for part in (slice(0, 3), slice(3, 7)):
        batch = of_tokens([*rows, *rows[:2]][part])
        counts = [len(row) - 1 for row in [*rows, *rows[:2]]]
        begin, end = sum(counts[: part.start]), sum(counts[: part.stop])
        (token_logprobs(model, batch)[0] * weights[begin:end]).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        gap = (parameter.grad - once[name]).abs().max() / once[name].abs().max()
        assert gap < _AGREEMENT, name


def test_weights_that_changed_before_the_backward_pass_are_refused(tmp_path):
    model = load_model(make(tmp_path, "qwen3"), device="cpu")
    logprobs = token_logprobs(model, of_tokens([[5, 6, 7]]))[0]
    with torch.no_grad():
        text_model(model).layers[0].mlp.up_proj.weight.mul_(2)  # pyright: ignore
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


def test_a_second_backward_pass_is_refused_as_torch_does(tmp_path):
    model = load_model(make(tmp_path, "qwen3"), device="cpu")
    hidden = hidden_states(model, pack_for(model, CPU, of_tokens([[5, 6, 7]])))
    hidden.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        hidden.sum().backward()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_reaches_the_loss(number, tmp_path):
    folder = make(tmp_path, "qwen3")
    for place in ("q_proj", "v_proj"):
        model = load_model(folder, device="cpu")
        with torch.no_grad():
            getattr(text_model(model).layers[0].self_attn, place).weight[3, 1] = number  # pyright: ignore
        logprobs = token_logprobs(model, of_tokens([[5, 6, 7, 8]]))[0]
        assert not logprobs.isfinite().any()


def _adapted(model: PreTrainedModel) -> None:
    from trireme.trainer.lora import Adapter, Lora

    Adapter(model, Lora(rank=2, alpha=4))


def _hooked(model: PreTrainedModel) -> None:
    layer: Any = text_model(model).layers[0]  # pyright: ignore
    layer.mlp.register_forward_hook(lambda *_: None)


def _compiled(model: PreTrainedModel) -> None:
    # graphs are captured as ever, and then run by torch's own operators: to write code takes 20 s
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        compile_blocks(blocks(model))


def _checkpointed(model: PreTrainedModel) -> None:
    checkpoint_activations(model)
    model.train()


def _doubled(model: PreTrainedModel) -> None:
    model.double()


@pytest.mark.parametrize(
    ("change", "around"),
    [
        (_adapted, nullcontext),
        (_hooked, nullcontext),
        (_compiled, nullcontext),
        (_checkpointed, nullcontext),
        (_doubled, nullcontext),
        (lambda _: None, lambda: torch.autocast("cpu", torch.bfloat16)),
        (lambda _: None, lambda: FlopCounterMode(display=False)),
    ],
    ids=["adapter", "hook", "compiled", "checkpointed", "float64", "autocast", "watched"],
)
def test_what_they_do_not_compute_is_transformers(
    change: Callable[[PreTrainedModel], None],
    around: Callable[[], AbstractContextManager],
    tmp_path: Path,
    calls: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    model = load_model(make(tmp_path, "qwen3"), device="cpu")
    change(model)
    calls.clear()
    with around():
        for _ in range(2):
            token_logprobs(model, of_tokens([[5, 6, 7]]))[0].sum().backward()
    assert calls == []
    said = [record.message for record in caplog.records if "micro-batches" in record.message]
    why = f": blocks are recomputed ({passes.RECOMPUTES})" if change is _checkpointed else ""
    assert said == [f"micro-batches are computed by transformers' own passes{why}"]


def test_a_window_and_a_large_model_are_transformers(tmp_path, monkeypatch):
    folder = make(tmp_path, "qwen3")
    assert make_pass(load_model(folder, device="cpu")) is not None
    monkeypatch.setattr(passes, "MOST_WEIGHTS", 1000)
    assert make_pass(load_model(folder, device="cpu")) is None
    monkeypatch.undo()
    config = Qwen3Config(**CONFIGS["qwen3"][1], use_sliding_window=True, sliding_window=4,
                         max_window_layers=1, num_hidden_layers=2)  # fmt: skip
    small = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 50}
    config.update(small)
    model = AutoModelForCausalLM.from_config(config)
    assert make_pass(model) is None


def test_without_a_compiler_there_are_none(tmp_path, monkeypatch, calls):
    monkeypatch.setenv("PATH", "")
    from trireme.ext.fast_engine import native

    native._load.cache_clear()
    try:
        model = load_model(make(tmp_path, "qwen3"), device="cpu")
        token_logprobs(model, of_tokens([[5, 6, 7]]))
    finally:
        native._load.cache_clear()
    assert calls == []


def test_passes_that_differ_on_the_specimen_are_not_used(tmp_path, monkeypatch):
    folder = make(tmp_path, "qwen3")
    backward = Call.backward

    def wrong(self: Any, gradient: Tensor) -> tuple[Tensor, list[Tensor]]:
        by_x, made = backward(self, gradient)
        made[3] *= 1.001
        return by_x, made

    monkeypatch.setattr(Call, "backward", wrong)
    assert make_pass(load_model(folder, device="cpu")) is None


def test_a_backend_trains_by_them(tmp_path, calls):
    backend = backend_of(make(tmp_path, "qwen3"), reference=True)
    batch = flatten(experiences())
    calls.clear()
    backend.logprobs(batch, reference=True)
    backend.forward_backward(batch, lambda part, logprobs, _: logprobs.sum() / 100)
    assert backend.step()["actor/grad_norm"] > 0
    assert set(calls) == {"forward", "backward"}
    assert backend.measures.arithmetic.take() > 0


def test_the_log_names_the_passes_that_are_used_once(tmp_path, caplog):
    caplog.set_level("INFO")
    model = load_model(make(tmp_path, "qwen3"), device="cpu")
    for ids in ([5, 6, 7], [5, 6]):
        token_logprobs(model, of_tokens([ids]))
    said = [record.message for record in caplog.records if "micro-batches" in record.message]
    assert said == ["micro-batches are computed by compiled passes"]


def test_a_model_that_is_loaded_without_gradients_trains_by_them(tmp_path, calls):
    with torch.no_grad():
        model = load_model(make(tmp_path, "qwen3"), device="cpu")
    calls.clear()
    token_logprobs(model, of_tokens([[5, 6, 7]]))[0].sum().backward()
    assert calls == ["forward", "backward"]


def test_quickened_layers_are_plain(tmp_path, calls):
    model = load_model(make(tmp_path, "qwen3"), device="cpu")
    quicken(model)
    calls.clear()
    token_logprobs(model, of_tokens([[5, 6, 7]]))
    assert calls == ["forward"]
