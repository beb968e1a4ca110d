"""vLLM with pictures: it sees what the trainer sees, before a push and after it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.e2e.job import run as run_job
from tests.ext.images.seeing import make_seeing, reader_for
from tests.ext.images.test_exact import known, samples
from tests.ext.images.test_runs import config_of, gaps
from tests.ext.vllm.host import vllm_host
from tests.ext.vllm.test_composites import WIDE, learn
from tests.ext.vllm.test_engine import run
from tests.trainer.samples import backend_of
from tests.vllm import PYTHON, START_S, needs_vllm
from trireme.batch import of_tokens
from trireme.engines.device import Device
from trireme.engines.engine import Sampling
from trireme.ext.remote.engine import RemoteEngine
from trireme.ext.remote.engine_host import start_all, stop_all
from trireme.ext.remote.push import GroupSync
from trireme.ext.vllm.options import SEES
from trireme.pictures import BEGIN, Picture
from trireme.sync.probe import Probe
from trireme.trainer.backend import Backend
from trireme.trainer.source import PartSource

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.extension("images")]


def scores(backend: Backend, row: list[int], pictures: dict[int, Picture]) -> Tensor:
    """log p of the text tokens of a row after the first, by the trainer."""
    return backend.logprobs(of_tokens([row], pictures=[*pictures.values()]))


def compared(
    backend: Backend, row: list[int], pictures: dict[int, Picture], got: list[float]
) -> float:
    """The largest difference of an engine's numbers for the last tokens of a row, nats."""
    expected = scores(backend, row, pictures)[-len(got) :]
    return float((expected - torch.tensor(got)).abs().max())


@pytest.mark.parametrize(
    ("family", "learns"), [("qwen2_5_vl", True), ("qwen3_vl", False)], ids=["tower", "frozen"]
)
def test_vllm_sees_what_the_trainer_sees(family: str, learns: bool, tmp_path: Path) -> None:
    folder = make_seeing(tmp_path / family, family, **WIDE)
    rows, reader = samples(folder), reader_for(folder)
    shown = known(rows)
    trained: Any = {"trains_tower": True, "trains_projector": True} if learns else {}
    backend = backend_of(folder, max_token_len=999, **trained)
    prompts = [e.tokens.tolist()[: e.prompt_length] for e in (rows[0], rows[3], rows[4], rows[6])]

    async def main(engine: RemoteEngine) -> None:
        asked = Sampling(max_tokens=8, n=2, ignore_eos=True)
        pictures = [*shown.values()]

        async def compare(round_: int) -> None:
            asks = [
                engine.generate(p, asked, key=(round_, n, 0), pictures=pictures)
                for n, p in enumerate(prompts)
            ]
            for prompt, replies in zip(prompts, await asyncio.gather(*asks), strict=True):
                for reply in replies:
                    row = [*prompt, *reply.ids]
                    assert compared(backend, row, shown, reply.logprobs) < 1e-4
                    [scored] = await engine.logprobs([row], pictures=pictures)
                    text = [at for at, token in enumerate(row) if at and token < BEGIN]
                    assert compared(backend, row, shown, [scored[at] for at in text]) < 1e-4

        await compare(0)
        device = Device(1)
        source = backend if learns else PartSource(backend, "text")
        way = GroupSync(
            source, engine, device, bucket_bytes=4096, dtype="float32", probe=Probe(90, "float32")
        )
        for version in (1, 2):
            learn(backend, 0.05)
            await way.push(version)
            await compare(version)
        # a model that would write nothing but placeholders writes none where it sees a picture
        module: Any = backend.module
        head, unsampled = module.get_output_embeddings().weight, reader.unsampled
        head.data.zero_()
        head.data[list(unsampled)] = 1.0
        await way.push(3)
        [reply] = await engine.generate(
            prompts[0], Sampling(max_tokens=8, ignore_eos=True), pictures=pictures
        )
        assert not {*unsampled} & {*reply.ids}
        device.close()

    host = vllm_host(folder, max_model_len=128, **{SEES: True})
    asyncio.run(start_all([host], START_S))
    try:
        run(host, main)
    finally:
        asyncio.run(stop_all([host]))


def test_a_run_with_pictures_samples_with_vllm(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen3_vl", WIDE)
    config["explorer"]["rollout_model"] = {
        "engine_type": "vllm",
        "engine_num": 1,
        "engine_python": PYTHON,
        SEES: True,
    }
    config["synchronizer"] = {"sync_method": "nccl"}
    done = run_job(tmp_path, config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(gaps(tmp_path)) < 1e-4
    del config["explorer"]["rollout_model"][SEES]
    done = run_job(tmp_path, config, "name=blind")
    assert done.returncode
    text = "enable_multimodal is false, and .* shows pictures: expected true, so that vllm loads"
    assert re.search(text, " ".join((done.stdout + done.stderr).split()))
