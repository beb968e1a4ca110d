"""A server, and a Model in a workflow, under requests that nobody thought of."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ext.http import bad, fuzz
from tests.ext.http.made import command, torch_rollouts
from tests.limits import HANG_S

COUNTS = [
    pytest.param(120, id="some"),
    pytest.param(
        int(os.environ.get("TRIREME_FUZZ", "10000")),
        id="all",
        marks=[pytest.mark.large, pytest.mark.timeout(7200)],
    ),
]


@pytest.mark.extension("rollout_server")
@pytest.mark.parametrize("count", COUNTS)
def test_no_request_breaks_the_server_or_is_answered_by_a_failure_of_ours(
    tiny_dir: Path, tmp_path: Path, count: int
) -> None:
    with (
        command(tmp_path, tiny_dir, "--max-model-len", "64") as (process, url),
        httpx.Client(base_url=url, timeout=HANG_S) as client,
    ):
        target = fuzz.Target(client)
        fuzz.fuzz_bodies(target, count * 3 // 5)
        fuzz.fuzz_description(target, count // 5)
        fuzz.fuzz_wire(target, count // 5)
        print("\nanswers of the server:", dict(sorted(target.statuses.items())))
        assert process.poll() is None


@pytest.mark.parametrize("count", COUNTS)
def test_no_option_of_a_workflow_s_call_breaks_the_engine(tiny_dir: Path, count: int) -> None:
    """What is refused is a ValueError of one sentence, which fails that rollout alone."""
    names = st.one_of(fuzz.KEYS, st.sampled_from(["max_tokens", "min_tokens", "stop_token_ids"]))
    options = st.dictionaries(names, fuzz.VALUES, min_size=1, max_size=3)
    messages = st.one_of(st.just(bad.HI), fuzz.VALUES)
    refused = 0

    async def main() -> None:
        async with torch_rollouts(tiny_dir, max_model_len=64) as rollouts:
            loop = asyncio.get_running_loop()

            async def call(given_messages: Any, given_options: dict[str, Any]) -> None:
                nonlocal refused
                short: Any = {"max_tokens": 2} | given_options
                for work in (
                    rollouts.model(()).chat_samples(given_messages, **short),
                    rollouts.model(()).generate_samples([5, 6], **short),
                ):
                    try:
                        await work
                    except (ValueError, TypeError) as error:
                        refused += 1
                        assert "\n" not in str(error)
                [reply] = await rollouts.model((9, 9, 9)).generate_samples(
                    [5, 6, 7], temperature=0.0, max_tokens=6, ignore_eos=True
                )
                before.append(reply.tokens)
                assert reply.tokens == before[0]

            @fuzz._settings(count // 5)
            @given(messages, options)
            def one(given_messages: Any, given_options: dict[str, Any]) -> None:
                work = call(given_messages, given_options)
                asyncio.run_coroutine_threadsafe(work, loop).result(60)

            before: list[list[int]] = []
            await asyncio.to_thread(one)
            rollouts.engine.health()

    asyncio.run(main())
    print(f"\ncalls of a workflow: {refused} of {2 * (count // 5)} refused")
    assert refused > 0
