"""`trireme rollout`: an engine behind HTTP, for trainers and agents in other processes.

An engine with a separate environment runs in a child process of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trireme.config import ConfigError
from trireme.config.engine_kind import EMBEDDED, EngineKind, kind_named, kind_names
from trireme.config.lookup import no_model, steady_positions
from trireme.engines.make import EngineSpec
from trireme.ext.remote.engine_host import EngineHost
from trireme.ext.rollout_server.options import RolloutOptions
from trireme.launch.stop import run_to_its_end
from trireme.text import say

LOOPBACK = ("127.0.0.1", "localhost", "::1")
PARALLEL = ("tensor_parallel_size", "data_parallel_size")
DTYPES = ("float32", "bfloat16", "float16")


def rollout(options: RolloutOptions) -> int:
    """Serve until Ctrl-C (exit code 130) or SIGTERM (0); returns the exit code."""
    from trireme.cli.run import complain, set_environment
    from trireme.config.lookup import plugin_files
    from trireme.workflows.plugins import load_plugins

    set_environment()
    try:
        options = _with_key(options)
        say(f"loading {options.model}", file=sys.stderr, flush=True)
        _examine(options)
        files = [*(options.external_plugins or ()), *(options.plugins or ())]
        plugins = [str(path) for path in files]
        load_plugins(plugins)
        kind = _examine_engine(options)
        with _listen(options.host, options.port) as listener:
            if not kind.own_python:
                return run_to_its_end(_serve(options, listener))
        spec, _ = _spec(options)
        return run_to_its_end(serve_child(options, kind, spec, plugin_files(plugins)))
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        complain(str(error))
        return 2 if isinstance(error, ConfigError | ValueError) else 1
    except KeyboardInterrupt:
        say("stopped", file=sys.stderr)
        return 130


def _with_key(options: RolloutOptions) -> RolloutOptions:
    if options.api_key is not None and options.api_key_file is not None:
        raise ValueError("--api-key and --api-key-file are both given: expected one of them")
    if options.api_key is not None:
        say(
            "warning: --api-key is visible to all users of this machine in the process list: use "
            "TRIREME_API_KEY or --api-key-file instead",
            file=sys.stderr,
        )
        return _noted(options)
    key = os.environ.get("TRIREME_API_KEY") or None
    if (file := options.api_key_file) is not None:
        try:
            key = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--api-key-file {file} cannot be read: {error}") from error
        if not key:
            raise ValueError(f"--api-key-file {file} is empty: expected a key")
    return _noted(dataclasses.replace(options, api_key=key))


def _noted(options: RolloutOptions) -> RolloutOptions:
    from trireme.ext.http.limits import short_key

    if (said := short_key(options.api_key)) is not None:
        say(f"warning: {said}", file=sys.stderr)
    return options


def _examine(options: RolloutOptions) -> None:
    """Validate the options before anything is loaded. Raises ValueError."""
    if options.host not in LOOPBACK and not options.api_key:
        raise ValueError(
            f"--host {options.host} is open to other machines: give a key in TRIREME_API_KEY or "
            "with --api-key-file, or serve on 127.0.0.1"
        )
    if options.dtype not in (*DTYPES, "auto"):
        raise ValueError(f"--dtype {options.dtype}: expected auto, {', '.join(DTYPES)}")
    model = Path(options.model)
    if not (model / "config.json").exists() and model.exists():
        raise ValueError(f"--model {options.model} {no_model(model)}")


def _examine_engine(options: RolloutOptions) -> EngineKind:
    """Return the kind of the engine, which may be a plug-in's. Raises ValueError for missing
    requirements.
    """
    if options.engine not in (known := kind_names()):
        expected = " or ".join(known)
        raise ValueError(f"--engine {options.engine} is not known: expected {expected}")
    kind = kind_named(options.engine)
    for name in PARALLEL:
        if (size := getattr(options, name)) != 1 and name not in kind.keys:
            others = "".join(f"; or --engine {n}" for n in known if name in kind_named(n).keys)
            raise ValueError(
                f"--{name} {size}: the {kind.name} engine runs on one device, expected 1 (several "
                f"servers: start several commands, and name them all in base_urls{others})"
            )
    if options.engine_options and not kind.keys:
        names = ", ".join(f"--vllm_{name}" for name in options.engine_options)
        say(f"note: no effect on the {kind.name} engine: {names}", file=sys.stderr)
    return kind


def _listen(host: str, port: int) -> socket.socket:
    """Bind the address. Raises OSError if that is impossible."""
    from trireme.ext.http.app import listen

    try:
        return listen(host, port)
    except OSError as error:
        raise OSError(
            f"--host {host} --port {port} cannot be used: {error.strerror}: expected another one"
        ) from error


async def _serve(options: RolloutOptions, listener: socket.socket) -> int:
    """Serve on the address until a signal arrives; returns the exit code."""
    from trireme.ext.http.process import engine_server

    spec, tokenizer = _spec(options)
    async with engine_server(
        spec, tokenizer, listener, key=options.api_key, most=options.max_requests
    ) as server:
        server.stop_on_signals()
        _announce(options, f"http://{options.host}:{listener.getsockname()[1]}")
        await server.serve()
    return stopped(server.stopped_by)


def _announce(options: RolloutOptions, url: str) -> None:
    """Print what is served, and where."""
    led = f", led by {options.multi_turn_scheduler}" if options.multi_turn_scheduler else ""
    say(f"serving {options.model} on {url}{led}", flush=True)


def stopped(by: Sequence[int]) -> int:
    """Return the exit code after these signals."""
    say("stopped", file=sys.stderr)
    return 130 if signal.SIGINT in by else 0


def _spec(options: RolloutOptions) -> tuple[EngineSpec, Any]:
    """Return the engine and its tokenizer. Raises ValueError for an unknown scheduler or model."""
    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from trireme.config.gpus import num_gpus
    from trireme.ext.multi_turn.scheduled import make_scheduler
    from trireme.model.tool_calls import format_of

    disable_progress_bar()
    scheduler: dict[str, Any] = {
        "scheduler": options.multi_turn_scheduler,
        "max_turns": options.max_turns,
    }
    if options.gym_env is not None:
        if not options.multi_turn_scheduler:
            raise ValueError(
                f"--gym_env {options.gym_env} has no effect by itself: expected "
                "--multi_turn_scheduler gym_scheduler with it"
            )
        _refuse_env(options.gym_env, options.multi_turn_scheduler)
        scheduler["env"] = options.gym_env
    try:
        make_scheduler(scheduler)
    except ValueError as error:
        text = str(error).replace("workflow_args.scheduler", "--multi_turn_scheduler")
        raise ValueError(text.replace("workflow_args.env", "--gym_env")) from error
    format_of(options.tool_call_parser)
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        config = AutoConfig.from_pretrained(options.model)
    except (OSError, ValueError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"--model {options.model} is not a folder here, and no model of this id can be "
            f"loaded: {first}"
        ) from error
    text = config.get_text_config()  # a model that sees has its length there
    longest = options.max_model_len or getattr(text, "max_position_embeddings", None)
    if not longest:
        raise ValueError(
            f"--max-model-len is not given, and the configuration of {options.model} names no "
            "max_position_embeddings: expected the longest prompt and reply together, in tokens"
        )
    steady = steady_positions(lambda key: getattr(text, key, None))
    if steady and longest > steady and options.engine == EMBEDDED:
        say(
            f"note: up to {steady} tokens each reply is by its own tokens alone: a longer sequence "
            "changes the model's rotary embeddings (rope_type longrope or dynamic) for all that "
            f"are computed with it; --max-model-len {steady} admits none",
            file=sys.stderr,
        )
    on_gpu = num_gpus() > 0
    auto = "bfloat16" if on_gpu else "float32"
    spec = EngineSpec(
        options.model,
        longest,
        dtype=auto if options.dtype == "auto" else options.dtype,
        device="cuda" if on_gpu else "cpu",
        seed=options.seed,
        scheduler=scheduler,
        use_async_engine=options.is_async,
        enable_thinking=options.thinks,
        kind=options.engine,
        options={name: getattr(options, name) for name in PARALLEL} | dict(options.engine_options),
        tool_call_parser=options.tool_call_parser,
    )
    return spec, tokenizer


def _refuse_env(env: str, name: str) -> None:
    """Raise ValueError for an environment of a scheduler that plays none."""
    from trireme.registry import MULTI_TURNS

    try:
        scheduler: Any = MULTI_TURNS.get(name)
    except ValueError:
        return  # making it reports the error
    if not isinstance(scheduler, type) or getattr(scheduler, "stands_for", ""):
        return
    for one in scheduler.__mro__:
        if (init := vars(one).get("__init__")) is None:
            continue
        parameters = inspect.signature(init).parameters
        if "env" in parameters:
            return
        if all(item.kind is not item.VAR_KEYWORD for item in parameters.values()):
            break  # keys that it does not name are not passed to a base class
    raise ValueError(
        f"--gym_env {env} has no effect on --multi_turn_scheduler {name}, whose constructor has no "
        "argument env: expected gym_scheduler, or the flag to be left out"
    )


async def serve_child(
    options: RolloutOptions, kind: EngineKind, spec: EngineSpec, plugins: Sequence[Path]
) -> int:
    """Serve until a signal arrives; returns the exit code. Raises RuntimeError if the child has
    ended.
    """
    try:
        found = kind.interpreter(options.engine_python)
    except ValueError as error:
        given = options.engine_python
        flag = f"--engine {options.engine}" if given is None else f"--engine-python {given}"
        raise ValueError(f"{flag}: {error}") from error
    handle, log = tempfile.mkstemp(prefix="trireme-rollout-", suffix=".log")
    os.close(handle)
    say(f"{found.about}; its log is {log}", file=sys.stderr)
    host = EngineHost(
        spec,
        name=f"the {options.engine} engine",
        log_file=Path(log),
        python=found.python,
        host=options.host,
        port=options.port,
        key=options.api_key,
        plugins=[str(file.resolve()) for file in plugins],
        most=options.max_requests,
    )
    stopped_by: list[int] = []
    serving = asyncio.ensure_future(_hosted(options, host))

    def stop(number: int) -> None:
        stopped_by.append(number)
        serving.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    try:
        await serving
    except asyncio.CancelledError:
        if not stopped_by:
            raise
    finally:
        await host.stop()
    return stopped(stopped_by)


async def _hosted(options: RolloutOptions, host: EngineHost) -> None:
    """Run the process until this is cancelled. Raises RuntimeError if it ends by itself."""
    host.start()
    _announce(options, await host.ready())
    await host.watch()
