"""VllmEngine against Hugging Face's own forward pass: scores, updates in flight, a stale head."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.test_adapter import adapted, change
from tests.engines.test_torch_engine import reference
from tests.engines.test_torch_engine import run as embedded
from tests.ext.vllm.host import vllm_host
from tests.limits import HANG_S
from tests.tiny import make_model
from tests.trainer.samples import backend_of
from tests.vllm import START_S, needs_vllm
from trireme.config.schema import OptimizerConfig
from trireme.engines.device import Device
from trireme.engines.engine import Completion, Engine, Sampling
from trireme.engines.weights import fingerprint
from trireme.ext.remote.engine import RemoteEngine
from trireme.ext.remote.engine_host import EngineHost, start_all, stop_all
from trireme.ext.remote.push import GroupSync, HttpSync
from trireme.sync.probe import Gap, Probe, WrongWeights, compare_weights
from trireme.trainer.backend import Backend
from trireme.trainer.settings import TrainSettings
from trireme.trainer.source import PartSource

pytestmark = [needs_vllm, pytest.mark.slow]
PROMPT = [5, 6, 7, 8]
WORKERS = "tests.ext.vllm.stale_head"


def close_to(own: torch.Tensor, found: list[float]) -> bool:
    return torch.allclose(own, torch.tensor(found), atol=1e-5)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, EngineHost]]:
    """A model, and one process that serves it for all tests: it takes long to start."""
    folder = make_model(tmp_path_factory.mktemp("vllm") / "a", head_dim=32)
    host = vllm_host(folder, max_model_len=512, enable_prefix_caching=True)
    asyncio.run(start_all([host], START_S))
    yield folder, host
    asyncio.run(stop_all([host]))


def run(host: EngineHost, main: Callable[[RemoteEngine], Awaitable[Any]]) -> None:
    async def go() -> None:
        engine = RemoteEngine([host.url], api_key=host.key)
        try:
            await asyncio.wait_for(main(engine), HANG_S)
        finally:
            await engine.close()

    asyncio.run(go())


def trained(folder: Path, learning_rate: float) -> Backend:
    """A trainer whose weights differ from the folder's by a step of that size in every number."""
    backend = Backend(folder, TrainSettings(OptimizerConfig(), 512, grad_clip=1.0))
    with torch.no_grad():
        for parameter in backend.module.parameters():
            parameter.add_(learning_rate * torch.randn_like(parameter))
    return backend


async def generated(engine: RemoteEngine) -> int:
    """Tokens that the one engine process has made so far."""
    [health] = await engine.get_all("/engine/health")
    return health["generated_tokens"]


def test_scores_samples_and_updates_are_the_models_own(
    served: tuple[Path, EngineHost], tmp_path: Path
) -> None:
    old, host = served
    new = make_model(tmp_path / "b", seed=1, head_dim=32)

    async def main(engine: RemoteEngine) -> None:
        kinds = [
            Sampling(max_tokens=20, n=2, ignore_eos=True),
            Sampling(max_tokens=20, n=2, temperature=0.7, top_p=0.8, top_k=30, ignore_eos=True),
            Sampling(max_tokens=20, temperature=1.3, repetition_penalty=1.2, min_tokens=20),
            Sampling(max_tokens=20, temperature=0, ignore_eos=True, logprobs=2),
        ]
        for place, sampling in enumerate(kinds):
            for c in await engine.generate(PROMPT, sampling, key=(1, place, 0)):
                own = reference(old, PROMPT + c.ids, sampling.temperature or 1.0)[3:]
                assert close_to(own, c.logprobs)
                plain = place == 0
                assert (c.sampler_logprobs == c.logprobs) is plain or plain
        assert all(p == 0 for p in c.sampler_logprobs) and len(c.alternatives[0]) == 2
        assert max(c.alternatives[0].values()) == pytest.approx(c.logprobs[0], abs=1e-6)
        first = await engine.generate(PROMPT, kinds[1], key=(9, 0, 0))
        again = await engine.generate(PROMPT, kinds[1], key=(9, 0, 0))
        assert [c.ids for c in first] == [c.ids for c in again]
        for heat in (1.0, 0.7):
            [scored] = await engine.logprobs([PROMPT + c.ids], temperature=heat)
            assert close_to(reference(old, PROMPT + c.ids, heat), scored[1:])

        # An engine that keeps all cores busy may not let this process send the update in time, so
        # that it comes after the reply: then once more, with a rest before it.
        long = Sampling(max_tokens=480, n=64, ignore_eos=True)
        version = 0
        for attempt in range(10):
            await asyncio.sleep(0.2 * attempt)
            before = await generated(engine)
            call = asyncio.ensure_future(engine.generate(PROMPT, long, key=(2, attempt, 0)))
            while await generated(engine) < before + 20:
                await asyncio.sleep(0.005)
            await engine.update_weights(new, version + 1)
            c = (await call)[0]
            if len(set(c.versions)) > 1:
                break
            await engine.update_weights(old, version := version + 2)
        switch = c.versions.index(version + 1)
        assert c.versions == [version] * switch + [version + 1] * (480 - switch)
        ids = PROMPT + c.ids
        assert close_to(reference(old, ids)[3:][:switch], c.logprobs[:switch])
        assert close_to(reference(new, ids)[3:][switch:], c.logprobs[switch:])

        await engine.update_weights(old, version + 2)

    run(host, main)


def test_a_stop_string_ends_a_reply_as_in_the_embedded_engine(
    served: tuple[Path, EngineHost],
) -> None:
    async def main(engine: RemoteEngine) -> None:
        free = Sampling(max_tokens=40, seed=3, ignore_eos=True)
        [whole] = await engine.generate(PROMPT, free)
        word = whole.text[10:13]
        stops = Sampling(max_tokens=40, seed=3, ignore_eos=True, stop=(word,))
        [cut] = await engine.generate(PROMPT, stops)
        assert cut.stop_reason == "stop" and cut.stop == word
        assert cut.text == whole.text.partition(word)[0]
        assert cut.ids == whole.ids[: len(cut.ids)] and len(cut.ids) < 40
        token = whole.ids[5]
        [stopped] = await engine.generate(
            PROMPT, Sampling(max_tokens=40, seed=3, ignore_eos=True, stop_token_ids=(token,))
        )
        assert stopped.stop == token and stopped.ids == whole.ids[: whole.ids.index(token) + 1]

    run(served[1], main)


def test_weights_come_by_a_group_and_by_http_and_are_proved(
    served: tuple[Path, EngineHost],
) -> None:
    folder, host = served

    async def main(engine: RemoteEngine) -> None:
        device = Device(1)
        common: dict[str, Any] = {"dtype": "float32", "probe": Probe(99, "float32")}
        group = GroupSync(trained(folder, 0.1), engine, device, bucket_bytes=4096, **common)
        http = HttpSync(trained(folder, 1e-6), engine, device, **common)
        engine.bucket_bytes = 4096
        assert (await group.push(1))["sync/probe_diff"] < 1e-5
        assert (await http.push(2))["sync/probe_diff"] < 1e-5
        assert (await group.push(3))["sync/probe_diff"] < 1e-5
        await engine.update_weights(folder, 4)
        device.close()

    run(host, main)
    # its own calls, which need what these make
    assert "weight transfer engine: GroupTransfer" in (folder.parent / "engine.log").read_text()


@pytest.mark.parametrize("arch", ["qwen3_moe", "mixtral"])
def test_a_mixtures_experts_come_as_one_tensor_and_are_proved(arch: str, tmp_path: Path) -> None:
    """In vLLM's files they lie expert by expert, Mixtral's router under another name too."""
    folder = make_model(tmp_path / "a", arch, head_dim=32)
    backend = trained(folder, 0.05)

    async def main(engine: RemoteEngine) -> None:
        device = Device(1)
        common: dict[str, Any] = {"dtype": "float32", "probe": Probe(99, "float32")}
        group = GroupSync(backend, engine, device, bucket_bytes=4096, **common)
        http = HttpSync(trained(folder, 0.1), engine, device, **common)
        assert (await group.push(1))["sync/probe_diff"] < 1e-5
        assert (await http.push(2))["sync/probe_diff"] < 1e-5
        export = tmp_path / "saved" / "huggingface"
        export.mkdir(parents=True)
        backend.save(export.parent, hf=True)
        await engine.update_weights(export, 3)
        [scored] = await engine.logprobs([[*PROMPT, 9, 10, 11]])
        assert scored == pytest.approx(backend.score([[*PROMPT, 9, 10, 11]])[0], abs=1e-5)
        device.close()

    host = vllm_host(folder)
    asyncio.run(start_all([host], START_S))
    try:
        run(host, main)
    finally:
        asyncio.run(stop_all([host]))


def test_an_adapter_comes_alone_by_a_group_and_by_http_and_is_proved(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "a", head_dim=32)
    backend = adapted(folder, rslora=True)

    async def main(engine: RemoteEngine) -> None:
        device = Device(1)
        common: dict[str, Any] = {"dtype": "float32", "probe": Probe(99, "float32")}
        source = PartSource(backend, "adapter")
        group = GroupSync(source, engine, device, bucket_bytes=4096, **common)
        memory = HttpSync(source, engine, device, **common)
        size = sum(tensor.nbytes for tensor in source.weights().values())
        rows = [[*PROMPT, 9, 10, 11, 12], [30, 3, 4, 40]]
        for version, sync in enumerate((memory, group, memory, group), 1):
            change(backend, version)
            found = await sync.push(version)
            assert found["sync/probe_diff"] < 1e-5 and found["sync/pushed_bytes"] == size
            plain = backend_of(folder)
            plain.module.load_state_dict(backend.weights(), strict=False)
            for ours, merged in zip(await engine.logprobs(rows), plain.score(rows), strict=True):
                assert ours == pytest.approx(merged, abs=1e-5)
        [reply] = await engine.generate(PROMPT, Sampling(max_tokens=8, ignore_eos=True))
        assert reply.versions == [4] * 8
        own = plain.score([PROMPT + reply.ids])[0][4:]
        assert reply.logprobs == pytest.approx(own, abs=1e-5)

        class Stale(PartSource):
            def weights(self) -> dict[str, torch.Tensor]:
                return {n: t * (1 - 1e-6) for n, t in super().weights().items()}

        marks = fingerprint(source.weights(), "float32")
        await engine.update_weights(Stale(backend, "adapter").weights(), 5)
        with pytest.raises(WrongWeights, match=r"tensors differ \(model"):
            compare_weights(await engine.fingerprint(), marks, version=5)
        with pytest.raises(
            RuntimeError, match="expects a LoRA adapter, and received a push of all weights"
        ):
            await engine.update_weights(folder, 6)
        device.close()

    host = vllm_host(folder, max_lora_rank=8)
    asyncio.run(start_all([host], START_S))
    try:
        run(host, main)
    finally:
        asyncio.run(stop_all([host]))


def test_two_workers_of_an_engine_take_their_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else each wants a NUMA node
    folder = make_model(tmp_path / "a", head_dim=32)

    async def main(engine: RemoteEngine) -> None:
        assert await engine.get_all("/engine/group/size") == [{"workers": 2}]
        device, probe = Device(1), Probe(99, "float32")
        group = GroupSync(trained(folder, 0.1), engine, device, dtype="float32", probe=probe)
        assert (await group.push(1))["sync/probe_diff"] < 1e-5
        device.close()

    host = vllm_host(folder, tensor_parallel_size=2)
    asyncio.run(start_all([host], START_S))
    try:
        run(host, main)
    finally:
        asyncio.run(stop_all([host]))


def test_a_tied_head_that_stays_old_is_seen_by_both_proofs(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "a", head_dim=32)
    worker = {"worker_extension_cls": "tests.ext.vllm.stale_head.StaleHead"}

    async def main(engine: RemoteEngine) -> None:
        device, large = Device(1), trained(folder, 0.1)
        common: dict[str, Any] = {"dtype": "float32", "probe": Probe(99, "float32")}
        small = GroupSync(trained(folder, 1e-6), engine, device, **common)
        with pytest.raises(WrongWeights, match=r"1 of 25 tensors differ \(lm_head.weight\)"):
            await small.push(1)
        await engine.update_weights(large.weights(), 2)
        probe = Probe(99, "float32")
        [found] = await engine.logprobs([probe.ids])
        gap = Gap.of(found, large.score([probe.ids])[0])
        with pytest.raises(WrongWeights, match="log-probabilities differ from the trainer's by"):
            probe.judge(gap, version=2)
        device.close()

    host = vllm_host(folder, extra_engine_args=worker)
    asyncio.run(start_all([host], START_S))
    try:
        run(host, main)
    finally:
        asyncio.run(stop_all([host]))


def test_replies_are_those_of_the_embedded_engine(tmp_path: Path) -> None:
    """Prompts are cut into pieces of 64 tokens, and of 160 requests some 12 fit into the cache at
    once, so that others are preempted and prefilled again.
    """
    folder = make_model(tmp_path / "a", head_dim=32)
    prompts = [[2 + (3 * row + place) % 50 for place in range(5 + 7 * row)] for row in range(20)]
    kinds = [
        Sampling(max_tokens=100, n=4, ignore_eos=True),
        Sampling(max_tokens=100, n=2, temperature=1.5, top_p=0.9, top_k=30, min_p=0.1),
        Sampling(max_tokens=100, n=2, temperature=1.2, repetition_penalty=1.3, min_tokens=50),
    ]

    async def ask(engine: Engine) -> list[Completion]:
        asked = (
            engine.generate(ids, sampling, key=(kind, row))
            for kind, sampling in enumerate(kinds)
            for row, ids in enumerate(prompts)
        )
        return [reply for replies in await asyncio.gather(*asked) for reply in replies]

    small = {"kv_cache_memory_bytes": 2**22, "max_num_batched_tokens": 64}
    host = vllm_host(folder, max_model_len=512, extra_engine_args=small)
    asyncio.run(start_all([host], START_S))
    theirs: list[Completion] = []

    async def main(engine: RemoteEngine) -> None:
        theirs.extend(await ask(engine))

    try:
        run(host, main)
    finally:
        asyncio.run(stop_all([host]))
    ours = embedded(folder, ask, max_model_len=512)
    equal = [a.ids == b.ids for a, b in zip(ours, theirs, strict=True)]
    # a number that lies between two tokens' borders as the one and the other engine round them
    assert equal.count(False) <= 2, f"{equal.count(False)} of {len(equal)} replies differ"
    for a, b in zip(ours, theirs, strict=True):
        if a.ids == b.ids:
            assert b.logprobs == pytest.approx(a.logprobs, abs=1e-5)
            assert b.sampler_logprobs == pytest.approx(a.sampler_logprobs, abs=1e-5)
