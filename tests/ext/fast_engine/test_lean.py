"""The lean pass against transformers' own forward pass, for every family, and what it refuses."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from tests.engines.test_torch_engine import run
from tests.tiny import loaded, make_model, make_tokenizer
from tests.trainer.samples import backend_of
from trireme.engines.engine import Completion, Sampling
from trireme.engines.request import Request, make_requests
from trireme.engines.sampling import inverse_cdf
from trireme.engines.torch import linear as linear_module
from trireme.engines.torch.decoder import Decoder
from trireme.engines.torch.engine import TorchEngine
from trireme.engines.torch.prefix import SharedPrompts
from trireme.engines.torch.rows import RowStore
from trireme.engines.torch.shell import load_shell
from trireme.ext.fast_engine import lean as lean_module
from trireme.ext.fast_engine import native as native_module
from trireme.ext.fast_engine import step as step_module
from trireme.ext.fast_engine.lean import Lean, PlainOps, make_lean
from trireme.ext.fast_engine.native import SOURCE, NativeOps, Panels, _compiled, _folder, _load
from trireme.ext.fast_engine.where import Where

CPU = torch.device("cpu")
PROMPTS = [list(range(5, 5 + n)) for n in (1, 3, 17, 40)]
HEATS = ((1.0, 0.7, 0.0, 1.3), (1, 1, 1, 1))
"""A caller may give a whole number."""
SAMPLING = Sampling(max_tokens=14, n=3, temperature=0.9, ignore_eos=True)
SMALL = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 10000.0,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
}  # fmt: skip
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen2": (Qwen2Config, {"tie_word_embeddings": False}),
    "qwen3": (Qwen3Config, {"head_dim": 12, "tie_word_embeddings": True}),
    "qwen3-bias": (Qwen3Config, {"head_dim": 32, "attention_bias": True}),
    "llama": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama3": (LlamaConfig, {"rope_parameters": LLAMA3, "num_key_value_heads": 1}),
    "yarn": (LlamaConfig, {"rope_parameters": YARN, "num_key_value_heads": 4}),
    "linear": (
        Qwen2Config,
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "mistral": (MistralConfig, {"sliding_window": None, "head_dim": 16}),
}


def make(folder: Path, kind: str, **others: Any) -> Path:
    made, extra = CONFIGS[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(made(**{**SMALL, **extra, **others}))
    for name, parameter in model.named_parameters():  # from_config makes biases 0 and norms 1
        if name.endswith("bias") or "norm" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def own(folder: Path, ids: list[int], reply: Completion) -> torch.Tensor:
    """log p of a reply by the model's own forward pass over the whole row."""
    return own_scores(folder, ids + reply.ids)[len(ids) - 1 :]


def own_scores(folder: Path, ids: list[int]) -> torch.Tensor:
    """log p of all tokens but the first, at SAMPLING's temperature."""
    with torch.no_grad():
        logits = loaded(folder)(torch.tensor([ids])).logits[0, :-1]
    logprobs = (logits / SAMPLING.temperature).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


async def all_prompts(engine: TorchEngine) -> list[list[Completion]]:
    asked = (engine.generate(p, SAMPLING, key=(1, i, 0)) for i, p in enumerate(PROMPTS))
    return await asyncio.gather(*asked)


@pytest.fixture(params=["step", "native", "packed", "panels", "plain"])
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the compiled step, with compiled operators alone, with packed matrices too that oneDNN
    multiplies, or that we do, and as without a compiler.
    """
    if request.param in ("native", "packed", "panels"):
        monkeypatch.setattr(step_module, "MOST_WEIGHTS", 0)
        monkeypatch.setattr(linear_module, "_is_wide", lambda: False)
    if request.param in ("packed", "panels"):
        pack_all(monkeypatch, by_us=request.param == "panels")
    if request.param == "plain":
        monkeypatch.setattr(lean_module, "_ops", lambda _: PlainOps())
    return request.param


def pack_all(monkeypatch: pytest.MonkeyPatch, *, by_us: bool) -> None:
    """As on a processor where packed matrices are quicker, for small ones as well."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    width = NativeOps(torch.float32).panel_width if by_us else -1
    monkeypatch.setattr(native_module, "OF_AVX2", width)
    monkeypatch.setattr(native_module, "is_quicker", lambda: not by_us)
    monkeypatch.setattr(native_module, "widens", lambda: by_us)
    monkeypatch.setattr(linear_module, "_is_wide", lambda: True)
    monkeypatch.setattr(linear_module, "is_quicker", lambda: True)
    monkeypatch.setattr(linear_module, "_LEAST_WEIGHTS", 0)


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_family_gives_the_log_probabilities_of_transformers(
    tmp_path: Path, kind: str, ops: str
) -> None:
    folder = make(tmp_path, kind)

    async def main(engine: TorchEngine) -> Any:
        found = await all_prompts(engine)
        # a second turn goes on from what the first left behind, alone and beside a new prompt
        longer = [*PROMPTS[3], *found[3][0].ids, 7, 7, 7]
        turns = [await engine.generate(longer, SAMPLING), await engine.generate(longer, SAMPLING)]
        assert engine._decoder.forward is not None and engine.health().cached_tokens > 0
        return found, longer, turns, await engine.logprobs([longer], temperature=0.9)

    found, longer, turns, [scored] = run(folder, main, max_rows=7)
    pairs = [*zip(PROMPTS, found, strict=True), (longer, turns[0]), (longer, turns[1])]
    for ids, replies in pairs:
        for reply in replies:
            difference = own(folder, ids, reply) - torch.tensor(reply.logprobs)
            assert float(difference.abs().max()) < 1e-4
    assert torch.allclose(own_scores(folder, longer), torch.tensor(scored[1:]), atol=1e-4)


def test_two_engines_give_the_same_bits(tmp_path: Path, ops: str) -> None:
    folder = make(tmp_path, "qwen3")
    first, second = (run(folder, all_prompts) for _ in range(2))
    assert [[(c.ids, c.logprobs) for c in row] for row in first] == [
        [(c.ids, c.logprobs) for c in row] for row in second
    ]


def test_in_bfloat16_it_is_no_further_from_float32_than_transformers(
    tmp_path: Path, ops: str
) -> None:
    folder = make(tmp_path, "qwen2", num_key_value_heads=1)

    def error(fast: bool) -> float:
        found = run(folder, all_prompts, dtype="bfloat16", fast=fast)
        rows = [(p, reply) for p, replies in zip(PROMPTS, found, strict=True) for reply in replies]
        return sum(
            float((own(folder, p, r) - torch.tensor(r.logprobs)).square().mean()) for p, r in rows
        )

    assert error(True) < 1.5 * error(False)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_in_bfloat16_it_rounds_where_the_trainer_does(tmp_path: Path, kind: str, ops: str) -> None:
    """Of weights that are bfloat16, as a checkpoint's mostly are: scores are equal but for a token
    on the border of two roundings. A decode step sums in other orders, and crosses more of them.
    """
    folder = make_model(tmp_path, kind, hidden=64, layers=4)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.bfloat16().float().save_pretrained(folder)
    trainer = backend_of(folder, dtype="bfloat16", max_token_len=512)

    async def main(engine: TorchEngine) -> Any:
        replies = await all_prompts(engine)
        rows = [p + c.ids for p, of_prompt in zip(PROMPTS, replies, strict=True) for c in of_prompt]
        return rows, await engine.logprobs(rows, temperature=0.9)

    def apart(fast: bool) -> float:
        rows, scores = run(folder, main, dtype="bfloat16", fast=fast)
        expected = trainer.score(rows, temperature=0.9)
        gaps = [
            (torch.tensor(a) - torch.tensor(b)).abs() for a, b in zip(scores, expected, strict=True)
        ]
        return float(torch.cat(gaps).mean())

    got, others = apart(fast=True), apart(fast=False)
    assert got < 0.3 * others, (got, others)


@pytest.mark.parametrize("keep", [False, True])
def test_new_weights_reach_rows_that_share_a_prompt(tmp_path: Path, ops: str, keep: bool) -> None:
    old, new = make_model(tmp_path / "a", seed=0), make_model(tmp_path / "b", seed=1)
    sampling = Sampling(max_tokens=60, n=4, temperature=0.9, ignore_eos=True)

    async def main(engine: TorchEngine) -> Any:
        call = asyncio.ensure_future(engine.generate(PROMPTS[3], sampling))
        while engine.health().generated_tokens < 20:
            await asyncio.sleep(0.001)
        await engine.update_weights(new, 1)
        later = asyncio.ensure_future(engine.generate(PROMPTS[3], SAMPLING, key=(2, 0, 0)))
        replies = await call
        on = [*PROMPTS[3], *replies[0].ids]
        return replies, await later, on, await engine.generate(on, SAMPLING, key=(3, 0, 0))

    replies, later, on, continued = run(old, main, keep_kv=keep)
    for reply in continued:
        after = own(new, on, reply)
        assert torch.allclose(after, torch.tensor(reply.logprobs), atol=1e-4), (
            "keys and values of old weights are not in the prefix cache"
        )
    for reply in replies:
        at = reply.versions.index(1)
        before, after = own(old, PROMPTS[3], reply)[:at], own(new, PROMPTS[3], reply)[at:]
        assert 0 < at < 60
        assert torch.allclose(before, torch.tensor(reply.logprobs[:at]), atol=1e-4)
        if not keep:  # else the keys of the old weights are mixed in
            assert torch.allclose(after, torch.tensor(reply.logprobs[at:]), atol=1e-4)
    for reply in later:
        assert torch.allclose(
            own(new, PROMPTS[3], reply), torch.tensor(reply.logprobs), atol=1e-4
        ), "a prompt that old weights have read is not joined"


@pytest.mark.parametrize("by_us", [False, True])
def test_packed_copies_are_those_of_the_weights_now_and_freed_while_the_engine_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_us: bool
) -> None:
    pack_all(monkeypatch, by_us=by_us)
    monkeypatch.setattr(step_module, "MOST_WEIGHTS", 0)
    made: list[int] = []
    packed = NativeOps.packed
    monkeypatch.setattr(NativeOps, "packed", lambda *given: made.append(1) or packed(*given))
    folder = make_model(tmp_path)
    matrices = 7 * 2 + 1  # of two blocks, and the head

    async def main(engine: TorchEngine) -> None:
        async def replied(number: int) -> torch.Tensor:
            [reply] = await engine.generate(PROMPTS[3], Sampling(max_tokens=9), key=(number, 0, 0))
            model = AutoModelForCausalLM.from_pretrained(folder)
            model.load_state_dict(engine.module.state_dict())
            logits = model(torch.tensor([PROMPTS[3] + reply.ids])).logits[0]
            chosen = logits[len(PROMPTS[3]) - 1 : -1].log_softmax(-1)
            expected = chosen.gather(1, torch.tensor(reply.ids)[:, None])[:, 0]
            assert torch.allclose(expected, torch.tensor(reply.logprobs), atol=1e-4)
            return expected

        lean: Any = engine._decoder.forward
        made.clear()  # those of the specimen
        first = await replied(1)
        await replied(2)
        assert len(made) == matrices, "once for all steps"
        with torch.no_grad():  # by someone who reports it to nobody
            engine.module.lm_head.weight.mul_(1.5)
        assert not torch.equal(await replied(3), first)
        assert len(made) == 2 * matrices and lean._packed is not None
        await engine.pause()
        assert lean._packed is None
        await engine.resume()
        await replied(4)
        assert len(made) == 3 * matrices

    run(folder, main, prefix_tokens=0)


def test_who_comes_later_joins_a_prompt_that_is_there(tiny_dir: Path, ops: str) -> None:
    prompt = list(range(5, 45))

    async def main(engine: TorchEngine) -> Any:
        sampling = Sampling(max_tokens=12, n=9, temperature=0.9, ignore_eos=True)
        found = await engine.generate(prompt, sampling)
        decoder = engine._decoder
        return found, engine.health(), decoder.prompts._members, decoder.prompts._slots

    found, health, members, slots = run(tiny_dir, main, max_rows=4, prefix_tokens=0)
    # the last one comes when the others have left: it reads the prompt again
    assert health.prefilled_tokens <= 3 * (len(prompt) - 1)
    assert not members and not slots, "the slot is free when the last has left"
    for reply in found:
        assert torch.allclose(own(tiny_dir, prompt, reply), torch.tensor(reply.logprobs), atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "others", "reason"),
    [
        ("mistral", {"sliding_window": 8}, "sliding windows"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is gelu"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type is dynamic",
        ),
    ],
)
def test_another_architecture_keeps_transformers_pass_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, others: Any, reason: str
) -> None:
    folder = make(tmp_path, kind, **others)
    with caplog.at_level("INFO", "trireme"):
        assert make_lean(load_shell(folder, device="cpu", dtype="float32")) is None
    assert reason in caplog.text


def test_a_pass_that_differs_is_found_when_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(PlainOps):
        def rotate(self, x: Any, weight: Any, tables: Any, positions: Any, eps: float) -> Any:
            return super().rotate(x, weight, tables, positions // 2, eps)

    model = load_shell(make(tmp_path, "qwen3"), device="cpu", dtype="float32")
    assert make_lean(model) is not None
    monkeypatch.setattr(lean_module, "_ops", lambda _: Wrong())
    with caplog.at_level("INFO", "trireme"):
        assert make_lean(model) is None
    assert "its log-probabilities differ by" in caplog.text


def test_without_a_compiler_torchs_own_operators_do_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    _load.cache_clear()
    model = load_shell(make(tmp_path, "qwen3"), device="cpu", dtype="float32")
    with caplog.at_level("INFO", "trireme"):
        lean = make_lean(model)
    _load.cache_clear()
    assert lean is not None and isinstance(lean._ops, PlainOps)
    assert "there is no C compiler" in caplog.text


ROWS = [(7, 0, 4), (7, 0, 4), (9, 1, 6), (3, 0, 0), (8, 1, 6), (150, 0, 0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(4, 2, 32), (6, 6, 24), (8, 1, 64)])
def test_compiled_attention_equals_torchs_and_no_row_sees_the_others(
    dtype: torch.dtype, heads: int, key_heads: int, width: int
) -> None:
    torch.manual_seed(0)
    native, plain = NativeOps(dtype), PlainOps()
    q = torch.randn(6, heads, width, dtype=dtype)
    k, v = torch.randn(2, 6, key_heads, width, dtype=dtype)
    store, prompts = RowStore(2000), RowStore(99)
    store.reserve(8, 160)
    prompts.reserve(2, 8)
    for one in (store, prompts):
        for tensor in one.layer(0, k[:, :, None]):
            tensor.normal_()
    where = Where.of(ROWS, CPU)
    together = native.attend(q, k, v, 0, where, 0.25, store, prompts)
    inputs = q.float(), k.float(), v.float()
    expected = plain.attend(*inputs, 0, where, 0.25, wide(store), wide(prompts))
    # each processor adds in an order of its own: rounding of numbers up to 4
    within = 5e-6 if dtype == torch.float32 else 2e-2
    assert float((together.float() - expected).abs().max()) < within
    for row, one in enumerate(ROWS):
        alone = RowStore(2000)
        alone.reserve(1, 160)
        alone.layer(0, k[:1, :, None])
        alone.put(0, store.save([row], [160])[0], 160)
        mine = slice(row, row + 1)
        out = native.attend(
            q[mine], k[mine], v[mine], 0, Where.of([one], CPU), 0.25, alone, prompts
        )
        assert torch.equal(out[0], together[row])


@pytest.mark.parametrize("kind", ["qwen3-bias", "llama"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_of_a_compiled_step_has_the_bits_that_it_has_alone_and_is_near_float64(
    tmp_path: Path, kind: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path, kind)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    lean = make_lean(load_shell(folder, device="cpu", dtype="float32"))
    assert lean is not None and lean._compiled is not None
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    torch.manual_seed(0)
    tokens = torch.randint(5, 90, (9, 79))

    def logits(rows: slice) -> torch.Tensor:
        store, prompts = RowStore(9999), RowStore(9)
        chosen = tokens[:, rows]
        store.reserve(chosen.shape[1], 16)
        prompts.reserve(1, 1)
        where = Where.of([(0, 0, 0)] * chosen.shape[1], CPU)
        steps = []
        for ids in chosen:
            steps.append(lean.step(ids.contiguous(), where, store, prompts))
            where.next()
        return torch.stack(steps, 1)

    with torch.inference_mode():
        together = logits(slice(None))
        expected = exact(tokens.T).logits
    assert float((together - expected).abs().max()) < 2e-5 * float(expected.abs().max())
    for rows in (slice(0, 1), slice(70, 79), slice(3, 40)):
        assert torch.equal(logits(rows), together[rows])


def by_calls(
    folder: Path, samplings: list[Sampling], most: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Request], list[tuple[int, int]]]:
    """Replies to PROMPTS by a decoder, `most` tokens a call; and of each call of several tokens
    their number, and how many the first reply then has, or -1 if it has ended.
    """
    decoder = Decoder(
        load_shell(folder, device="cpu", dtype="float32"), AutoTokenizer.from_pretrained(folder),
        kv_tokens=9999, prefix_tokens=0, fast=True,
    )  # fmt: skip
    assert isinstance(decoder.forward, Lean)
    requests = [
        request
        for number, (ids, sampling) in enumerate(zip(PROMPTS, samplings, strict=True))
        for request in make_requests(
            ids, sampling, (1, number), seed=0, room=999, max_model_len=99,
            vocabulary=decoder.vocabulary, ends=[3],
        )
    ]  # fmt: skip
    calls: list[tuple[int, int]] = []
    several = decoder.forward.several

    def noted(*args: Any) -> Any:
        drawn = several(*args)
        assert drawn is not None
        first = requests[0]
        calls.append((len(drawn[0]), -1 if first.stop_reason else len(first.out)))
        return drawn

    monkeypatch.setattr(decoder.forward, "several", noted)
    admitted = requests
    while admitted or decoder.active:
        decoder.advance(admitted, steps=most, hurry=lambda: False)
        admitted = []
    return requests, calls


@pytest.mark.parametrize(("width", "out"), [(64, 96), (70, 199), (128, 16)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_by_our_panels_are_those_of_float64_and_a_row_has_the_bits_that_it_has_alone(
    width: int, out: int, biased: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias, rows = (
        torch.randn(*size, generator=generator).to(dtype)
        for size in ((out, width), (out,), (80, width))
    )
    product = Panels(NativeOps(dtype), weight, bias if biased else None)
    expected = F.linear(rows.double(), weight.double(), bias.double() if biased else None)
    alone = torch.cat([product(rows[n : n + 1]) for n in range(80)])
    # bfloat16 sums in float32, and rounds once
    rtol = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(alone.double(), expected, rtol=rtol, atol=1e-5)
    for count in range(81):
        assert torch.equal(product(rows[:count]), alone[:count])
    assert torch.equal(product(rows.t().contiguous().t()), alone)  # whose rows are not in one piece


@pytest.mark.parametrize(("threads", "heats"), zip((1, 2), HEATS, strict=True))
def test_several_tokens_in_a_call_are_those_of_one_after_another(
    tmp_path: Path, threads: int, heats: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path, "qwen3-bias")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    samplings = [
        Sampling(max_tokens=30 + 3 * i, n=9, temperature=t, min_tokens=(0, 1, 12, 29)[i % 4])
        for i, t in enumerate(heats)
    ]
    together, calls = by_calls(folder, samplings, 8, monkeypatch)
    alone, none = by_calls(folder, samplings, 1, monkeypatch)
    assert max(calls)[0] == 8 and not none
    assert {r.stop_reason for r in alone} == {"stop", "length"}
    for a, b in zip(together, alone, strict=True):
        assert a.out == b.out and a.logprobs == b.logprobs and a.stop_reason == b.stop_reason
        assert a.sampler_logprobs == b.sampler_logprobs and a.versions == b.versions
    greedy = [r for r in together if not r.sampling.temperature]
    assert bool(greedy) == (0 in heats) and not any(any(r.sampler_logprobs) for r in greedy)
    for r in alone:  # where no end may be drawn, the others are likelier than in the policy
        early, least = r.sampler_logprobs[: r.sampling.min_tokens], r.sampling.min_tokens
        assert len(r.out) > least and 3 not in r.out[:least]
        if r.sampling.temperature:
            assert all(a > b for a, b in zip(early, r.logprobs, strict=False))
            assert r.sampler_logprobs[least:] == r.logprobs[least:]


@pytest.mark.parametrize(
    "odd",
    [
        {"top_k": 5},
        {"stop": ("zz",)},
        {"logprobs": 2},
        {"stop_token_ids": (9,)},
    ],
    ids=lambda odd: next(iter(odd)),
)
def test_a_row_that_needs_more_between_two_tokens_is_decoded_one_by_one(
    tmp_path: Path, odd: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path, "llama")
    plain = Sampling(max_tokens=20, ignore_eos=True)
    first = dataclasses.replace(plain, **odd, max_tokens=30, temperature=0.5)
    _, calls = by_calls(folder, [first, plain, plain, plain], 8, monkeypatch)
    # at 20 tokens the others have ended
    least = 20 if "stop_token_ids" in odd else 30
    assert all(tokens < 0 or tokens >= least for _, tokens in calls)


def test_compiled_log_probabilities_are_those_of_float64_and_no_number_stays_none() -> None:
    torch.manual_seed(0)
    native = NativeOps(torch.float32)
    for rows, count in ((7, 5), (3, 1000), (5, 40_000)):
        logits = torch.randn(rows, count) * torch.rand(rows, 1) * 20
        logits[::2, count // 2 :] = -torch.inf
        given = logits.clone()
        found, exact = native.log_probabilities(logits), logits.double().log_softmax(-1)
        assert torch.equal(logits, given)  # not overwritten
        assert torch.equal(found.isfinite(), exact.isfinite())
        apart = (found - exact)[found.isfinite()].abs()
        assert float(apart.max()) < 4e-6  # rounding of numbers up to 80
        logits[1, 3] = torch.nan
        assert bool(native.log_probabilities(logits)[1].isnan().all())


def test_it_is_compiled_for_the_processor_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def compiled(source: Path, compiler: str, flags: list[str]) -> Path:
        asked.append(flags)
        raise OSError

    monkeypatch.setattr("trireme.ext.fast_engine.native._compiled", compiled)
    for machine, name, flag in (
        ("x86_64", "", "-march=native"),
        ("x86_64", "x86-64-v3", "-march=x86-64-v3"),
        ("aarch64", "", "-mcpu=native"),  # there clang does not know -march=native
        ("arm64", "neoverse-n1", "-mcpu=neoverse-n1"),
    ):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        monkeypatch.setenv("TRIREME_NATIVE", name)
        with pytest.raises(OSError):
            _load.__wrapped__(SOURCE, ())
        assert flag in asked.pop() and flag in asked.pop() and not asked


def test_without_the_compilers_threads_there_is_one_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compiled(source: Path, compiler: str, flags: list[str]) -> Path:
        if "-fopenmp" in flags:
            raise OSError("undefined symbol: __kmpc_fork_call")
        return _compiled(source, compiler, flags)

    monkeypatch.setattr("trireme.ext.fast_engine.native._compiled", compiled)
    monkeypatch.setattr("trireme.ext.fast_engine.native.logger", logging.getLogger("native"))
    with caplog.at_level(logging.INFO):
        library = _load.__wrapped__(SOURCE, ())
    assert library.panel_width() in (8, 16, 32)
    assert "native.c is compiled for one thread alone: undefined symbol" in caplog.text


@pytest.mark.parametrize("most", [0, 1 << 24], ids=["native", "step"])
@pytest.mark.parametrize("broken", ["k_proj", "q_proj", "overflow"])
def test_broken_scores_end_in_no_number_and_not_in_an_invented_one(
    tmp_path: Path, broken: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_module, "MOST_WEIGHTS", most)
    model = load_shell(make(tmp_path, "qwen3-bias"), device="cpu", dtype="float32")
    lean = make_lean(model)
    assert lean is not None
    base: Any = model.base_model
    attention = base.layers[0].self_attn
    with torch.no_grad():
        if broken == "overflow":
            attention.q_norm.weight.mul_(1e20)
            attention.k_norm.weight.mul_(1e20)
        else:
            getattr(attention, broken).weight[0, 0] = torch.nan
    lean.renew()
    assert (lean._compiled is not None) == bool(most)
    store, prompts = RowStore(99), RowStore(9)
    store.reserve(1, 4)
    prompts.reserve(1, 1)
    where = Where.of([(0, 0, 0)], CPU)
    assert not lean.step(torch.tensor([7]), where, store, prompts).isfinite().all()


def test_a_compiled_step_sees_weights_that_change_in_place(tmp_path: Path) -> None:
    model = load_shell(make(tmp_path, "qwen2"), device="cpu", dtype="float32")
    lean = make_lean(model)
    assert lean is not None and lean._compiled is not None
    store, prompts = RowStore(99), RowStore(9)
    store.reserve(1, 4)
    prompts.reserve(1, 1)
    where = Where.of([(0, 0, 0)], CPU)
    before = lean.step(torch.tensor([7]), where, store, prompts)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert torch.equal(lean.step(torch.tensor([7]), where, store, prompts), before * 2)


def wide(store: RowStore) -> RowStore:
    """The same keys and values in float32."""
    out = RowStore(store.max_tokens)
    keys, values = store.layer(0, torch.empty(0))
    out.reserve(len(keys), keys.shape[2])
    for wide_one, one in zip(out.layer(0, keys.float()), (keys, values), strict=True):
        wide_one.copy_(one)
    return out


def test_prompts_that_come_together_or_one_by_one_are_seldom_copied() -> None:
    for together in (True, False):
        prompts = SharedPrompts(2**18)
        like = torch.zeros(1, 2, 1, 4)
        prompts.store.layer(0, like)
        if together:
            prompts.reserve(63, 512)
        held = [prompts.store.layer(0, like)[0]]
        for n in range(63):
            assert prompts.add((n,) * 512) == n
            if prompts.store.layer(0, like)[0] is not held[-1]:
                held.append(prompts.store.layer(0, like)[0])
        assert held[-1].shape[:3] == (63, 2, 512) if together else (len(held) < 20)
        assert len(held) == 1 or not together


def test_prompts_of_one_prefill_make_room_once(
    tiny_dir: Path, ops: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    grow = SharedPrompts.reserve

    def reserve(self: SharedPrompts, count: int, length: int) -> None:
        before = self.store.num_rows
        grow(self, count, length)
        if self.store.num_rows > before:
            calls.append(self.store.num_rows)

    monkeypatch.setattr(SharedPrompts, "reserve", reserve)

    async def main(engine: TorchEngine) -> None:
        prompts = [list(range(5, 12 + n)) for n in range(12)]
        await asyncio.gather(*(engine.generate(prompt, SAMPLING) for prompt in prompts))

    run(tiny_dir, main)
    assert calls == [12]


def test_without_a_home_the_library_lies_in_a_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = _folder()
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(OSError, match="not a private folder"):
        _folder()


def test_compiled_draws_are_those_of_torch() -> None:
    torch.manual_seed(0)
    native = NativeOps(torch.float32)
    for count in (5, 64, 1000):
        logits = torch.randn(4000, count) * torch.rand(4000, 1) * 20
        logits[::3, count // 2 :] = -torch.inf  # what top-k cuts
        logprobs, uniform = logits.log_softmax(-1), torch.rand(4000, dtype=torch.float64)
        uniform[:2] = torch.tensor([0.0, 1.0 - 2**-40], dtype=torch.float64)
        assert torch.equal(native.inverse_cdf(logprobs, uniform), inverse_cdf(logprobs, uniform))
        end = torch.full_like(uniform, 1.0 - 2**-53)  # here rounding decides, but draws nothing cut
        for sample in (native.inverse_cdf, inverse_cdf):
            assert logprobs.gather(1, sample(logprobs, end)[:, None]).isfinite().all()
