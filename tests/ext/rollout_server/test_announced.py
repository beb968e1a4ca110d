"""Weights over a process group: a trainer in another process, plain HTTP and broadcasts."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.job import environment
from tests.ext.http import bad
from tests.ext.http.made import client_of, on_port, torch_rollouts
from tests.limits import HANG_S
from trireme.ext.rollout_server import announced
from trireme.ext.rollout_server.announced import AnnouncedWeights

TRAINER = """
import sys
import httpx, torch
from datetime import timedelta
from safetensors.torch import load_file
from torch._C._distributed_c10d import ProcessGroupGloo, TCPStore

url, port, folder, way = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
ask = httpx.Client(base_url=url, timeout=None)

def post(path, **body):
    answer = ask.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()

assert ask.get("/get_world_size/").json() == {"world_size": 1}
post("/init_communicator/", host="127.0.0.1", port=port, world_size=2)
limit = timedelta(minutes=20)
store = TCPStore("127.0.0.1", port, 2, is_master=False, timeout=limit)
group = ProcessGroupGloo(store, 1, 2, limit)

def broadcast(tensor):
    group.broadcast(tensor, 1).wait()

tensors = {n: t + 0.05 for n, t in load_file(folder + "/model.safetensors").items()}
if way == "odd name":
    tensors = {"nothing." + name: tensor for name, tensor in tensors.items()}
if way == "bucket":
    names = sorted(tensors)
    for part in (names[:5], names[5:]):
        rows, place, pieces = [], 0, []
        for name in part:
            tensor = tensors[name].contiguous()
            raw = tensor.view(-1).view(torch.uint8)
            rows.append({"name": name, "shape": list(tensor.shape), "dtype": str(tensor.dtype),
                         "start_idx": place, "end_idx": place + raw.numel(),
                         "numel": tensor.numel()})
            place += raw.numel()
            pieces.append(raw)
        post("/update_flattened_params/", metadatas=rows)
        broadcast(torch.cat(pieces))
    post("/process_weights_after_loading/")
else:
    for name, tensor in tensors.items():
        post("/update_named_param/", name=name, dtype=str(tensor.dtype), shape=list(tensor.shape))
        broadcast(tensor)
answer = ask.post("/reset_prefix_cache/")
print(answer.status_code, answer.text)
post("/close_communicator/")
"""


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


async def trainer(url: str, folder: Path, way: str) -> str:
    """What a trainer of another process says at the end of its update."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", TRAINER, url, str(free_port()), str(folder), way),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    said, errors = await asyncio.wait_for(process.communicate(), HANG_S)
    assert process.returncode == 0, errors.decode()
    return said.decode()


@pytest.mark.parametrize("way", ["tensor by tensor", "bucket"])
def test_weights_of_a_trainer_s_process_are_those_that_sample(tiny_dir: Path, way: str) -> None:
    async def main() -> None:
        async with torch_rollouts(tiny_dir) as rollouts, on_port(rollouts) as url:
            before: Any = await rollouts.engine.fingerprint()
            assert '"version":1' in await trainer(url, tiny_dir, way)
            after: Any = await rollouts.engine.fingerprint()
            assert rollouts.engine.health().version == 1
            assert before.keys() == after.keys()
            assert all(before[name] != after[name] for name in before)

    asyncio.run(main())


def test_tensors_of_another_model_are_refused_when_the_update_ends(tiny_dir: Path) -> None:
    async def main() -> None:
        async with torch_rollouts(tiny_dir) as rollouts, on_port(rollouts) as url:
            before = await rollouts.engine.fingerprint()
            said = await trainer(url, tiny_dir, "odd name")
            assert (
                said.startswith("400") and "not belong to this model" in said and "nothing." in said
            )
            assert await rollouts.engine.fingerprint() == before

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "key"),
    [("/update_weights_from_path/", {}), ("/engine/weights/commit", {"version": 1})],
)
def test_a_path_without_weights_is_refused_in_the_same_words_whatever_is_there(
    tiny_dir: Path, tmp_path: Path, path: str, key: dict[str, Any]
) -> None:
    weights_file = (tiny_dir / "model.safetensors").read_bytes()
    (tmp_path / "text").write_text("root:x:0:0")
    places = {"empty": None, "cut": weights_file[:-10], "garbage": b"\xff" * 99, "pipe": None}
    for name, content in places.items():
        (tmp_path / name).mkdir()
        if content is not None:
            (tmp_path / name / "model.safetensors").write_bytes(content)
    os.mkfifo(tmp_path / "pipe" / "model.safetensors")
    (tmp_path / "closed").mkdir(mode=0)

    async def main() -> None:
        async with torch_rollouts(tiny_dir) as rollouts, client_of(rollouts) as client:
            names = [*places, "text", "closed", "nowhere", "a" * 5000, "a\0b"]
            for where in ["/etc/shadow", "/proc/self/mem", *(str(tmp_path / n) for n in names)]:
                answer = await client.post(path, json={"path": where} | key)
                said = bad.refused(answer).replace(f"{where[:200]!r}", "P")
                assert answer.status_code == 400
                assert said == (
                    "path is P: expected a folder of safetensors files that this server can read, "
                    "or one such file"
                )
            assert rollouts.engine.health().version == 0
            good = await client.post(path, json={"path": str(tiny_dir)} | key)
            assert good.status_code == 200 and rollouts.engine.health().version == 1

    asyncio.run(main())


def test_a_meeting_that_never_happens_is_told_and_another_may_follow(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announced, "TIMEOUT_S", 0.3)

    async def main() -> None:
        async with torch_rollouts(tiny_dir) as rollouts, client_of(rollouts) as client:
            for _ in range(2):
                port = free_port()
                body = {"host": "127.0.0.1", "port": port}
                assert (await client.post("/init_communicator/", json=body)).status_code == 200
                late = await client.post("/reset_prefix_cache/")
                assert late.status_code == 500
                message = late.json()["error"]["message"]
                assert f"no trainer joined the group at 127.0.0.1:{port} in 0.3 s" in message
            assert (await client.post("/close_communicator/")).status_code == 200
            body = {"infer_requests": [{"messages": [{"role": "user", "content": "a"}]}]}
            assert (await client.post("/infer/", json=body)).status_code == 200

    asyncio.run(main())


def test_a_tensor_without_a_group_and_a_bucket_of_other_sizes_are_refused(tiny_dir: Path) -> None:
    async def main() -> None:
        async with torch_rollouts(tiny_dir) as rollouts, client_of(rollouts) as client:
            one = {"name": "w", "dtype": "torch.float32", "shape": [2]}
            await client.post("/update_named_param/", json=one)
            refused = await client.post("/reset_prefix_cache/")
            assert refused.status_code == 400
            assert "call init_communicator first" in refused.json()["error"]["message"]
            row = {**one, "start_idx": 0, "end_idx": 4}
            refused = await client.post("/update_flattened_params/", json={"metadatas": [row]})
            assert refused.status_code == 400
            assert "w has bytes 0 to 4: expected 8 bytes" in refused.json()["error"]["message"]
            lost = await client.post("/update_flattened_params/", json={"metadatas": [one]})
            assert lost.status_code == 422 and "start_idx" in lost.json()["error"]["message"]

    asyncio.run(main())


def test_a_client_that_goes_away_does_not_end_the_meeting(tiny_dir: Path) -> None:
    async def main() -> None:
        async with torch_rollouts(tiny_dir) as rollouts:
            group = AnnouncedWeights(rollouts.engine, timeout=1.0)
            await group.join("127.0.0.1", free_port())
            waiting = asyncio.ensure_future(group.ready())
            await asyncio.sleep(0.05)
            waiting.cancel()
            with pytest.raises(RuntimeError, match="no trainer joined"):
                await group.ready()
            assert await group.ready() == 0

    asyncio.run(main())
