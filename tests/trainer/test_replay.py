"""Router replay: tokens are computed by the experts that are recorded for them, weighted by the
routers' live scores, in every layout; the reference is transformers' own model in float64 whose
routers are written out here.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.engines.test_torch_engine import PROMPTS
from tests.engines.test_torch_engine import run as run_engine
from tests.mixtures import make_mixture, routers_of
from tests.tested import REPLAY, TESTED
from tests.tiny import make_model
from tests.trainer.own_pass import gradients
from tests.trainer.ranks import run
from tests.trainer.samples import backend_of, experiences, gap, gradients_of
from trireme.algorithms.recipes import get_recipe
from trireme.batch import Batch, flatten
from trireme.config.schema import AlgorithmConfig
from trireme.engines.engine import Sampling
from trireme.engines.sampling import log_probabilities
from trireme.engines.torch.engine import TorchEngine
from trireme.experience import Experience
from trireme.trainer.lora import Lora
from trireme.trainer.model import checkpoint_activations, load_model, token_logprobs
from trireme.trainer.pack import cut, pack, packed_tokens
from trireme.trainer.ranks import Ranks, RankSpec

EXPERTS, CHOSEN, UNKNOWN = 4, 2, 255


def _of_all(logits: Tensor, chosen: Tensor, config: Any) -> Tensor:
    weights = logits.softmax(-1).gather(1, chosen)
    normed = getattr(config, "norm_topk_prob", True)
    return weights / weights.sum(-1, keepdim=True) if normed else weights


def _of_chosen(logits: Tensor, chosen: Tensor, config: Any) -> Tensor:
    return logits.gather(1, chosen).softmax(-1)


def _of_sigmoids(logits: Tensor, chosen: Tensor, config: Any) -> Tensor:
    weights = logits.sigmoid().gather(1, chosen)
    if config.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * config.routed_scaling_factor


FORMULAS: dict[str, Callable[[Tensor, Tensor, Any], Tensor]] = {
    "qwen3_moe": _of_all,
    "mixtral": _of_all,
    "olmoe": _of_all,
    "gpt_oss": _of_chosen,
    "granitemoe": _of_chosen,
    "granitemoe_swa": _of_chosen,
    "glm4_moe": _of_sigmoids,
    "deepseek_v3": _of_sigmoids,
}
"""The weights of chosen experts, from a router's logits, for each family."""


def with_routing(samples: list[Experience], layers: int, *, seed: int = 1) -> list[Experience]:
    """The samples with random experts for each token, the same for equal beginnings of all, and
    none for the last token, one in the middle, and all of the last sample.
    """
    for e in samples[:-1]:
        rows = []
        for t in range(len(e.tokens)):
            draws = torch.Generator().manual_seed(hash(tuple(e.tokens[: t + 1].tolist())) + seed)
            rows.append(torch.rand(layers, EXPERTS, generator=draws).argsort(-1)[:, :CHOSEN])
        e.routed_experts = torch.stack(rows).to(torch.uint8)
        e.routed_experts[-1] = e.routed_experts[5] = UNKNOWN
    return samples


def forced_gradients(
    folder: Path, family: str, batch: Batch, adapt: Callable[[Any], None] = lambda _: None
) -> dict[str, Tensor]:
    """Log-probabilities and gradients of transformers' own model in float64, one sample after the
    other, whose routers compute the family's formula for the recorded experts. `adapt` changes it.
    """
    eager: Any = {"experts_implementation": "eager"}
    own = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float64, **eager
    )
    adapt(own)
    recorded: list[np.ndarray | None] = [None]

    def force(router: Any, layer: int) -> None:
        plain = router.forward

        def forward(hidden: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
            flat = hidden.reshape(-1, hidden.shape[-1])
            weight = router.weight.to(flat.dtype)  # float32 in any model, by transformers 5.24
            logits = F.linear(flat, weight, getattr(router, "bias", None))
            chosen = plain(hidden, *rest)[-1]
            if (rows := recorded[0]) is not None:
                for t, experts in enumerate(rows[:, layer].tolist()):
                    if UNKNOWN not in experts:
                        chosen[t] = torch.tensor(experts)
            return logits, FORMULAS[family](logits, chosen, own.config), chosen

        router.forward = forward

    for layer, router in enumerate(routers_of(own)):
        force(router, layer)
    parts = []
    for row, ids in enumerate(batch.tokens):
        recorded[0] = batch.routed_experts[row] if batch.routed_experts else None
        logits = own(torch.from_numpy(ids)[None], use_cache=False).logits[0]
        mine = batch.sample_ids == row
        scores = logits[batch.positions[mine] - 1] / batch.temperatures[mine, None]
        parts.append(log_probabilities(scores).gather(1, batch.targets[mine, None])[:, 0])
    return gradients(own, torch.cat(parts))


def apart(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of log-probabilities, and of gradients relative to each tensor."""
    got, expected = dict(got), dict(expected)
    difference = float((got.pop("logprobs") - expected.pop("logprobs")).abs().max())
    return max(difference, gap(got, expected))


def mixture(place: Path, family: str) -> tuple[Path, int, Batch]:
    """The folder of a random mixture, its layers with experts, and a batch with records of them."""
    folder = make_mixture(place / family, family)
    layers = len(routers_of(AutoModelForCausalLM.from_pretrained(folder)))
    return folder, layers, flatten(with_routing(experiences(), layers))


@pytest.mark.parametrize("family", FORMULAS)
def test_replayed_training_is_that_of_a_model_with_forced_routers(
    family: str, tmp_path: Path
) -> None:
    folder, layers, batch = mixture(tmp_path, family)
    expected = forced_gradients(folder, family, batch)
    model = load_model(folder, device="cpu")
    own = gradients(model, token_logprobs(model, batch)[0])
    assert apart(own, expected) > 1e-2  # the routers choose other experts
    model = load_model(folder, device="cpu", replays=True)
    routers = [name for name in expected if name.endswith(("gate.weight", "router.weight"))]
    assert len(routers) == layers and all(expected[name].abs().max() > 0 for name in routers)
    for share in (True, False):
        got = gradients(model, token_logprobs(model, batch, share_prefix=share)[0])
        assert apart(got, expected) < 2e-5, share
    checkpoint_activations(model.train())
    again = gradients(model, token_logprobs(model, batch)[0])
    assert apart(again, expected) < 2e-5


def adapted(weights: dict[str, Tensor], scale: float) -> Callable[[Any], None]:
    """Freeze a model, and write an adapter's products out into its layers; `weights` are peft's."""

    def add(layer: Any, a: Tensor, b: Tensor) -> None:
        plain = layer.forward
        layer.lora_A, layer.lora_B = torch.nn.Parameter(a), torch.nn.Parameter(b)
        layer.forward = lambda x: plain(x) + scale * (x @ layer.lora_A.T) @ layer.lora_B.T

    def adapt(model: Any) -> None:
        model.requires_grad_(False)
        for name, layer in [*model.named_modules()]:
            key = f"base_model.model.{name}.lora_"
            if f"{key}A.weight" in weights:
                add(layer, *(weights[f"{key}{one}.weight"].double() for one in "AB"))

    return adapt


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_an_adapter_is_trained_as_in_a_model_with_forced_routers(
    family: str, tmp_path: Path
) -> None:
    folder, _, batch = mixture(tmp_path, family)
    modules = ("q_b_proj", "o_proj") if family == "deepseek_v3" else ("q_proj", "o_proj")
    lora = Lora(rank=2, alpha=3, target_modules=modules)
    backend = backend_of(folder, lora=lora, replays_routing=True)
    assert backend.adapter is not None
    draws = torch.Generator().manual_seed(3)
    weights = {
        name: 0.1 * torch.randn(tensor.shape, generator=draws)
        for name, tensor in backend.adapter.weights().items()
    }
    backend.adapter.load(weights)
    expected = forced_gradients(folder, family, batch, adapted(weights, scale=1.5))
    assert len(expected) == 1 + len(weights)
    for share in (True, False):
        trained = token_logprobs(backend.module, batch, share_prefix=share)[0]
        got = {
            name.replace(".default.weight", ""): tensor
            for name, tensor in gradients(backend.module, trained).items()
        }
        assert apart(got, expected) < 2e-5, share
    assert float((backend.logprobs(batch) - expected["logprobs"]).abs().max()) < 2e-5


@pytest.mark.parametrize("family", TESTED[REPLAY])
def test_other_families_replay_alike_with_and_without_shared_prefixes(
    family: str, tmp_path: Path
) -> None:
    folder, _, batch = mixture(tmp_path, family)
    plain = token_logprobs(load_model(folder, device="cpu"), batch)[0]
    model = load_model(folder, device="cpu", replays=True)
    alone, shared = (
        gradients(model, token_logprobs(model, batch, share_prefix=share)[0])
        for share in (False, True)
    )
    assert float((alone["logprobs"] - plain.detach()).abs().max()) > 1e-3
    assert apart(shared, alone) < 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixture(tmp_path_factory.mktemp("replay"), "qwen3_moe")


def test_samples_share_a_prefix_as_far_as_tokens_and_experts_are_equal() -> None:
    tokens = [7, 2, 3, 5, 1, 4]
    routing = torch.arange(24).view(6, 2, 2).to(torch.uint8)
    other = routing.clone()
    other[3, 1, 0] = 99
    same, differs, none = (
        flatten([Experience(tokens, prompt_length=1, routed_experts=r) for r in (routing, r2)])
        for r2 in (routing, other, None)
    )
    assert [packed_tokens(b) for b in (same, differs, none)] == [5, 5 + 2, 5 + 5]
    packed = pack(differs)
    assert packed.routed_experts is not None
    for sample, rows in enumerate(differs.routed_experts):
        at = packed.predecessors[differs.sample_ids == sample]
        assert rows is not None
        assert torch.equal(packed.routed_experts[at], torch.from_numpy(rows[:5]))
    # a micro-batch has the experts of its own samples
    [first, second] = cut(none, 5)
    assert first.routed_experts[0] is not None and second.routed_experts == (None,)
    assert pack(second).routed_experts is None


def test_experts_of_two_models_in_one_batch_are_refused() -> None:
    one, two = (
        Experience([1, 2, 3], prompt_length=1, routed_experts=torch.zeros(3, layers, 2).byte())
        for layers in (2, 3)
    )
    with pytest.raises(ValueError, match=r"of \[2, 2\] layers and experts .* of one model"):
        flatten([one, two])


OTHERS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "fewer experts": (lambda own: own[..., :1], r"of \[3, 1\] layers and experts"),
    "fewer layers": (lambda own: own[:, :2], r"of \[2, 2\] layers and experts"),
    "more layers": (lambda own: own[:, [0, 1, 2, 2]], r"of \[4, 2\] layers and experts"),
    "another expert": (lambda own: own + 3, r"with the expert [4-6] at token 0"),
    "half a record": (
        lambda own: own.index_fill(2, torch.tensor(1), UNKNOWN),
        r"with the expert 255 at token 0",
    ),
}
"""Changes of the experts [T, 3, 2] that a model has recorded, and what is said of them."""


def _with_experts_of_another(place: RankSpec | None, path: Path, which: str) -> str:
    ranks = Ranks(place) if place else None
    backend = backend_of(path, ranks, replays_routing=True)
    samples = with_routing(experiences(), 3)
    for e in samples[:-1]:  # one has a record
        e.routed_experts = None if e is not samples[2] else e.routed_experts
    own = samples[2].routed_experts
    assert own is not None
    samples[2].routed_experts = OTHERS[which][0](own)
    recipe: Any = get_recipe(AlgorithmConfig(algorithm_type="grpo", kl_loss_fn="none"))
    with pytest.raises(ValueError) as caught:
        gradients_of(backend, recipe, samples)
    if ranks:
        ranks.close()
    return str(caught.value)


@pytest.mark.parametrize("which", OTHERS)
def test_experts_of_another_model_are_refused(folder: Path, which: str) -> None:
    said = _with_experts_of_another(None, folder, which)
    assert re.match(
        f"experience 0/0/2/0 has routed_experts {OTHERS[which][1]}: expected those of this model, "
        r"\[3, 2\] with experts from 0 to 3, ",
        said,
    )


def test_experts_of_another_model_are_named_on_all_ranks(folder: Path, tmp_path: Path) -> None:
    """One rank raised, and the others waited for it in a collective."""
    which = "fewer layers"
    first, second = run(_with_experts_of_another, tmp_path / "ranks", folder, which)
    assert first == second == _with_experts_of_another(None, folder, which)


@pytest.mark.parametrize("lora", [False, True])
def test_the_policy_replays_and_its_reference_does_not(folder: Path, lora: bool) -> None:
    batch = flatten(with_routing(experiences(), 3))
    plain = backend_of(folder).logprobs(batch)
    options: dict[str, Any] = {"lora": Lora(rank=2, target_modules=("q_proj",))} if lora else {}
    backend = backend_of(folder, reference=True, replays_routing=True, **options)
    assert float((backend.logprobs(batch) - plain).abs().max()) > 1e-3
    assert float((backend.logprobs(batch, reference=True) - plain).abs().max()) < 1e-5
    without = replace(batch, routed_experts=())
    assert float((backend.logprobs(without) - plain).abs().max()) < 1e-5


def test_records_that_are_not_replayed_change_nothing(folder: Path) -> None:
    """As with explorer.rollout_model.enable_return_routed_experts alone; from any two models."""
    recipe: Any = get_recipe(AlgorithmConfig(algorithm_type="grpo", kl_loss_fn="none"))
    plain, recorded = experiences(), with_routing(experiences(), 3)
    recorded[1].routed_experts = torch.zeros(len(recorded[1].tokens), 9, 1).byte()
    (expected, without), (got, metrics) = (
        gradients_of(backend_of(folder), recipe, samples) for samples in (plain, recorded)
    )
    assert gap(got, expected) == 0
    assert set(metrics) == set(without) and "rollout/routing_recorded" not in metrics
    replaying = backend_of(folder, replays_routing=True)
    samples = with_routing(experiences(), 3)
    assert gap(gradients_of(replaying, recipe, samples)[0], expected) > 1e-2


def test_blocks_that_replay_are_not_compiled(folder: Path) -> None:
    batch = flatten(with_routing(experiences(), 3))
    one, other = (backend_of(folder, replays_routing=True, compile=c) for c in (False, True))
    assert torch.equal(one.logprobs(batch), other.logprobs(batch))


def test_a_model_without_routers_is_refused(tiny_dir: Path) -> None:
    with pytest.raises(ValueError, match="'qwen3' has no router that is known: router replay"):
        load_model(tiny_dir, device="cpu", replays=True)


def _learned(place: RankSpec | None, path: Path, lora: bool) -> dict[str, Tensor]:
    """Log-probabilities and gradients; ranks recompute activations, one process does not."""
    ranks = Ranks(place) if place else None
    options: dict[str, Any] = {"replays_routing": True, "gradient_checkpointing": bool(place)}
    if lora:
        options["lora"] = Lora(rank=2, alpha=3, target_modules=("q_proj", "o_proj"))
    backend = backend_of(path, ranks, **options)
    if backend.adapter is not None:  # a new one's product is 0
        draws = torch.Generator().manual_seed(3)
        weights = {
            name: 0.1 * torch.randn(tensor.shape, generator=draws)
            for name, tensor in sorted(backend.adapter.weights().items())
        }
        backend.adapter.load(weights)
    samples = with_routing(experiences(), 3)
    out = {"logprobs": backend.logprobs(flatten(samples))}
    recipe: Any = get_recipe(AlgorithmConfig(algorithm_type="grpo", kl_loss_fn="none"))
    out |= gradients_of(backend, recipe, samples)[0]
    if ranks:
        ranks.close()
    return out


@pytest.mark.parametrize(("tie", "lora"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("place", [{}, {"sequence": 2}])
def test_two_ranks_that_recompute_learn_what_one_process_learns(
    place: dict[str, int], tie: bool, lora: bool, tmp_path: Path
) -> None:
    """On ranks, embedding and head are in one group: one tensor if they are tied, else two."""
    folder = make_model(tmp_path / "model", "qwen3_moe", layers=3, tie=tie)
    expected = _learned(None, folder, lora)
    assert ("lm_head.weight" in expected) == (not tie) and len(expected) > 10
    for got in run(_learned, tmp_path / "ranks", folder, lora, **place):
        assert apart(got, expected) < 1e-5


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_replay_takes_the_gap_of_a_mixture_to_that_of_a_dense_model(
    family: str, tmp_path: Path
) -> None:
    """An engine in bfloat16 and a trainer in float32: rounding chooses other experts."""

    def gaps(arch: str) -> list[float]:
        folder = make_model(tmp_path / arch, arch, layers=3, hidden=64)
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        torch.manual_seed(0)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim > 1:
                    weight.normal_(std=1.2 * weight.shape[-1] ** -0.5)
                if name.endswith(("gate.weight", "router.weight")):
                    weight.mul_(0.2)  # of experts whose probabilities are near one another
        model.to(torch.bfloat16).save_pretrained(folder)  # trainer and engine read the same numbers
        mixture = arch != "qwen3"
        some = Sampling(max_tokens=15, n=3, ignore_eos=True)

        async def main(engine: TorchEngine) -> Any:
            return await asyncio.gather(
                *(engine.generate(p, some, key=(1, i, 0)) for i, p in enumerate(PROMPTS))
            )

        replies = run_engine(folder, main, dtype="bfloat16", records_routing=mixture, fast=False)
        samples = []
        for prompt, each in zip(PROMPTS, replies, strict=True):
            for reply in each:
                tokens = torch.tensor(prompt + reply.ids)
                routing = None
                if mixture:
                    routing = torch.full((len(tokens), *reply.routed_experts.shape[1:]), UNKNOWN)
                    routing[:-1] = torch.from_numpy(reply.routed_experts)
                    routing = routing.to(torch.uint8)
                sample = Experience(
                    tokens,
                    prompt_length=len(prompt),
                    logprobs=reply.logprobs,
                    routed_experts=routing,
                )
                samples.append(sample)
        batch = flatten(samples)
        out = []
        for replays in (False, True)[: 1 + mixture]:
            scored = backend_of(folder, replays_routing=replays).logprobs(batch)
            out.append(float((scored - batch.fields["old_logprobs"]).abs().max()))
        return out

    [dense] = gaps("qwen3")
    without, replayed = gaps(family)
    print(f"{family}: {without:.3g} nats without replay, {replayed:.3g} with, dense {dense:.3g}")
    assert replayed < 3 * dense
    assert without > 3 * replayed
