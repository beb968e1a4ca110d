"""Serving: runs `mode: serve`, in which conversations of other applications replace the explorer's
tasks.

They chat through the OpenAI API, report rewards by POST /feedback, and release conversations for
training by POST /commit. The trainer is another process on the same folder.

- A commit is an explore step with its own number, also after a restart. `ship` returns when the
  buffer has its experiences.
- Experiences that the pipeline failed on, or that could not be put, stay in the Intake under the
  same ids, and are the first at the next commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from trireme.buffer.buffer import Buffer, Closed
from trireme.checkpoint.layout import JobFolder
from trireme.engines.engine import Engine
from trireme.experience import Experience, group_by
from trireme.explorer.explorer import explorer_state
from trireme.explorer.metrics import run_metrics
from trireme.explorer.scheduler import LEAST_BLOCKED_S
from trireme.ext.http.app import AppServer, create_app, listen
from trireme.ext.http.limits import short_key
from trireme.ext.http.rollouts import Rollouts
from trireme.ext.http.sessions import Sessions
from trireme.files import alone, write_json, write_text
from trireme.launch.explorer_side import load_newest, polled_sync, sampling_of
from trireme.launch.results import StageResult
from trireme.launch.stage import Stage
from trireme.launch.stop import Stop
from trireme.monitor.events import Emit, Noted, StepDone
from trireme.pipeline.pipeline import Pipeline
from trireme.sync.checkpoint import PolledSync
from trireme.sync.synchronizer import ExplorerSync

URL_FILE = "explorer_server_url.txt"
GRACE = 0.8
"""The share of `cluster.stop_timeout` that pending requests get to end."""


async def run_serve(stage: Stage, remote: Engine | None, stop: Stop) -> StageResult:
    """Serve until a signal or the trainer's end. Raises the first cause of a failure."""
    with _alone(stage):
        return await _run(stage, remote or await stage.embedded_engine(), stop)


async def _run(stage: Stage, engine: Engine, stop: Stop) -> StageResult:
    plan, sync = stage.plan, polled_sync(stage, engine)
    try:
        await load_newest(stage, engine, sync)
        rollouts = _rollouts(stage, engine)
        sessions = Sessions(rollouts.session_model, keep=plan.config.explorer.max_timeout)
        intake = Intake(
            pipeline=stage.pipeline(),
            buffer=stage.buffer,
            sync=sync,
            folder=stage.folder,
            emit=stage.emit,
            dropped=lambda: sessions.dropped,
        )
        sessions.ship = intake.ship
        key = plan.config.explorer.rollout_model.api_key
        if (said := short_key(key)) is not None:
            stage.emit(Noted(f"explorer.rollout_model.api_key: {said}"))
        app = create_app(rollouts, key=key, sessions=sessions)
        with _listening(stage, sync.version) as listener:
            grace = plan.config.cluster.stop_timeout * GRACE
            server = AppServer(app, listener, grace=grace)
            stop.end_work = server.stop
            limit = max(plan.config.explorer.max_timeout, LEAST_BLOCKED_S)
            await server.serve(_watch(stage, engine, sync, sessions), limit=limit)
        ended = f"the server has ended: {intake.step} commits, {sessions.dropped} sessions dropped"
        stage.emit(Noted(f"{ended}, {len(sessions)} open ones forgotten"))
        if intake.unstored:
            raise RuntimeError(f"{intake.unstored} experiences of unanswered commits are lost")
    except Exception as error:
        await stage.buffer.fail(error)
        raise
    finally:
        await engine.close()
    await stage.buffer.close()
    result = stage.result()
    result.steps = intake.step
    return result


def _rollouts(stage: Stage, engine: Engine) -> Rollouts:
    plan, model = stage.plan, stage.plan.config.model
    limits = {"enable_prompt_truncation": model.enable_prompt_truncation}
    return Rollouts(
        engine,
        stage.text.chat,
        stage.model_path,
        plan.lengths.max_model_len,
        sampling=sampling_of(plan, {}),
        limits={"max_prompt_tokens": plan.lengths.max_prompt_tokens, **limits},
    )


async def _watch(stage: Stage, engine: Engine, sync: PolledSync, sessions: Sessions) -> None:
    """Load new weights, also during requests, until the trainer stops."""
    while not sync.finished:
        engine.health()
        await sync.load_latest()
        sessions.drop_quiet()
        await asyncio.sleep(stage.plan.config.explorer.service_status_check_interval)


def _alone(stage: Stage) -> contextlib.AbstractContextManager[None]:
    """Lock out a second server on one folder, which would give the same numbers to its commits."""
    root = stage.folder.root
    return alone(root / ".serve.lock", f"{root} is served by another process already")


@contextlib.contextmanager
def _listening(stage: Stage, version: int = 0) -> Iterator[socket.socket]:
    """Open the socket to serve on, and write its address into the job's folder. `version`: of the
    weights that are served at first.
    """
    host, port = stage.plan.listen_address, stage.plan.config.explorer.proxy_port
    try:
        listener = listen(host, port)
    except OSError as error:
        raise OSError(
            f"cannot listen on {host}, port {port} ({error.strerror}): set explorer.proxy_port "
            "(0: any that is free) or listen_address"
        ) from error
    reached = socket.gethostname() if host in ("0.0.0.0", "::") else host
    url = f"http://{f'[{reached}]' if ':' in reached else reached}:{listener.getsockname()[1]}"
    path = stage.folder.root / URL_FILE
    with listener:
        listener.listen()  # clients may connect as soon as they know the address
        write_text(path, url)
        trained = f", trained to version {version}," if version else ""
        stage.emit(Noted(f"serving {stage.model_path}{trained} on {url} ({path})"))
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


@dataclass
class _Commit:
    """A commit that has not been answered."""

    step: int
    experiences: list[Experience]
    """As they were sent."""
    sealed: tuple[list[Experience], dict[str, float]] | None = None
    """The pipeline's experiences and metrics; None: it has not run yet, or has failed."""


class Intake:
    """Commit ▸ Pipeline.run ▸ Buffer.put."""

    def __init__(
        self,
        *,
        pipeline: Pipeline,
        buffer: Buffer,
        sync: ExplorerSync,
        folder: JobFolder,
        emit: Emit,
        dropped: Callable[[], int] = lambda: 0,
    ) -> None:
        """`emit` receives each commit; `dropped()`: sessions lost so far."""
        self.pipeline = pipeline
        self.buffer = buffer
        self.sync = sync
        self.folder = folder
        self.emit = emit
        self.dropped = dropped
        self.step = 0
        if os.path.lexists(folder.explorer_meta):
            self.step = explorer_state(folder.explorer_meta)["step"]
        self._commits: deque[_Commit] = deque()
        self._one = asyncio.Lock()

    async def ship(self, experiences: Sequence[Experience]) -> None:
        """Put whole groups into the buffer. Without any, wait until the buffer has the earlier
        ones.

        Raises RuntimeError where the trainer has ended, and what the pipeline and `Buffer.put`
        raise.
        """
        if experiences:
            self.step += 1
            step = self.step
            # before the put: a number that is used twice would hide the second commit's groups
            write_json(self.folder.explorer_meta, {"latest_iteration": step, "taskset_states": []})
            for experience in experiences:
                experience.eid.batch = step
            self._commits.append(_Commit(step, list(experiences)))
        # if a caller disconnects we must still know whether the buffer has them
        storing = asyncio.ensure_future(self._store())
        # nobody else may ask for its error, which `unstored` reports
        storing.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(storing)

    @property
    def unstored(self) -> int:
        """The number of experiences in commits that have not been answered."""
        return sum(len(c.sealed[0] if c.sealed else c.experiences) for c in self._commits)

    async def _store(self) -> None:
        async with self._one:
            while self._commits:
                commit = self._commits[0]
                if commit.sealed is None:
                    commit.sealed = await self._sealed(commit.experiences)
                step, (kept, metrics) = commit.step, commit.sealed
                try:
                    if kept:
                        await self.buffer.put(kept)
                except Closed as error:
                    raise RuntimeError(
                        f"the trainer has ended: the {len(kept)} experiences of commit {step} are "
                        "not stored"
                    ) from error
                self._commits.popleft()
                metrics |= self.sync.metrics() | {"rollout/dropped_sessions": self.dropped()}
                self.emit(StepDone("explorer", step, metrics))

    async def _sealed(self, sent: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        # an operator that fails may have changed some of them, and they are sent through again
        experiences = [copy.copy(e) for e in sent]
        for e in experiences:
            e.info, e.metrics = copy.deepcopy(e.info), dict(e.metrics)
        kept, metrics = await self.pipeline.run(experiences)
        return kept, metrics | run_metrics(experiences) | {
            "rollout/tasks": len(group_by(experiences, "task")),
            "rollout/experiences": len(experiences),
        }
