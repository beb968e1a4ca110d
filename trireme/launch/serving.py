"""Serving: `mode: serve`, where applications of other processes are the explorer's tasks.

They chat through the OpenAI API, say by POST /feedback what it was worth and by POST /commit that
it may be trained. The trainer is another process on the same folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Coroutine, Iterator
from typing import Any

import uvicorn

from trireme.aio import LoopWatch
from trireme.engines.engine import Engine
from trireme.engines.remote import RemoteEngine
from trireme.explorer.intake import Intake
from trireme.explorer.scheduler import LEAST_BLOCKED_S
from trireme.files import alone, write_text
from trireme.launch.rollout import sampling_of
from trireme.launch.sides import embedded_engine
from trireme.launch.stage import Stage, StageResult
from trireme.launch.stop import Stop
from trireme.launch.training import make_polled_sync
from trireme.server.app import create_app
from trireme.server.rollouts import Rollouts
from trireme.server.sessions import Sessions
from trireme.sync.checkpoint import PolledSync

URL_FILE = "explorer_server_url.txt"
GRACE = 0.8
"""The share of `cluster.stop_timeout` that requests under way get to end."""

KEEP_ALIVE = 120
"""Seconds of a quiet connection: longer than clients keep it, so that none sends into one that is
being closed."""


class Server(uvicorn.Server):
    """Uvicorn, with signals left to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None of them."""
        yield

    def stop(self) -> bool:
        """Let requests under way end."""
        self.should_exit = True
        return True


async def run_serve(stage: Stage, remote: RemoteEngine | None, stop: Stop) -> StageResult:
    """Serve until a signal or the trainer's end. Raises the first cause of a failure."""
    with _alone(stage):
        return await _run(stage, remote or embedded_engine(stage), stop)


async def _run(stage: Stage, engine: Engine, stop: Stop) -> StageResult:
    plan, sync = stage.plan, make_polled_sync(stage.plan, engine, stage.folder)
    sync.forget()
    watch = LoopWatch(max(plan.config.explorer.max_timeout, LEAST_BLOCKED_S))
    try:
        await sync.load_latest()
        rollouts = _rollouts(stage, engine)
        sessions = Sessions(rollouts.session_model, keep=plan.config.explorer.max_timeout)
        intake = _intake(stage, sync, sessions)
        sessions.ship = intake.ship
        key = plan.config.explorer.rollout_model.api_key
        app = create_app(rollouts, key=key, sessions=sessions)
        config = uvicorn.Config(
            app,
            log_level="warning",
            timeout_graceful_shutdown=max(1, int(plan.config.cluster.stop_timeout * GRACE)),
            timeout_keep_alive=KEEP_ALIVE,
        )
        server = Server(config)
        stop.gently = server.stop
        with _listening(stage) as own_socket:
            await _serve(server, own_socket, _watch(stage, engine, sync, sessions))
        stage.console.note(
            f"the server has ended: {intake.step} commits, {sessions.dropped} sessions dropped, "
            f"{len(sessions)} open ones forgotten"
        )
        if intake.unstored:
            raise RuntimeError(f"{intake.unstored} experiences of unanswered commits are lost")
    except Exception as error:
        await stage.buffer.fail(error)
        raise
    finally:
        watch.stop()
        await engine.close()
    await stage.buffer.close()
    result = stage.result()
    result.steps = intake.step
    return result


def _rollouts(stage: Stage, engine: Engine) -> Rollouts:
    """What is done with requests, by the model section's defaults and limits."""
    plan, model = stage.plan, stage.plan.config.model
    limits = {"enable_prompt_truncation": model.enable_prompt_truncation}
    return Rollouts(
        engine,
        stage.text.chat,
        stage.model_path,
        plan.max_model_len,
        sampling=sampling_of(plan, {}),
        limits={"max_prompt_tokens": plan.max_prompt_tokens, **limits},
    )


def _intake(stage: Stage, sync: PolledSync, sessions: Sessions) -> Intake:
    return Intake(
        pipeline=stage.pipeline(),
        buffer=stage.buffer,
        sync=sync,
        folder=stage.folder,
        report=stage.console.step,
        dropped=lambda: sessions.dropped,
    )


async def _serve(
    server: Server, own_socket: socket.socket, watch: Coroutine[Any, Any, None]
) -> None:
    """Until the server has ended; what the watch raises ends it."""

    async def watched() -> None:
        try:
            await watch
        finally:
            server.should_exit = True

    watching = asyncio.ensure_future(watched())
    try:
        await server.serve(sockets=[own_socket])
        if watching.done():
            watching.result()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _watch(stage: Stage, engine: Engine, sync: PolledSync, sessions: Sessions) -> None:
    """New weights, also while requests are under way, until the trainer stops."""
    while not sync.finished:
        engine.health()
        await sync.load_latest()
        sessions.drop_quiet()
        await asyncio.sleep(stage.plan.config.explorer.service_status_check_interval)


def _alone(stage: Stage) -> contextlib.AbstractContextManager[None]:
    """Two servers on one folder would give the same numbers to their commits."""
    root = stage.folder.root
    return alone(root / ".serve.lock", f"{root} is served by another process already")


@contextlib.contextmanager
def _listening(stage: Stage) -> Iterator[socket.socket]:
    """A socket that clients may connect to already, its address in the job's folder."""
    host, port = stage.plan.listen_address, stage.plan.config.explorer.proxy_port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        own = socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(
            f"cannot listen on {host}, port {port} ({error.strerror}): set explorer.proxy_port "
            "(0: any that is free) or listen_address"
        ) from error
    reached = socket.gethostname() if host in ("0.0.0.0", "::") else host
    url = f"http://{f'[{reached}]' if ':' in reached else reached}:{own.getsockname()[1]}"
    path = stage.folder.root / URL_FILE
    with own:
        write_text(path, url)
        stage.console.note(f"serving {stage.model_path} on {url} ({path})")
        try:
            yield own
        finally:
            path.unlink(missing_ok=True)
