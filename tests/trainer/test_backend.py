"""Backend: scores like the plain model, resumes byte for byte, writes Hugging Face names."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.tiny import make_model
from tests.trainer.samples import VOCABULARY, backend_of, critic_of, experiences, optimizer_of
from trireme.algorithms.recipes import get_recipe
from trireme.batch import Batch, flatten
from trireme.engines.torch.recurrent import is_recurrent
from trireme.engines.torch.shell import load_shell
from trireme.experience import EID, Experience
from trireme.trainer.backend import Backend
from trireme.trainer.model import load_model
from trireme.trainer.step import train_step

RECIPE = get_recipe(SimpleNamespace(algorithm_type="grpo"))


def _backend(path, **given) -> Backend:
    return backend_of(path, reference=True, **given)


@pytest.mark.parametrize("arch", ["qwen3", "qwen2", "llama"])
def test_scores_are_those_of_the_plain_model(arch, tmp_path):
    path = make_model(tmp_path / arch, arch)
    plain = AutoModelForCausalLM.from_pretrained(path).double()
    rows = [[5, 6, 7, 8, 9], [5, 6, 7, 1], [40, 41]]
    for row, scored in zip(rows, _backend(path).score(rows, temperature=0.5), strict=True):
        with torch.no_grad():
            logprobs = (plain(torch.tensor([row])).logits[0] / 0.5).log_softmax(-1)
        expected = [0.0, *(float(logprobs[t - 1, row[t]]) for t in range(1, len(row)))]
        assert scored == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("place", "wrong"), [(1, 10**6), (3, 100), (0, -1)])
def test_an_id_that_the_model_does_not_have_is_named(place, wrong, tiny_dir):
    right, foreign = [5, 6, 7, 8], [5, 6, 7, 8]
    foreign[place] = wrong
    batch = flatten(
        [
            Experience(ids, prompt_length=1, reward=1.0, eid=EID(3, n), logprobs=[-1.0] * 3)
            for n, ids in enumerate([right, right, foreign])
        ]
    )
    says = rf"experience 3/2/0/0 holds the id {wrong} \(at {place}\): expected 0 to 99, this model"
    with pytest.raises(ValueError, match=says):
        _backend(tiny_dir).logprobs(batch)


def test_sliding_windows_are_honoured(tmp_path):
    config = Qwen3Config(
        vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, use_sliding_window=True, sliding_window=4,
        max_window_layers=1,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).double()
    assert plain.config.layer_types == ["full_attention", "sliding_attention"]
    rows = [[*range(20), 3, 4], [*range(20), 7, 8, 9]]
    for row, scored in zip(rows, _backend(tmp_path).score(rows), strict=True):
        with torch.no_grad():
            logprobs = plain(torch.tensor([row])).logits[0].log_softmax(-1)
        expected = [0.0, *(float(logprobs[t - 1, row[t]]) for t in range(1, len(row)))]
        assert scored == pytest.approx(expected, abs=1e-5)


def test_the_reference_stays_while_the_model_learns(tiny_dir):
    backend = _backend(tiny_dir)
    batch = flatten(experiences())
    before = backend.logprobs(batch)
    train_step(backend, RECIPE, experiences(), version=0)
    assert torch.equal(backend.logprobs(batch, reference=True), before)
    assert not torch.allclose(backend.logprobs(batch), before)


def test_a_resumed_run_ends_with_the_same_bytes(tiny_dir, tmp_path):
    def steps(backend, numbers):
        for number in numbers:
            train_step(backend, RECIPE, experiences(number), version=0)

    settings = optimizer_of(lr_scheduler_type="cosine", lr_warmup_steps=2)
    whole = _backend(tiny_dir, optimizer=settings, total_steps=5)
    steps(whole, [0, 1])
    whole.save(tmp_path, hf=False)
    steps(whole, [2, 3])
    resumed = _backend(tiny_dir, optimizer=settings, total_steps=5)
    resumed.load(tmp_path)
    steps(resumed, [2, 3])
    for name, weight in whole.weights().items():
        assert torch.equal(resumed.weights()[name], weight), name


@pytest.mark.parametrize("tie", [True, False])
def test_weights_are_those_that_save_pretrained_writes(tie, tmp_path):
    backend = _backend(make_model(tmp_path / "model", tie=tie))
    backend.module.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    weights = backend.weights()
    assert set(weights) == set(saved)
    assert all(torch.equal(weights[name], saved[name]) for name in saved)


def test_the_schedule_and_the_clipped_norm_are_reported(tiny_dir):
    backend = _backend(tiny_dir, optimizer=optimizer_of(lr_warmup_steps=4), grad_clip=1e-3)
    metrics = train_step(backend, RECIPE, experiences(), version=0)
    assert metrics["actor/lr"] == pytest.approx(2.5e-4)
    assert metrics["actor/grad_norm"] > 1e-3


@pytest.mark.parametrize("load", [load_model, partial(load_shell, dtype="float32")])
def test_trainer_and_engine_refuse_layers_of_an_unknown_kind_by_name(tmp_path, load):
    config = AutoConfig.for_model("qwen3", num_hidden_layers=2)
    config.layer_types = ["full_attention", "indexed_attention"]
    config.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"'qwen3' has layers .* \(indexed_attention\): not supported"
    ):
        load(tmp_path, device="cpu")


@pytest.mark.parametrize("key", ["state_size", "ssm_state_size", "linear_num_key_heads"])
def test_a_state_is_seen_where_no_layers_are_listed(key):
    assert is_recurrent(AutoConfig.for_model("llama", **{key: 16}))
    assert not is_recurrent(AutoConfig.for_model("llama"))


def test_an_architecture_whose_attention_has_extras_is_refused(tmp_path, monkeypatch):
    path = make_model(tmp_path / "model")
    original = load_model.__globals__["token_logprobs"]

    def off(*args, **kwargs):
        logprobs, entropies = original(*args, **kwargs)
        return logprobs + 0.1, entropies

    monkeypatch.setitem(load_model.__globals__, "token_logprobs", off)
    with pytest.raises(ValueError, match=r"'qwen3': packed attention gives .* differ by 0.1"):
        load_model(path, device="cpu")


@pytest.mark.parametrize("chance", ["resid_pdrop", "embd_pdrop"])
def test_a_models_own_dropout_stays_off_when_activations_are_computed_again(
    tmp_path: Path, chance: str
) -> None:
    config = PhiConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=None,
    )
    setattr(config, chance, 0.5)
    PhiForCausalLM(config).save_pretrained(tmp_path)
    backend = backend_of(tmp_path, gradient_checkpointing=True)
    batch = flatten(experiences())
    trained: list[torch.Tensor] = []

    def loss(part: Batch, logprobs: torch.Tensor, _: object) -> torch.Tensor:
        trained.append(logprobs.detach())
        return logprobs.sum()

    backend.forward_backward(batch, loss)
    backend.forward_backward(batch, loss)
    first, second = torch.cat(trained).chunk(2)
    assert torch.equal(first, second)
    scored = backend.logprobs(batch)
    assert float(torch.cat(trained).sum()) == pytest.approx(2 * float(scored.sum()), rel=1e-4)
    critic = critic_of(tmp_path, gradient_checkpointing=True)
    critic.model.train()
    assert torch.equal(critic._values(batch), critic._values(batch))
