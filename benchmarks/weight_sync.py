"""Weight sync: how long do new weights take to an engine of another process, by each method?

    OMP_NUM_THREADS=1 python benchmarks/weight_sync.py [--vllm PYTHON] [--quick]

One trainer, one engine process, float32; whole pushes with their proofs (fingerprints and probe),
the best of 3 after one that warms up. The floor is one copy of the same bytes in memory, in the
same run. Asked: the process group at 70 % of the floor's speed; exits 1 below. `--width` and
`--layers` say how large the model is. With a GPU that both sides see, `--transport nccl` has the
group go between GPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from target import Target, judge

from trireme.checkpoint.layout import JobFolder
from trireme.config.schema import OptimizerConfig
from trireme.demo.tiny_model import make_tiny_model
from trireme.engines.device import Device
from trireme.engines.make import EngineSpec
from trireme.ext.remote.engine import RemoteEngine
from trireme.ext.remote.engine_host import EngineHost, start_all, stop_all
from trireme.ext.remote.push import GroupSync, HttpSync
from trireme.sync.checkpoint import CheckpointPush
from trireme.sync.probe import Probe
from trireme.trainer.backend import Backend
from trireme.trainer.settings import TrainSettings

TIMES, SHARE_OF_FLOOR = 3, 0.7


async def best(push: Callable[[int], Awaitable[Any]], first: int) -> float:
    """Seconds of the fastest push but the first."""
    seconds = []
    for version in range(first, first + TIMES + 1):
        started = time.perf_counter()
        await push(version)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


async def measure(folder: Path, options: argparse.Namespace) -> list[tuple[str, float]]:
    """Seconds of each method."""
    model = make_tiny_model(
        folder / "model", ["a b c"], seed=0, width=options.width, layers=options.layers
    )
    device, kind = Device(1), "vllm" if options.vllm else "torch"
    backend = Backend(model, TrainSettings(OptimizerConfig(), 512, grad_clip=1.0))
    host = EngineHost(
        EngineSpec(str(model), 128, kind=kind),
        name="engine",
        log_file=folder / "engine.log",
        python=options.vllm or sys.executable,
    )
    await start_all([host])
    engine = RemoteEngine([host.url], api_key=host.key)
    size = backend.module.config.vocab_size
    common: dict[str, Any] = {"dtype": "float32", "probe": Probe(size, "float32")}
    weights = backend.weights()
    buffers = {name: tensor.clone() for name, tensor in weights.items()}

    async def copy(_: int) -> None:
        for name, tensor in weights.items():
            buffers[name].copy_(tensor)

    job = JobFolder(folder / "job")
    job.make()
    pushes = {
        "copy in memory (floor)": copy,
        f"process group ({options.transport})": GroupSync(
            backend, engine, device, transport=options.transport, **common
        ).push,
        "HTTP buckets": HttpSync(backend, engine, device, **common).push,
        "checkpoint files": CheckpointPush(
            backend, device, job, step=lambda: 1, engine=engine, **common
        ).push,
    }
    try:
        found = [(name, await best(push, 10 * i)) for i, (name, push) in enumerate(pushes.items())]
    finally:
        await engine.close()
        await stop_all([host])
        device.close()
    total = sum(t.nbytes for t in weights.values())
    print(f"{total / 1e9:.2f} GB in {len(weights)} tensors, to one {kind} engine")
    print(f"{'method':<26}{'seconds':>9}{'GB/s':>8}{'x floor':>9}")
    for name, seconds in found:
        rate, ratio = total / seconds / 1e9, seconds / found[0][1]
        print(f"{name:<26}{seconds:>9.3f}{rate:>8.2f}{ratio:>9.1f}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vllm", help="Python of an environment that has vLLM")
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument("--transport", default="gloo", choices=("gloo", "nccl"))
    options = parser.parse_args()
    if options.quick:
        options.width, options.layers = 64, 2
    with tempfile.TemporaryDirectory() as folder:
        (_, floor), (name, group), *_ = asyncio.run(measure(Path(folder), options))
    target = Target(f"{name}, speed / floor's", floor / group, SHARE_OF_FLOOR)
    return judge(target, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
