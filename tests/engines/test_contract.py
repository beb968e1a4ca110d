"""The Engine contract, over every kind of engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.limits import HANG_S
from tests.tiny import make_model
from tests.vllm import needs_vllm
from trireme.engines.device import Device
from trireme.engines.engine import Engine, Sampling
from trireme.engines.scripted import ScriptedEngine
from trireme.engines.torch.engine import TorchEngine
from trireme.engines.torch.shell import TorchSettings

PROMPT = [5, 6, 7, 8]
MAX_LEN = 64
LONG = Sampling(max_tokens=40, ignore_eos=True)
OVER_HTTP, VLLM_HOST = "tests.ext.remote.served", "tests.ext.vllm.host"
"""Imported by name: without their extensions the other engines' tests are run."""
REMOTE = pytest.param("remote", marks=pytest.mark.extension("remote"))
VLLM = pytest.param("vllm", marks=needs_vllm)
Run = Callable[[Callable[[Engine], Awaitable[Any]]], Any]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    """One process for all tests: it takes long to start."""
    folder = make_model(tmp_path_factory.mktemp("vllm") / "model", head_dim=32)
    with import_module(VLLM_HOST).serving(folder, max_model_len=MAX_LEN) as host:
        yield host, folder


CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["scripted", "torch", CUDA, REMOTE, VLLM])
def run(request: pytest.FixtureRequest, tiny_dir: Path) -> Run:
    """Runs `main(engine)`, closes the engine, and fails after a while."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    if request.param == "remote":
        remote = partial(import_module(OVER_HTTP).with_engine, tiny_dir, MAX_LEN)
        return lambda main: asyncio.run(asyncio.wait_for(remote(main), HANG_S))

    if request.param == "vllm":
        with_engine = partial(
            import_module(VLLM_HOST).with_engine, *request.getfixturevalue("vllm")
        )
        return lambda main: asyncio.run(asyncio.wait_for(with_engine(main), HANG_S))

    def make(device: Device) -> Engine:
        if request.param == "scripted":
            return ScriptedEngine(lambda _: "x" * 30, tokenizer=tokenizer, max_model_len=MAX_LEN)
        name = "cuda" if request.param == "cuda" else "cpu"
        return TorchEngine(
            tiny_dir,
            tokenizer=tokenizer,
            device=device,
            settings=TorchSettings(max_model_len=MAX_LEN, device=name),
        )

    def run(main: Callable[[Engine], Awaitable[Any]]) -> Any:
        async def go() -> Any:
            device = Device(1)
            engine = make(device)
            try:
                return await asyncio.wait_for(main(engine), HANG_S)
            finally:
                await engine.close()
                device.close()

        return asyncio.run(go())

    return run


def test_n_samples_have_lists_of_one_length_and_tokens_of_the_present_version(run: Run) -> None:
    async def main(engine: Engine) -> None:
        found = await engine.generate(PROMPT, Sampling(n=3, max_tokens=8), key=(1, 0, 0, 0))
        assert len(found) == 3
        for c in found:
            lengths = {len(c.ids), len(c.logprobs), len(c.sampler_logprobs), len(c.versions)}
            assert len(lengths) == 1 and len(c.ids) <= 8
            assert all(p <= 0 for p in c.logprobs) and set(c.versions) <= {0}
            assert c.stop_reason in ("stop", "length")

    run(main)


def test_max_tokens_and_the_models_length_cut_a_reply(run: Run) -> None:
    async def main(engine: Engine) -> None:
        short = Sampling(max_tokens=1, ignore_eos=True)
        (one,) = await engine.generate(PROMPT, short)
        assert len(one.ids) == 1 and one.stop_reason == "length"
        (last,) = await engine.generate([5] * (MAX_LEN - 2), LONG)
        assert len(last.ids) == 2 and last.stop_reason == "length"

    run(main)


@pytest.mark.parametrize("prompt", [[], [5] * MAX_LEN])
def test_a_prompt_that_leaves_no_room_is_a_value_error(run: Run, prompt: list[int]) -> None:
    async def main(engine: Engine) -> None:
        with pytest.raises(ValueError, match=f"a prompt of {len(prompt)} tokens: expected 1 to 63"):
            await engine.generate(prompt, LONG)

    run(main)


def test_logprobs_have_one_number_a_token_and_the_first_is_0(run: Run) -> None:
    async def main(engine: Engine) -> None:
        rows = await engine.logprobs([PROMPT, PROMPT[:2]], temperature=0.7)
        assert [len(row) for row in rows] == [4, 2]
        assert all(row[0] == 0 and all(p < 0 for p in row[1:]) for row in rows)

    run(main)


def test_a_paused_engine_holds_requests_until_it_is_resumed(run: Run) -> None:
    async def main(engine: Engine) -> None:
        await engine.pause()
        assert engine.health().paused
        call = asyncio.ensure_future(engine.generate(PROMPT, LONG, key=(1, 0, 0, 0)))
        await asyncio.sleep(0.05)
        assert not call.done() and engine.health().waiting == 1
        await engine.resume()
        (reply,) = await call
        assert reply.ids and not engine.health().paused

    run(main)


def test_abort_ends_the_requests_under_a_key_and_no_others(run: Run) -> None:
    async def main(engine: Engine) -> None:
        await engine.pause()
        keys = [(1, 0, 0, 0), (1, 0, 1, 0), (1, 1, 0, 0)]
        calls = [asyncio.ensure_future(engine.generate(PROMPT, LONG, key=key)) for key in keys]
        await asyncio.sleep(0.01)
        assert await engine.abort((1, 0)) == 2
        for call in calls[:2]:
            (ended,) = await call
            assert ended.stop_reason == "aborted" and ended.ids == []
        assert await engine.abort((1, 0)) == 0
        await engine.resume()
        (other,) = await calls[2]
        assert other.stop_reason != "aborted" and other.ids

    run(main)


def test_tokens_carry_the_version_after_an_update(
    run: Run, request: pytest.FixtureRequest, tiny_dir: Path
) -> None:
    of_vllm = "vllm" in request.node.callspec.params.values()
    folder = request.getfixturevalue("vllm")[1] if of_vllm else tiny_dir

    async def main(engine: Engine) -> None:
        await engine.update_weights(folder, 7)
        (reply,) = await engine.generate(PROMPT, Sampling(max_tokens=3, ignore_eos=True))
        assert reply.versions == [7, 7, 7] and engine.health().version == 7

    run(main)


def test_health_counts_tokens(run: Run) -> None:
    async def main(engine: Engine) -> None:
        (reply,) = await engine.generate(PROMPT, Sampling(max_tokens=3, ignore_eos=True))
        health = engine.health()
        assert health.generated_tokens == len(reply.ids) == 3
        assert (health.running, health.waiting, health.version) == (0, 0, 0)
        assert health.prefilled_tokens > 0

    run(main)


def test_closing_ends_who_waits_and_every_later_call_raises(run: Run) -> None:
    async def main(engine: Engine) -> None:
        await engine.pause()
        call = asyncio.ensure_future(engine.generate(PROMPT, LONG))
        await asyncio.sleep(0.01)
        await engine.close()
        (ended,) = await call
        assert ended.stop_reason == "aborted"
        for later in (
            engine.generate(PROMPT, LONG),
            engine.logprobs([PROMPT]),
            engine.update_weights(None, 1),
        ):
            with pytest.raises(RuntimeError, match="the engine is closed"):
                await later
        with pytest.raises(RuntimeError, match="the engine is closed"):
            engine.health()
        await engine.close()

    run(main)
