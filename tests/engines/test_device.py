"""The embedded engine on a device that is not the CPU, without one: its replies, and its waits."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoTokenizer

from tests.fake_gpu import DEVICE, FakeGpu, put
from trireme.engines.device import Device, use_all_cores
from trireme.engines.engine import Sampling
from trireme.engines.request import Request, make_requests
from trireme.engines.torch import rows
from trireme.engines.torch.decoder import Decoder
from trireme.engines.torch.shell import load_shell

PROMPTS = [[5, 6, 7, 8, 9], [5, 6, 7, 20], [40, 41]]


def made(folder: Path, sampling: Sampling, *, on_device: bool) -> tuple[Decoder, list[Request]]:
    """A decoder by transformers' module, as on a GPU, and two requests of each prompt."""
    model = load_shell(folder, device="cpu", dtype="float32")
    if on_device:
        put(model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    decoder = Decoder(model, tokenizer, kv_tokens=4096, prefix_tokens=1024)
    limits: dict[str, Any] = {"room": 64, "max_model_len": 64, "vocabulary": decoder.vocabulary}
    return decoder, [
        request
        for number, ids in enumerate(PROMPTS)
        for request in make_requests(ids, sampling, (0, number, 0, 0), seed=1, ends=set(), **limits)
    ]


def replies(decoder: Decoder, requests: list[Request]) -> list[tuple[list[int], list[float]]]:
    """To their ends."""
    waiting = requests
    while waiting or decoder.active:
        decoder.advance(waiting, steps=4, hurry=lambda: False)
        waiting = []
    return [(request.out, request.logprobs) for request in requests]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=9, n=2, ignore_eos=True),
        Sampling(max_tokens=9, n=2, top_p=0.9, top_k=20, min_p=0.01, temperature=0.7, logprobs=2),
        Sampling(max_tokens=9, n=2, repetition_penalty=1.2, min_tokens=4),
        Sampling(max_tokens=9, n=1, temperature=0.0),
    ],
    ids=["plain", "cut", "penalised", "greedy"],
)
def test_a_device_draws_what_the_cpu_draws(sampling: Sampling, tiny_dir: Path) -> None:
    expected = replies(*made(tiny_dir, sampling, on_device=False))
    with FakeGpu(), patch.object(rows, "GPU", DEVICE.type):
        got = replies(*made(tiny_dir, sampling, on_device=True))
    for (ids, logprobs), (own_ids, own_logprobs) in zip(expected, got, strict=True):
        assert ids == own_ids
        assert logprobs == pytest.approx(own_logprobs, abs=1e-4)


def test_a_decode_step_waits_for_the_device_when_its_tokens_are_there(tiny_dir: Path) -> None:
    """Three reads of numbers that are there together, whatever the model's layers do."""
    asked = Sampling(max_tokens=20, n=2, ignore_eos=True)
    with FakeGpu() as gpu, patch.object(rows, "GPU", DEVICE.type):
        decoder, requests = made(tiny_dir, asked, on_device=True)
        decoder.advance(requests, steps=1, hurry=lambda: False)
        before = gpu.waits.copy()
        decoder.advance([], steps=8, hurry=lambda: False)
        assert gpu.waits - before == {"_to_copy": 3 * 8}


ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes, and no core")


@ON_CPU
def test_its_thread_has_torchs_cores_and_the_callers_has_one_until_it_is_closed() -> None:
    here = torch.get_num_threads()

    async def main() -> None:
        first, second = Device(), Device(2)
        assert [await one.run(torch.get_num_threads) for one in (first, second)] == [4, 2]
        assert torch.get_num_threads() == await asyncio.to_thread(torch.get_num_threads) == 1
        third = Device()
        assert await third.run(torch.get_num_threads) == 4, "the process's, though the caller has 1"
        third.close()

        def scored() -> int:
            use_all_cores()
            return torch.get_num_threads()

        assert await asyncio.to_thread(scored) == 4
        second.close()
        assert await first.run(torch.get_num_threads) == 4
        first.close()

    torch.set_num_threads(4)
    try:
        asyncio.run(main())
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(here)


@ON_CPU
@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone")
def test_the_callers_pool_of_threads_is_freed() -> None:
    """In a process of its own, since pools of other tests' threads would count."""
    program = """
import os, torch
from trireme.engines.device import Device
count = lambda: len(os.listdir("/proc/self/task"))
torch.set_num_threads(4)
torch.randn(1 << 20).exp()
before = count()
device = Device()
print(before - count(), torch.randn(1 << 20).exp().shape[0])
device.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},  # no thread looks whether cores are busy
    )  # fmt: skip
    # three of its pool have gone, and the device's has come
    assert done.stdout.split() == ["2", "1048576"], done.stderr
