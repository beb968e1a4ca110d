"""`trireme rollout`: an engine behind HTTP, for trainers and agents in other processes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trireme.config.problem import ConfigError

if TYPE_CHECKING:
    from trireme.engines.device import Device
    from trireme.server.rollouts import Rollouts

LOOPBACK = ("127.0.0.1", "localhost", "::1")
DTYPES = ("float32", "bfloat16", "float16")
GRACE_S = 5
"""How long answers under way may still take when the server is told to end."""


@dataclass(frozen=True)
class RolloutOptions:
    """The command's flags."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    engine: str = "torch"
    dtype: str = "auto"
    max_model_len: int | None = None
    use_async_engine: bool = True
    multi_turn_scheduler: str | None = None
    max_turns: int | None = None
    external_plugins: Sequence[Path] = ()
    seed: int = 42
    max_requests: int = 4096
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1


def rollout(options: RolloutOptions) -> int:
    """Serve until Ctrl-C (exit code 130) or SIGTERM (0); returns the exit code."""
    from trireme.cli.run import ENVIRONMENT, complain, load_all_plugins

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        _examine(options)
        load_all_plugins([str(path) for path in options.external_plugins])
        with _listen(options.host, options.port) as listener:
            return asyncio.run(_serve(options, listener))
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        complain(str(error))
        return 2 if isinstance(error, ConfigError | ValueError) else 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def _examine(options: RolloutOptions) -> None:
    """Raise ValueError for what cannot be, before anything is loaded."""
    if options.host not in LOOPBACK and not options.api_key:
        raise ValueError(
            f"--host {options.host} is open to other machines: give a key by --api-key, or serve "
            "on 127.0.0.1"
        )
    if options.engine != "torch":
        raise ValueError(f"--engine {options.engine} is not supported yet: expected torch")
    for name in ("tensor_parallel_size", "data_parallel_size"):
        if (size := getattr(options, name)) != 1:
            raise ValueError(
                f"--{name} {size}: the torch engine runs on one device, expected 1 (several "
                "servers: start several commands, and name them all in base_urls)"
            )
    if options.dtype not in (*DTYPES, "auto"):
        raise ValueError(f"--dtype {options.dtype}: expected auto, {', '.join(DTYPES)}")
    if not (Path(options.model) / "config.json").exists() and Path(options.model).exists():
        raise ValueError(f"--model {options.model} has no config.json: expected a model's folder")


def _listen(host: str, port: int) -> socket.socket:
    """The address taken, before a model is loaded for it. Raises OSError where that cannot be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise OSError(
            f"--host {host} --port {port} cannot be served on: {error.strerror}: give another"
        ) from error
    return listener


async def _serve(options: RolloutOptions, listener: socket.socket) -> int:
    """Serve on the address until a signal comes; the exit code."""
    import uvicorn

    from trireme.engines.device import Device
    from trireme.server.app import create_app

    device = Device()
    rollouts = _make_rollouts(options, device)
    app = create_app(rollouts, key=options.api_key, most=options.max_requests)
    config = uvicorn.Config(
        app, log_level="warning", timeout_graceful_shutdown=GRACE_S, timeout_keep_alive=75
    )
    server: Any = uvicorn.Server(config)
    server.capture_signals = nullcontext  # it would raise them again, and end us before `finally`
    stopped: list[int] = []

    def stop(number: int) -> None:
        server.force_exit = bool(stopped)
        server.should_exit = True
        stopped.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    led = f", led by {options.multi_turn_scheduler}" if options.multi_turn_scheduler else ""
    listener.listen(config.backlog)
    port = listener.getsockname()[1]
    print(f"serving {options.model} on http://{options.host}:{port}{led}", flush=True)
    try:
        await server.serve(sockets=[listener])
    finally:
        await rollouts.engine.close()
        device.close()
    print("stopped", file=sys.stderr)
    return 130 if signal.SIGINT in stopped else 0


def _make_rollouts(options: RolloutOptions, device: Device) -> Rollouts:
    """The model, loaded. Raises ValueError for a scheduler or a model that there is not."""
    from transformers import AutoConfig, AutoTokenizer

    from trireme.config.derive import num_gpus
    from trireme.engines.torch.engine import TorchEngine
    from trireme.model.chat_tokens import ChatTokens
    from trireme.server.rollouts import Rollouts
    from trireme.workflows.scheduled import make_scheduler

    scheduler = {"scheduler": options.multi_turn_scheduler, "max_turns": options.max_turns}
    make_scheduler(scheduler)
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        config = AutoConfig.from_pretrained(options.model)
    except (OSError, ValueError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"--model {options.model} is no folder here, and no model of this id can be loaded: "
            f"{first}"
        ) from error
    longest = options.max_model_len or config.max_position_embeddings
    on_gpu = num_gpus() > 0
    auto = "bfloat16" if on_gpu else "float32"
    engine = TorchEngine(
        options.model,
        tokenizer=tokenizer,
        device=device,
        max_model_len=longest,
        seed=options.seed,
        max_rows=512,
        dtype=auto if options.dtype == "auto" else options.dtype,
        device_name="cuda" if on_gpu else "cpu",
    )
    return Rollouts(
        engine,
        ChatTokens(tokenizer),
        options.model,
        longest,
        scheduler=scheduler,
        use_async_engine=options.use_async_engine,
        seed=options.seed,
    )
