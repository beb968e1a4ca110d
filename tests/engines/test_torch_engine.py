"""TorchEngine against Hugging Face's own forward pass, alone and in company, and what it does not
do.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import weakref
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MistralConfig

from tests.limits import HANG_S
from tests.tested import ENGINE, SINKS, families
from tests.tiny import loaded, make_model, make_tokenizer, make_with_sinks
from trireme.engines.barrier import RolloutBarrier
from trireme.engines.device import Device
from trireme.engines.engine import Sampling
from trireme.engines.request import make_requests
from trireme.engines.torch import rows
from trireme.engines.torch.decoder import Decoder
from trireme.engines.torch.engine import TorchEngine
from trireme.engines.torch.shell import TorchSettings

PROMPTS = [[5 + i] * (3 + 7 * i) + [9, 8, 7] for i in range(6)]


def run(
    folder: Path,
    main: Callable[[TorchEngine], Awaitable[Any]],
    *,
    barrier: RolloutBarrier | None = None,
    share_with: Any = None,
    **options: Any,
) -> Any:
    """What `main` gives with an engine on a model folder."""
    settings = TorchSettings(max_model_len=options.pop("max_model_len", 200), **options)

    async def go() -> Any:
        device = Device(1)
        engine = TorchEngine(
            folder,
            tokenizer=AutoTokenizer.from_pretrained(folder),
            device=device,
            settings=settings,
            barrier=barrier,
            share_with=share_with,
        )
        try:
            return await main(engine)
        finally:
            await engine.close()
            device.close()

    return asyncio.run(go())


def reference(folder: Path, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """log p of each token after the first, by the model's own forward pass."""
    with torch.no_grad():
        logits = loaded(folder)(torch.tensor([ids])).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.fixture(scope="module", params=["qwen3", "gpt_oss"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, plain or with attention sinks and windows of 8 tokens in every other layer."""
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("arch", ["qwen3", "qwen2", "llama", "gpt_oss"])
def test_greedy_replies_equal_transformers_generate(tmp_path: Path, arch: str) -> None:
    folder = make_model(tmp_path / arch, arch)
    greedy = Sampling(max_tokens=20, temperature=0, ignore_eos=True)

    async def main(engine: TorchEngine) -> Any:
        return await asyncio.gather(*(engine.generate(p, greedy) for p in PROMPTS))

    replies = run(folder, main, max_rows=4)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for prompt, [reply] in zip(PROMPTS, replies, strict=True):
        expected = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None
        )
        assert reply.ids == expected[0, len(prompt) :].tolist()
        assert reply.stop_reason == "length" and reply.sampler_logprobs == [0.0] * 20


def test_logprobs_equal_the_models_own_in_ragged_company(folder: Path) -> None:
    sampling = Sampling(max_tokens=15, n=3, temperature=0.7, top_p=0.8, ignore_eos=True)

    async def main(engine: TorchEngine) -> Any:
        return await asyncio.gather(
            *(engine.generate(p, sampling, key=(1, i, 0)) for i, p in enumerate(PROMPTS))
        )

    for prompt, replies in zip(PROMPTS, run(folder, main, max_rows=5), strict=True):
        for reply in replies:
            own = reference(folder, prompt + reply.ids, 0.7)[len(prompt) - 1 :]
            assert torch.allclose(own, torch.tensor(reply.logprobs), atol=1e-5)
            # the mass that top_p kept is shared out among what is left
            assert all(
                s >= p - 1e-6 for s, p in zip(reply.sampler_logprobs, reply.logprobs, strict=True)
            )


def test_a_request_samples_the_same_alone_and_in_a_batch(folder: Path) -> None:
    sampling = Sampling(max_tokens=12, n=2, ignore_eos=True)

    async def crowd(engine: TorchEngine) -> Any:
        found = await asyncio.gather(
            *(engine.generate(p, sampling, key=(1, i, 0)) for i, p in enumerate(PROMPTS))
        )
        return [c.ids for c in found[2]]

    async def alone(engine: TorchEngine) -> Any:
        return [c.ids for c in await engine.generate(PROMPTS[2], sampling, key=(1, 2, 0))]

    together = run(folder, crowd)
    assert together == run(folder, alone)
    assert together[0] != together[1], "samples of one prompt have streams of their own"


@pytest.mark.parametrize("fast", [False, True])
def test_replies_do_not_depend_on_the_default_dtype(folder: Path, fast: bool) -> None:
    """transformers sets it for the whole process while it loads a model, such as the one of a
    user's reward. Compiled steps would write past memory of 16 bits a number.
    """
    plain = Sampling(max_tokens=12, ignore_eos=True, temperature=0.7, min_tokens=3)
    cut = dataclasses.replace(plain, top_p=0.9, min_p=0.01, repetition_penalty=1.1)

    async def main(engine: TorchEngine) -> Any:
        torch.set_default_dtype(dtype)
        try:
            return [
                await engine.generate(p, s, key=(1, i, 0))
                for s in (plain, cut)
                for i, p in enumerate(PROMPTS)
            ]
        finally:
            torch.set_default_dtype(torch.float32)

    dtype = torch.float32
    expected = run(folder, main, fast=fast)
    dtype = torch.float64
    assert run(folder, main, fast=fast) == expected


def test_equal_prompts_are_prefilled_once_and_turns_reuse_the_prefix(folder: Path) -> None:
    prompt = list(range(5, 45))

    async def main(engine: TorchEngine) -> Any:
        sampling = Sampling(max_tokens=8, n=2, ignore_eos=True)
        found = await asyncio.gather(
            *(engine.generate(prompt, sampling, key=(1, 0, run)) for run in range(4))
        )
        first = engine.health().prefilled_tokens
        longer = prompt + found[0][0].ids + [9, 9, 9]
        [turn] = await engine.generate(longer, Sampling(max_tokens=8, ignore_eos=True))
        return first, engine.health().prefilled_tokens - first, longer, turn

    first, second, longer, turn = run(folder, main)
    assert first == len(prompt) - 1
    assert second <= 4, "only what the cache does not have"
    own = reference(folder, longer + turn.ids)[len(longer) - 1 :]
    assert torch.allclose(own, torch.tensor(turn.logprobs), atol=1e-5)


def test_prompts_that_part_inside_a_block_of_the_prefix_cache_share_no_more(
    folder: Path,
) -> None:
    first = list(range(5, 45))
    greedy = Sampling(max_tokens=8, temperature=0, ignore_eos=True)
    others = [[*first[:at], 60, *first[at + 1 :]] for at in (16, 20, 31, 37)]

    async def main(engine: TorchEngine) -> Any:
        await engine.generate(first, greedy)
        return [(await engine.generate(ids, greedy))[0] for ids in others]

    for ids, reply in zip(others, run(folder, main), strict=True):
        own = reference(folder, ids + reply.ids)[len(ids) - 1 :]
        assert torch.allclose(own, torch.tensor(reply.logprobs), atol=1e-5)


@pytest.mark.parametrize("arch", ["qwen3", "gpt_oss"])
@pytest.mark.parametrize("shared", [False, True])
def test_the_same_prompt_after_new_weights_is_read_anew(
    tmp_path: Path, shared: bool, arch: str
) -> None:
    old, new = (make_model(tmp_path / f"{seed}", arch, seed=seed) for seed in (0, 1))
    prompt = list(range(5, 45))
    trained = AutoModelForCausalLM.from_pretrained(old) if shared else None

    async def main(engine: TorchEngine) -> Any:
        sampling = Sampling(max_tokens=8, ignore_eos=True)
        await engine.generate(prompt, sampling)
        if trained is not None:
            trained.load_state_dict(AutoModelForCausalLM.from_pretrained(new).state_dict())
        await engine.update_weights(None if shared else new, 1)
        return (await engine.generate(prompt, sampling))[0]

    reply = run(old, main, share_with=trained)
    own = reference(new, prompt + reply.ids)[len(prompt) - 1 :]
    assert reply.versions == [1] * 8
    assert torch.allclose(own, torch.tensor(reply.logprobs), atol=1e-5)


def test_an_update_in_flight_marks_tokens_and_new_ones_are_of_the_new_weights(
    tmp_path: Path,
) -> None:
    old, new = make_model(tmp_path / "a", seed=0), make_model(tmp_path / "b", seed=1)

    async def main(engine: TorchEngine) -> Any:
        sampling = Sampling(max_tokens=60, ignore_eos=True)
        call = asyncio.ensure_future(engine.generate(PROMPTS[1], sampling))
        while engine.health().generated_tokens < 10:
            await asyncio.sleep(0.001)
        await engine.update_weights(new, 7)
        return (await call)[0], await engine.logprobs([PROMPTS[2]])

    reply, [scored] = run(old, main)
    switch = reply.versions.index(7)
    assert set(reply.versions[:switch]) == {0} and set(reply.versions[switch:]) == {7}
    ids = PROMPTS[1] + reply.ids
    before = reference(old, ids)[len(PROMPTS[1]) - 1 :][:switch]
    after = reference(new, ids)[len(PROMPTS[1]) - 1 :][switch:]
    assert torch.allclose(before, torch.tensor(reply.logprobs[:switch]), atol=1e-5)
    assert torch.allclose(after, torch.tensor(reply.logprobs[switch:]), atol=1e-5)
    assert torch.allclose(reference(new, PROMPTS[2]), torch.tensor(scored[1:]), atol=1e-5)


def test_shared_tensors_follow_the_trainer_without_a_copy(folder: Path) -> None:
    trained = AutoModelForCausalLM.from_pretrained(folder)

    async def main(engine: TorchEngine) -> Any:
        before = await engine.logprobs([PROMPTS[1]])
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.mul_(1.1)
        await engine.update_weights(None, 1)
        return before, await engine.logprobs([PROMPTS[1]])

    before, after = run(folder, main, share_with=trained)
    with torch.no_grad():
        logits = trained(torch.tensor([PROMPTS[1]])).logits[0, :-1].log_softmax(-1)
    own = logits.gather(1, torch.tensor(PROMPTS[1][1:])[:, None])[:, 0]
    assert torch.allclose(own, torch.tensor(after[0][1:]), atol=1e-5)
    assert before != after


def farthest(folder: Path) -> float:
    """The largest difference of sampled log-probabilities from the model's own."""

    async def main(engine: TorchEngine) -> Any:
        sampling = Sampling(max_tokens=10, n=2, ignore_eos=True)
        return await asyncio.gather(
            *(engine.generate(p, sampling, key=(1, i, 0)) for i, p in enumerate(PROMPTS))
        )

    gaps = [
        (reference(folder, p + reply.ids)[len(p) - 1 :] - torch.tensor(reply.logprobs)).abs().max()
        for p, replies in zip(PROMPTS, run(folder, main), strict=True)
        for reply in replies
    ]
    return float(max(gaps))


def test_an_engine_that_forgets_sinks_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path, "gpt_oss")
    assert farthest(folder) < 1e-5
    attend = rows.attend
    monkeypatch.setattr(rows, "attend", lambda *x, sinks=None, **more: attend(*x, **more))
    assert farthest(folder) > 1e-3


@pytest.mark.parametrize("kind", [kind for kind in families(ENGINE, SINKS) if kind != "gpt_oss"])
def test_other_families_with_sinks_are_sampled_as_exactly(tmp_path: Path, kind: str) -> None:
    """Those of mimo_v2_flash have values that are narrower than keys."""
    assert farthest(make_with_sinks(tmp_path, kind)) < 1e-5


def test_sinks_in_bfloat16_are_as_close_to_float32_as_in_transformers(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "gpt_oss", layers=4)

    async def main(engine: TorchEngine) -> Any:
        return await engine.logprobs(PROMPTS)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    gaps: dict[str, list[torch.Tensor]] = {"ours": [], "theirs": []}
    for ids, scored in zip(PROMPTS, run(folder, main, dtype="bfloat16"), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1].float()
        theirs = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        exact = reference(folder, ids)
        gaps["ours"].append((torch.tensor(scored[1:]) - exact).abs())
        gaps["theirs"].append((theirs - exact).abs())
    ours, theirs = (float(torch.cat(rows).mean()) for rows in gaps.values())
    assert 0 < ours < 1.5 * theirs < 0.003


def test_sliding_windows_are_kept(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    config = MistralConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=8, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    prompt = list(range(5, 45))

    async def main(engine: TorchEngine) -> Any:
        return await engine.generate(prompt, Sampling(max_tokens=10, ignore_eos=True))

    [reply] = run(tmp_path, main)
    own = reference(tmp_path, prompt + reply.ids)[len(prompt) - 1 :]
    assert torch.allclose(own, torch.tensor(reply.logprobs), atol=1e-5)


def test_stop_strings_ends_and_minimum_lengths(tiny_dir: Path) -> None:
    async def main(engine: TorchEngine) -> Any:
        free = Sampling(max_tokens=40, seed=3, ignore_eos=True)
        [whole] = await engine.generate(PROMPTS[0], free)
        word = whole.text[10:13]
        [cut] = await engine.generate(
            PROMPTS[0], Sampling(max_tokens=40, seed=3, ignore_eos=True, stop=(word,))
        )
        token = whole.ids[5]
        [stopped] = await engine.generate(
            PROMPTS[0],
            Sampling(max_tokens=40, seed=3, ignore_eos=True, stop_token_ids=(token,)),
        )
        [late] = await engine.generate(
            PROMPTS[0], Sampling(max_tokens=40, stop_token_ids=(token,), min_tokens=30)
        )
        return whole, word, cut, token, stopped, late

    whole, word, cut, token, stopped, late = run(tiny_dir, main)
    assert cut.stop_reason == "stop" and cut.stop == word
    assert word not in cut.text and whole.text.startswith(cut.text)
    assert cut.ids == whole.ids[: len(cut.ids)] and len(cut.ids) < 40
    assert stopped.stop == token and stopped.ids == whole.ids[: whole.ids.index(token) + 1]
    assert len(late.ids) >= 30 and token not in late.ids[:30]


def test_a_stop_string_that_came_before_min_tokens_ends_nothing(tiny_dir: Path) -> None:
    async def main(engine: TorchEngine) -> None:
        free = Sampling(max_tokens=40, temperature=0, ignore_eos=True, min_tokens=8)
        [whole] = await engine.generate(PROMPTS[0], free)
        texts = [str(engine._tokenizer.decode(whole.ids[:n])) for n in range(41)]
        ends = {n: texts[n][len(texts[n - 1]) :] for n in range(1, 41)}
        for least in (1, 3, 8):
            word = ends[2]  # completed by the second token, and maybe again later
            sampling = dataclasses.replace(free, stop=(word,), min_tokens=least)
            [reply] = await engine.generate(PROMPTS[0], sampling)
            later = [
                n for n in range(least + 1, 41) if texts[n].count(word) > texts[n - 1].count(word)
            ]
            assert len(reply.ids) == min(later, default=40)
            assert reply.stop == (word if later else None)
            if later:
                assert texts[later[0]].startswith(reply.text + word)
                assert len(reply.text) + len(word) > len(texts[least])

    run(tiny_dir, main)


class Bytes:
    """A tokenizer whose tokens are bytes of UTF-8."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return bytes(ids).decode("utf-8", "replace")


@pytest.mark.parametrize("stop", ["END", "答えは以上です", "🙂🙂🙂🙂"])
def test_a_stop_string_with_several_tokens_a_character_ends_a_reply(stop: str) -> None:
    tokenizer: Any = Bytes()
    room: Any = {"room": 99, "max_model_len": 99, "vocabulary": 256}
    sampling = Sampling(max_tokens=90, stop=(stop,))
    [request] = make_requests([5], sampling, (0, 0, 0, 0), seed=0, ends=set(), **room)
    ended = [request.add(token, -1.0, -1.0, 0, tokenizer) for token in f"so: {stop}".encode()]
    assert ended == [False] * (len(ended) - 1) + [True]
    completion = request.completion(tokenizer)
    assert (completion.stop, completion.text) == (stop, "so: ")


def test_a_stop_string_that_is_a_special_token_ends_a_reply_as_that_token_does() -> None:
    tokenizer = make_tokenizer()
    special = tokenizer.convert_tokens_to_ids("<|im_start|>")
    room: Any = {"room": 99, "max_model_len": 99, "vocabulary": 256}
    sampling = Sampling(max_tokens=9, stop=("zz", "<|im_start|>"), min_tokens=1)
    [request] = make_requests([5], sampling, (0, 0, 0, 0), seed=0, ends=set(), **room)
    tokens = [special, *tokenizer.encode("ab"), special]
    ended = [request.add(token, -1.0, -1.0, 0, tokenizer) for token in tokens]
    assert ended == [False, False, False, True]  # the first came before `min_tokens`
    completion = request.completion(tokenizer)
    assert (completion.stop_reason, completion.stop, completion.text) == ("stop", special, "ab")


def test_a_stop_string_whose_first_token_is_a_part_of_a_character_is_cut_off() -> None:
    tokenizer: Any = Bytes()
    sampling = Sampling(max_tokens=9, stop=("é",), min_tokens=1)
    room: Any = {"room": 99, "max_model_len": 99, "vocabulary": 256}
    [request] = make_requests([5], sampling, (0, 0, 0, 0), seed=0, ends=set(), **room)
    ended = [request.add(token, -1.0, -1.0, 0, tokenizer) for token in "é".encode()]
    assert ended == [False, True]
    completion = request.completion(tokenizer)
    assert (completion.stop, completion.text) == ("é", "")


def test_more_requests_than_rows_wait_and_all_are_served(tiny_dir: Path) -> None:
    async def main(engine: TorchEngine) -> Any:
        calls = [
            engine.generate([5, 6, 7 + i], Sampling(max_tokens=5 + i % 7, ignore_eos=True))
            for i in range(40)
        ]
        return [len(found[0].ids) for found in await asyncio.gather(*calls)]

    assert run(tiny_dir, main, max_rows=3) == [5 + i % 7 for i in range(40)]


def test_abort_and_cancel_free_their_rows(tiny_dir: Path) -> None:
    async def main(engine: TorchEngine) -> Any:
        long = Sampling(max_tokens=150, ignore_eos=True)
        calls = [
            asyncio.ensure_future(engine.generate(PROMPTS[0], long, key=(1, task, 0)))
            for task in range(3)
        ]
        while engine.health().generated_tokens < 12:
            await asyncio.sleep(0.001)
        calls[2].cancel()
        count = await engine.abort((1, 0))
        await asyncio.gather(calls[2], return_exceptions=True)
        at_once = engine.health().running  # perhaps before an advance removes their rows
        [aborted] = await calls[0]
        [whole] = await calls[1]
        assert engine._decoder.active == []
        return count, at_once, aborted, whole, engine.health()

    count, at_once, aborted, whole, health = run(tiny_dir, main)
    assert count == 1 and at_once == 1
    assert aborted.stop_reason == "aborted" and 0 < len(aborted.ids) < 150
    assert len(whole.ids) == 150 and health.running == 0 and health.waiting == 0


def test_pause_holds_and_resume_goes_on(tiny_dir: Path) -> None:
    async def main(engine: TorchEngine) -> Any:
        await engine.pause()
        call = asyncio.ensure_future(engine.generate(PROMPTS[0], Sampling(max_tokens=4)))
        await asyncio.sleep(0.05)
        held = engine.health().generated_tokens
        await engine.resume()
        await call
        return held, engine.health().generated_tokens

    held, after = run(tiny_dir, main)
    assert held == 0 and after > 0


def test_a_paused_engine_frees_keys_and_values_only_if_nothing_runs(tiny_dir: Path) -> None:
    greedy = Sampling(max_tokens=150, temperature=0, ignore_eos=True)

    async def main(engine: TorchEngine) -> Any:
        decoder = engine._decoder
        call = asyncio.ensure_future(engine.generate(PROMPTS[1], greedy))
        while not decoder.generated:
            await asyncio.sleep(0)
        await engine.pause()
        amid = decoder.store.room
        await engine.resume()
        replies, before = [(await call)[0].ids], decoder.store.room
        await engine.pause()
        after = decoder.store.room, decoder.prompts.store.room
        await engine.resume()
        replies.append((await engine.generate(PROMPTS[1], greedy))[0].ids)
        return amid, before, after, replies

    amid, before, after, replies = run(tiny_dir, main)
    assert 0 < amid <= before and after == (0, 0)
    assert replies[0] == replies[1]


def test_a_gate_holds_the_engine_until_every_live_rollout_waits(tiny_dir: Path) -> None:
    barrier = RolloutBarrier()

    async def main(engine: TorchEngine) -> Any:
        sampling = Sampling(max_tokens=4, ignore_eos=True)
        with barrier.rollout((1, 0, 0)), barrier.rollout((1, 1, 0)):
            first = asyncio.ensure_future(engine.generate([5, 6], sampling, key=(1, 1, 0, 0)))
            await asyncio.sleep(0.05)
            held = engine.health().generated_tokens
            await asyncio.gather(first, engine.generate([7, 8], sampling, key=(1, 0, 0, 0)))
        return held

    assert run(tiny_dir, main, barrier=barrier) == 0


@pytest.mark.parametrize("slow", [(0,), (2,), (0, 1, 2, 3)], ids=str)
def test_what_is_computed_together_does_not_depend_on_how_fast_rollouts_go_on(
    tiny_dir: Path, slow: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollouts of several turns, of which some take a while after each."""
    together: list[list[tuple[int, int]]] = []
    advance = Decoder.advance

    def noted(decoder: Decoder, admitted: Any, **options: Any) -> Any:
        ended = advance(decoder, admitted, **options)
        together.append(sorted((r.key[1], r.key[3]) for r in (*decoder.active, *ended)))
        return ended

    monkeypatch.setattr(Decoder, "advance", noted)

    def turns(pausing: tuple[int, ...]) -> Any:
        barrier = RolloutBarrier()

        async def rollout(engine: TorchEngine, task: int) -> list[int]:
            ids = [5, 6, 7 + task]
            with barrier.rollout((1, task, 0)):
                for turn in range(3):
                    sampling = Sampling(max_tokens=3 + 5 * task, ignore_eos=True)
                    [reply] = await engine.generate(ids, sampling, key=(1, task, 0, turn))
                    ids += reply.ids
                    if task in pausing:
                        await asyncio.sleep(0.02)
            return ids

        async def main(engine: TorchEngine) -> Any:
            return await asyncio.gather(*(rollout(engine, task) for task in range(4)))

        together.clear()
        return run(tiny_dir, main, barrier=barrier), list(together)

    assert turns(slow) == turns(())
    # task 0 ends with the first advance, and its next turn comes one advance later
    assert together[0] == [(task, 0) for task in range(4)]
    assert together[1] == [(task, 0) for task in range(1, 4)]
    assert together[2] == [(0, 1), (2, 0), (3, 0)]  # the second has ended task 1's


@pytest.mark.parametrize("how", ["pause", "abort", "close"])
def test_a_whole_reply_is_given_out_where_no_advance_follows(tiny_dir: Path, how: str) -> None:
    barrier = RolloutBarrier()

    async def ask(engine: TorchEngine, task: int, tokens: int) -> Any:
        sampling = Sampling(max_tokens=tokens, ignore_eos=True)
        return await engine.generate([5, 6], sampling, key=(1, task, 0, 0))

    async def main(engine: TorchEngine) -> Any:
        with ExitStack() as live:
            for task in range(3):
                live.enter_context(barrier.rollout((1, task, 0)))
            replies = [
                asyncio.ensure_future(ask(engine, task, tokens))
                for task, tokens in enumerate((2, 4, 60))
            ]
            await asyncio.wait_for(replies[0], HANG_S)
            while engine.health().generated_tokens < 3 * 2 + 2 * 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            assert not replies[1].done()  # the first rollout has not gone on yet
            if how == "pause":
                await engine.pause()
            elif how == "abort":
                assert await engine.abort((1, 1, 0)) == 0
            else:
                await engine.close()
            [reply] = await asyncio.wait_for(replies[1], HANG_S)
        return reply.stop_reason, len(reply.ids)

    assert run(tiny_dir, main, barrier=barrier) == ("length", 4)


def test_a_rollout_with_another_request_gets_its_reply_at_once(tiny_dir: Path) -> None:
    barrier = RolloutBarrier()
    short, long = (Sampling(max_tokens=n, ignore_eos=True) for n in (2, 150))

    async def main(engine: TorchEngine) -> None:
        with barrier.rollout((1, 0, 0)):
            other = asyncio.ensure_future(engine.generate([5, 6], long, key=(1, 0, 0, 0)))
            for index in range(1, 4):
                await asyncio.wait_for(engine.generate([7], short, key=(1, 0, 0, index)), HANG_S)
            assert not other.done()
            await other

    run(tiny_dir, main, barrier=barrier)


def test_bad_prompts_and_a_broken_engine_say_so(tiny_dir: Path) -> None:
    async def main(engine: TorchEngine) -> None:
        with pytest.raises(ValueError, match="a prompt of 200 tokens: expected 1 to 199"):
            await engine.generate([5] * 200, Sampling())
        with pytest.raises(ValueError, match="these weights do not belong to this model"):
            await engine.update_weights({"nonsense": torch.zeros(1)}, 1)
        for ids in ([10**6], [10**6, 5], [5, -1], ["5"], [None]):
            with pytest.raises(ValueError, match="the prompt holds"):
                await engine.generate(ids, Sampling())  # pyright: ignore[reportArgumentType]
            with pytest.raises(ValueError, match="row 0 holds"):
                await engine.logprobs([ids])  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match="stop_token_ids holds the id 1000000"):
            await engine.generate([5], Sampling(stop_token_ids=(10**6,), min_tokens=2))
        with pytest.raises(ValueError, match="row 0 has 201 tokens: expected 1 to 200"):
            await engine.logprobs([[5] * 201])
        await engine.generate([5], Sampling(max_tokens=2))

        def broken(*_: Any, **__: Any) -> None:
            raise IndexError("no such thing")

        engine.module.get_input_embeddings().register_forward_pre_hook(broken)
        with pytest.raises(RuntimeError, match="the engine has failed: IndexError: no such thing"):
            await engine.generate([5], Sampling())
        with pytest.raises(RuntimeError, match="the engine has failed"):
            engine.health()

    run(tiny_dir, main)


def test_user_code_that_cancels_all_tasks_ends_the_engine_and_nobody_waits_for_it(
    tiny_dir: Path,
) -> None:
    async def main(engine: TorchEngine) -> None:
        await engine.generate([5], Sampling(max_tokens=2))
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        with pytest.raises(RuntimeError, match="its task was cancelled by other code: expected"):
            await engine.generate([5], Sampling(max_tokens=2))

    run(tiny_dir, main)


@pytest.mark.parametrize("where", ["in the model", "in the tokenizer"])
def test_a_request_that_the_engine_cannot_run_ends_alone(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """13 stands for what no check knows of, and only some passes meet."""

    def refuse(_: Any, given: tuple[torch.Tensor]) -> None:
        if bool((given[0] == 13).any()):
            raise RuntimeError("an unlucky number")

    async def main(engine: TorchEngine) -> Any:
        tokenizer: Any = engine._tokenizer
        decode = tokenizer.decode
        greedy = Sampling(max_tokens=120, temperature=0, ignore_eos=True)
        bad = Sampling(max_tokens=30, temperature=0, stop=("never",), ignore_eos=True)
        if where == "in the model":
            engine.module.get_input_embeddings().register_forward_pre_hook(refuse)
        else:

            def unlucky(ids: list[int], **options: Any) -> Any:
                refuse(0, (torch.tensor([13 if len(ids) <= bad.max_tokens else 0]),))
                return decode(ids, **options)  # another request has ended meanwhile

            monkeypatch.setattr(tokenizer, "decode", unlucky)
        calls = [
            asyncio.ensure_future(engine.generate(p, greedy, key=(i,)))
            for i, p in enumerate(PROMPTS[:3])
        ]
        await asyncio.sleep(0.02)  # they are under way
        with pytest.raises(RuntimeError, match=r"cannot go on with request 9/9: .*an unlucky"):
            await engine.generate([5, 13, 7], bad, key=(9, 9))
        monkeypatch.setattr(tokenizer, "decode", decode)
        engine.health()
        return [(await call)[0].ids for call in calls], await engine.generate(PROMPTS[3], greedy)

    async def undisturbed(engine: TorchEngine) -> Any:
        greedy = Sampling(max_tokens=120, temperature=0, ignore_eos=True)
        return [(await engine.generate(p, greedy))[0].ids for p in PROMPTS[:4]]

    ids, [after] = run(tiny_dir, main)
    assert [*ids, after.ids] == run(tiny_dir, undisturbed)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_neither_many_rows_nor_long_ones_make_room_beyond_the_limit(
    tmp_path: Path, fast: bool, n: int
) -> None:
    folder = make_model(tmp_path, "qwen2")
    limit, long = 8192, [5 + i % 80 for i in range(470)]
    shorts = [[5 + i, 9, 7] for i in range(64)]
    brief, lasting = (Sampling(max_tokens=m, n=n, ignore_eos=True) for m in (4, 30))

    async def main(engine: TorchEngine) -> Any:
        decoder: Any = engine._decoder
        room: list[tuple[int, int]] = []
        advance = decoder.advance

        def watched(*args: Any, **options: Any) -> Any:
            finished = advance(*args, **options)
            room.append((decoder.store.room, decoder.prompts.store.room))
            return finished

        decoder.advance = watched
        replies = []
        for prompts in ([long], shorts, [long, *shorts[:3]], shorts, [long]):
            sampling = lasting if long in prompts else brief
            calls = (engine.generate(p, sampling, key=(i,)) for i, p in enumerate(prompts))
            replies.append(await asyncio.gather(*calls))
        return room, replies

    options = {"max_model_len": 500, "prefix_tokens": 0, "fast": fast}
    room, replies = run(folder, main, kv_tokens=limit, **options)
    assert max(map(max, room)) <= limit
    _, alone = run(folder, main, kv_tokens=2**17, **options)
    for some, others in zip(replies, alone, strict=True):
        for a, b in zip(some, others, strict=True):
            assert [c.ids for c in a] == [c.ids for c in b]


def test_a_closed_engine_has_no_model(tmp_path: Path) -> None:
    """Others may have the engine for longer, as a server's framework does in caches of its own."""
    weights: list[weakref.ref[Any]] = []
    engines: list[TorchEngine] = []

    async def main(engine: TorchEngine) -> None:
        engines.append(engine)
        await engine.generate([5, 6], Sampling(max_tokens=2))
        weights.extend(weakref.ref(weight) for weight in engine.module.parameters())

    run(make_model(tmp_path), main)
    gc.collect()
    assert weights and not any(weight() is not None for weight in weights)
    assert engines[0].version == 0
