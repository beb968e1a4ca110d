"""Push by HTTP and through memory: what travels, what is copied, and who waits meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import torch
from torch import Tensor

from tests.ext.http.made import on_port, torch_rollouts
from tests.limits import HANG_S
from tests.sync.test_probe_half import realistic
from tests.trainer.samples import settings
from trireme.engines.device import Device
from trireme.engines.engine import EngineTraits
from trireme.engines.weights import fingerprint
from trireme.ext.remote import push
from trireme.ext.remote.engine import RemoteEngine
from trireme.ext.remote.push import GroupSync, HttpSync
from trireme.ext.remote.weight_group import Meeting
from trireme.sync.probe import Probe
from trireme.sync.push import MemorySync
from trireme.trainer.backend import Backend


def pushed(folder: Path, main: Callable[[HttpSync, RemoteEngine, Device], Awaitable[Any]]) -> None:
    """`main` with a trainer in bfloat16 and a server of such an engine."""

    async def go() -> None:
        async with (
            torch_rollouts(folder, dtype="bfloat16") as rollouts,
            on_port(rollouts) as url,
        ):
            engine, device = RemoteEngine([url]), Device(1)
            backend = Backend(folder, settings(dtype="bfloat16", max_token_len=512))
            probe = Probe(backend.module.config.vocab_size, "bfloat16")
            sync = HttpSync(backend, engine, device, dtype="bfloat16", probe=probe)
            try:
                await asyncio.wait_for(main(sync, engine, device), HANG_S)
            finally:
                await engine.close()
                device.close()

    asyncio.run(go())


def test_two_bytes_a_weight_travel_by_http_a_bucket_at_a_time(tmp_path: Path) -> None:
    sizes: list[int] = []

    async def note(request: httpx.Request) -> None:
        if request.url.path == "/engine/weights":
            sizes.append(len(request.content))

    folder = realistic(tmp_path / "model", 4096)
    weights = sum(p.numel() for p in Backend(folder, settings()).module.parameters())

    async def main(sync: HttpSync, engine: RemoteEngine, _: Device) -> None:
        engine._client.event_hooks["request"].append(note)
        engine.bucket_bytes = 2**17
        metrics = await sync.push(1)
        assert metrics["sync/probe_mean"] < 0.1 and metrics["sync/pushed_bytes"] == 2 * weights
        assert engine.health().version == 1

    pushed(folder, main)
    assert 2 * weights < sum(sizes) < 2.05 * weights
    assert len(sizes) > 3


def test_the_trainer_rests_while_its_weights_are_sent(tmp_path: Path) -> None:
    async def main(sync: HttpSync, engine: RemoteEngine, device: Device) -> None:
        order: list[str] = []
        send = engine.send_weights

        async def slowly(bucket: Mapping[str, Tensor]) -> None:
            if not order:
                step = asyncio.ensure_future(device.run(order.append, "train step"))
                steps.append(step)
                await asyncio.sleep(0.2)  # long enough for a step that need not wait
            await send(bucket)
            order.append("bucket")

        steps: list[asyncio.Future[None]] = []
        engine.bucket_bytes, engine.send_weights = 2**17, slowly
        await sync.push(1)
        await asyncio.gather(*steps)
        assert order[-1] == "train step" and order.count("bucket") > 3

    pushed(realistic(tmp_path / "model", 4096), main)


def test_a_push_that_is_given_up_leaves_the_trainers_device(tmp_path: Path) -> None:
    async def main(sync: HttpSync, engine: RemoteEngine, device: Device) -> None:
        asked = asyncio.Event()

        async def never(bucket: Mapping[str, Tensor]) -> None:
            asked.set()
            await asyncio.Event().wait()

        engine.send_weights = never
        push = asyncio.ensure_future(sync.push(1))
        await asked.wait()
        push.cancel()
        with pytest.raises(asyncio.CancelledError):
            await push
        assert await asyncio.wait_for(device.run(lambda: 7), HANG_S) == 7

    pushed(realistic(tmp_path / "model", 4096), main)


@pytest.mark.parametrize("lock_step", [False, True])
def test_what_an_engine_of_this_process_copies_from(tmp_path: Path, lock_step: bool) -> None:
    folder = realistic(tmp_path / "model", 512)
    taken: list[dict[str, Tensor]] = []

    class Engine:
        """Takes weights, and is never asked for more."""

        async def update_weights(self, source: dict[str, Tensor], version: int) -> None:
            taken.append(source)
            raise RuntimeError("enough")

    backend = Backend(folder, settings())

    async def main() -> None:
        device, engine = Device(1), cast(Any, Engine())
        common: Any = {"dtype": "bfloat16", "probe": Probe(512, "bfloat16")}
        sync = MemorySync(backend, engine, device, shared=False, lock_step=lock_step, **common)
        with pytest.raises(RuntimeError, match="enough"):
            await sync.push(1)
        device.close()

    asyncio.run(main())
    own = {tensor.data_ptr() for tensor in backend.weights().values()}
    dtype = torch.float32 if lock_step else torch.bfloat16
    assert {tensor.dtype for tensor in taken[0].values()} == {dtype}
    assert all((tensor.data_ptr() in own) == lock_step for tensor in taken[0].values())


@pytest.mark.parametrize(("shared", "size"), [(True, 0), (False, 4)])
def test_a_push_through_memory_counts_the_bytes_that_it_copies(shared: bool, size: int) -> None:
    class Trainer:
        weight = torch.tensor([0.5])

        def weights(self) -> Mapping[str, Tensor]:
            return {"weight": self.weight}

        def unmoved(self, dtype: str) -> dict[str, float]:
            return {}

        def score(self, ids: Any) -> list[list[float]]:
            return [[0.0] + [-float(self.weight[0])] * (len(row) - 1) for row in ids]

    class Engine(Trainer):
        traits = EngineTraits()

        async def update_weights(self, source: Mapping[str, Tensor] | None, version: int) -> None:
            assert (source is None) == shared
            self.weight = Trainer.weight if source is None else source["weight"]

        async def fingerprint(self) -> Any:
            return fingerprint({"weight": self.weight}, "float32")

        async def logprobs(self, ids: Any) -> list[list[float]]:
            return self.score(ids)

    async def main() -> dict[str, float]:
        device = Device(1)
        common: Any = {"dtype": "float32", "probe": Probe(99, "float32"), "shared": shared}
        sync = MemorySync(cast(Any, Trainer()), cast(Any, Engine()), device, **common)
        metrics = await sync.push(1)
        device.close()
        return metrics

    assert asyncio.run(main())["sync/pushed_bytes"] == size


@pytest.mark.parametrize("transport", ["gloo", "nccl"])
def test_a_group_has_the_trainer_first_and_each_engines_workers_behind_it(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    class Group:
        def __init__(self, meeting: Meeting) -> None:
            made.append(meeting)
            self.port = 4711

        def connect(self, names: Mapping[int, str]) -> None:
            made.append(dict(names))

    class Engine:
        urls = ("http://a", "http://b")
        servers = SimpleNamespace(instances={"http://a": "1", "http://b": "2"})

        async def get_all(self, path: str) -> list[dict[str, int]]:
            return [{"workers": 2}, {"workers": 1}]

        async def call_all(self, path: str, *bodies: Any) -> None:
            made.append((path, bodies))

    monkeypatch.setattr(push, "WeightGroup", Group)
    none, engine = cast(Any, None), cast(Any, Engine())
    options: dict[str, Any] = {"dtype": "float32", "probe": none, "timeout": 7.0}
    sync = GroupSync(none, engine, none, transport=transport, host="10.0.0.1", **options)
    asyncio.run(sync._meet())
    common = {"host": "10.0.0.1", "world_size": 4, "backend": transport, "timeout": 7.0}
    assert made[0] == Meeting(port=0, rank=0, **common)
    names = {1: "worker 0 of http://a", 2: "worker 1 of http://a", 3: "worker 0 of http://b"}
    joined = ("/engine/group/join", tuple(common | {"port": 4711, "rank": r} for r in (1, 3)))
    assert len(made) == 3 and names in made and joined in made
    assert sync._met == Engine.servers.instances
