"""Compiled blocks: one graph for all layers and shapes, and the numbers of eager mode."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny import make_model
from tests.trainer.ranks import run
from tests.trainer.samples import backend_of, critic_of, experiences
from tests.trainer.test_fsdp2 import _learned, _same
from trireme.batch import Batch, flatten, of_tokens
from trireme.trainer import compiled
from trireme.trainer.backend import Backend
from trireme.trainer.lora import Lora
from trireme.trainer.ranks import Ranks, RankSpec, whole

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TYPES = ["sliding_attention", "full_attention"] * 2
# Model -> what else its configuration says, and how many kinds of blocks that makes.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "qwen2": ({}, 1),
    "qwen3": ({}, 1),
    "llama": ({}, 1),
    "mistral": ({"sliding_window": 16}, 1),
    "gemma2": ({"attn_logit_softcapping": None, "sliding_window": 16}, 2),
    "gemma3_text": ({"sliding_window": 16, "layer_types": TYPES}, 2),
}
TRIED_ALWAYS = ("qwen3", "gemma3_text")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are captured and differentiated as ever, and then run by torch's own operators."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()


def made(folder: Path, kind: str) -> Path:
    more, _ = MODELS[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | more))
    model.save_pretrained(folder)
    return folder


def drawn(rng: np.random.Generator) -> Batch:
    """One to five rows behind a common prefix."""
    prefix = rng.integers(1, 300, rng.integers(1, 40)).tolist()
    rows = (rng.integers(1, 300, rng.integers(1, 60)).tolist() for _ in range(rng.integers(1, 6)))
    return of_tokens([prefix + row for row in rows])


def gradients(backend: Backend, batch: Batch) -> dict[str, Tensor]:
    backend.optimizer.inner.zero_grad()
    batch = batch.with_fields(scale=torch.linspace(-1, 1, batch.num_tokens))
    backend.forward_backward(
        batch, lambda part, logprobs, _: (logprobs * part.fields["scale"]).sum()
    )
    named = backend.module.named_parameters()
    return {name: whole(p.grad).clone() for name, p in named if p.grad is not None}


def attentions() -> list[Any]:
    """What is kept of attention until its backward pass."""
    return [held.thing for held in compiled._held.values() if isinstance(held.thing, tuple)]


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [*((kind, 15) for kind in TRIED_ALWAYS)]
    + [pytest.param(kind, 100, marks=pytest.mark.large) for kind in MODELS],
)
def test_a_graph_serves_all_blocks_of_a_kind_and_all_shapes(
    kind: str, shapes: int, tmp_path, quick
):
    path = made(tmp_path, kind)
    eager, ours = (backend_of(path, max_token_len=400, compile=c) for c in (False, True))
    rng = np.random.default_rng(0)
    batches = [drawn(rng) for _ in range(shapes)]
    for batch in [of_tokens([[1, 1]]), *batches[:5], of_tokens([[1, 1]])]:
        expected, got = gradients(eager, batch), gradients(ours, batch)
        assert got.keys() == expected.keys()
        for name, gradient in expected.items():
            assert torch.allclose(got[name], gradient, atol=1e-5), name
    for batch in batches[5:]:
        assert torch.allclose(ours.logprobs(batch), eager.logprobs(batch), atol=1e-5)
        gradients(ours, batch)
    _, kinds = MODELS[kind]
    # a single token is a graph of its own, and so is a forward pass without gradients
    assert counters["stats"]["unique_graphs"] <= 3 * kinds
    assert not counters["graph_break"]
    assert not attentions()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.large)])
def test_no_more_is_kept_for_the_backward_pass_than_in_eager_mode(
    checkpointing: bool, tmp_path, monkeypatch
):
    monkeypatch.setattr("trireme.trainer.model.hasten", lambda model: None)
    path = made(tmp_path, "qwen3")
    sizes: list[int] = []
    counts: list[int] = []
    for compiles in (False, True):
        options: dict[str, Any] = {"gradient_checkpointing": checkpointing, "compile": compiles}
        backend = backend_of(path, max_token_len=10_000, **options)
        kept: dict[int, int] = {}

        def keep(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        def loss(part: Batch, logprobs: Tensor, _: Tensor | None) -> Tensor:
            counts.append(len(attentions()))
            return logprobs.sum()

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            backend.forward_backward(flatten(experiences()), loss)
        sizes.append(sum(kept.values()))
    eager, ours = sizes
    assert ours <= eager
    assert counts == [0, 0 if checkpointing else 4]


@pytest.mark.usefixtures("quick")
def test_a_critic_is_compiled_too(tmp_path):
    path = make_model(tmp_path)
    batch = flatten(experiences())
    returns = torch.linspace(-1, 1, batch.num_tokens)
    batch = batch.with_fields(values=torch.zeros(batch.num_tokens), returns=returns)
    eager, ours = (critic_of(path, max_token_len=400, compile=c) for c in (False, True))
    for _ in range(2):  # the head begins at 0
        expected, got = eager.update(batch), ours.update(batch)
        assert got == pytest.approx(expected, abs=1e-5)
    assert torch.allclose(ours.values(batch), eager.values(batch), atol=1e-5)
    assert counters["stats"]["unique_graphs"]


COMPILED: dict[str, dict[str, Any]] = {
    "plain": {"compile": True},
    "lora": {"compile": True, "lora": Lora(rank=4)},
    "checkpointed_offloaded": {"compile": True, "gradient_checkpointing": True, "offload": True},
}


def _on_a_rank(place: RankSpec, path: Path, name: str) -> dict[str, Tensor]:
    torch.compile = partial(torch.compile, backend="aot_eager")
    ranks = Ranks(place)
    out = gradients(backend_of(path, ranks, **COMPILED[name]), flatten(experiences()))
    ranks.close()
    return out


def _expected(path: Path, name: str) -> dict[str, Any]:
    given: dict[str, Any] = COMPILED[name] | {"compile": False, "reference": True}
    return _learned(backend_of(path, **given))


@pytest.mark.large
@pytest.mark.parametrize("name", COMPILED)
def test_two_ranks_have_compiled_the_gradients_of_one_process_in_eager_mode(name: str, tmp_path):
    path = make_model(tmp_path / "model")
    given: dict[str, Any] = COMPILED[name] | {"compile": False}
    expected = gradients(backend_of(path, **given), flatten(experiences()))
    for got in run(_on_a_rank, tmp_path / "ranks", path, name):
        assert got.keys() == expected.keys()
        for key, gradient in expected.items():
            assert torch.allclose(got[key], gradient, atol=1e-5), key


@pytest.mark.large
def test_torchs_own_compiler_learns_what_eager_mode_learns(tmp_path):
    torch._dynamo.reset()
    path = make_model(tmp_path / "model")
    for name in ("plain", "lora"):
        _same(_learned(backend_of(path, reference=True, **COMPILED[name])), _expected(path, name))


@pytest.mark.large
def test_bfloat16_is_rounded_no_more_than_in_eager_mode(tmp_path):
    torch._dynamo.reset()
    path, batch = made(tmp_path, "qwen3"), flatten(experiences())
    exact = gradients(backend_of(path), batch)
    off: list[float] = []
    for compiles in (False, True):
        got = gradients(backend_of(path, dtype="bfloat16", compile=compiles), batch)
        off.append(float(sum((got[n] - g).norm() ** 2 for n, g in exact.items())) ** 0.5)
    assert 0 < off[1] < 1.2 * off[0]
    assert off[0] < 0.2 * float(sum(g.norm() ** 2 for g in exact.values())) ** 0.5


@pytest.mark.large
def test_a_run_goes_on_from_a_checkpoint_compiled_as_before(tmp_path):
    torch._dynamo.reset()
    path = make_model(tmp_path / "model")

    def steps(backend: Backend, numbers: range) -> None:
        for n in numbers:
            backend.forward_backward(
                flatten(experiences(n)), lambda _, logprobs, __: logprobs.mean()
            )
            backend.step()

    whole = backend_of(path, compile=True)
    steps(whole, range(4))
    first = backend_of(path, compile=True)
    steps(first, range(2))
    (tmp_path / "saved").mkdir()
    first.save(tmp_path / "saved", hf=False)
    torch._dynamo.reset()  # as a new process, which first meets other shapes
    again = backend_of(path, compile=True)
    again.load(tmp_path / "saved")
    steps(again, range(2, 4))
    for name, tensor in whole.each_weight():
        assert torch.allclose(again.weights()[name], tensor, atol=1e-6), name
