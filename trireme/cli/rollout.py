"""`trireme rollout`: an engine behind HTTP, for trainers and agents in other processes."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trireme.config.problem import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


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


def rollout(options: RolloutOptions) -> int:
    """Serve until Ctrl-C; returns the exit code."""
    from trireme.cli.run import ENVIRONMENT, complain, load_all_plugins

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        _examine(options)
        load_all_plugins([str(path) for path in options.external_plugins])
        asyncio.run(_serve(options))
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        complain(str(error))
        return 2 if isinstance(error, ConfigError | ValueError) else 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0


def _examine(options: RolloutOptions) -> None:
    """Raise ValueError for what cannot be, before anything is loaded."""
    if options.host not in LOOPBACK and not options.api_key:
        raise ValueError(
            f"--host {options.host} is open to other machines: give a key by --api-key, or serve "
            "on 127.0.0.1"
        )
    if options.engine != "torch":
        raise ValueError(f"--engine {options.engine} is not supported yet: expected torch")
    if not (Path(options.model) / "config.json").exists() and Path(options.model).exists():
        raise ValueError(f"--model {options.model} has no config.json: expected a model's folder")


async def _serve(options: RolloutOptions) -> None:
    import uvicorn
    from transformers import AutoConfig, AutoTokenizer

    from trireme.config.derive import num_gpus
    from trireme.engines.device import Device
    from trireme.engines.torch.engine import TorchEngine
    from trireme.model.chat_tokens import ChatTokens
    from trireme.server.app import create_app
    from trireme.server.rollouts import Rollouts
    from trireme.workflows.scheduled import make_scheduler

    scheduler = {"scheduler": options.multi_turn_scheduler, "max_turns": options.max_turns}
    make_scheduler(scheduler)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    longest = (
        options.max_model_len or AutoConfig.from_pretrained(options.model).max_position_embeddings
    )
    on_gpu = num_gpus() > 0
    auto = "bfloat16" if on_gpu else "float32"
    device = Device()
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
    rollouts = Rollouts(
        engine,
        ChatTokens(tokenizer),
        options.model,
        longest,
        scheduler=scheduler,
        use_async_engine=options.use_async_engine,
        seed=options.seed,
    )
    app = create_app(rollouts, key=options.api_key, most=options.max_requests)
    listening = _listen(options.host, options.port)
    url = f"http://{options.host}:{listening.getsockname()[1]}"
    led = f", led by {options.multi_turn_scheduler}" if options.multi_turn_scheduler else ""
    print(f"serving {options.model} on {url}{led}", flush=True)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    try:
        await server.serve(sockets=[listening])
    finally:
        await engine.close()
        device.close()


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises OSError naming the address that cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise OSError(f"--host {host} --port {port}: {error.strerror}") from error
    return listening
