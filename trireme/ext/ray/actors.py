"""Actors: defines the workers of a run on Ray, each a plain async class.

- Trainer: rank 0, with the buffer and the synchronizer. It sends the weights to the engines.
- Explorer: uses the same side as in one process. It reaches the trainer's buffer and synchronizer
  through a link, and the engines by their addresses in the plan.
- Follower: a trainer rank after the first, which carries out rank 0's commands until rank 0 ends
  it.

A put and the explorer's next position are published together: a checkpoint contains a step's
experiences or marks the step to be repeated, never both.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import ray

from trireme.config import Plan
from trireme.engines.device import ColocationLock, Device
from trireme.experience import Experience
from trireme.explorer.metrics import Evaluated, try_tasksets
from trireme.ext.ray.remote import Outbox, Worker, remote
from trireme.ext.remote.engine import RemoteEngine
from trireme.ext.remote.engine_host import RemoteServers
from trireme.ext.remote.servers import Servers
from trireme.launch.explorer_side import ExplorerSide, lone_explorer
from trireme.launch.models import follow_plan, load_models, make_rank_spec
from trireme.launch.resume import refuse_other_run
from trireme.launch.run import rare_collections
from trireme.launch.stage import Stage, open_stage
from trireme.launch.trainer_side import TrainerSide
from trireme.log import ROOT, ConsoleLines, setup_logging
from trireme.serialize import decode, encode
from trireme.sync.synchronizer import is_due
from trireme.trainer.ranks import free_address
from trireme.workflows.plugins import load_plugins

State = dict[str, Any]
Side = TypeVar("Side", TrainerSide, ExplorerSide)


@dataclass(frozen=True)
class RunSpec:
    """The state of the run when the workers are opened."""

    plan: Plan
    """With the addresses of its engines."""
    model_path: str
    plugins: tuple[str, ...]
    """Users' files, loaded in every process."""
    trainer: Any = None
    """The trainer's actor; None if the trainer belongs to another command."""
    rank0: str | None = None
    """HOST:PORT where the trainer's ranks meet; None for a single rank."""
    restarted: bool = False
    """Whether engines that die are started again."""
    old_report: int | None = None
    """The command's `Stage.old_report`: when the workers open, engines have been loaded."""


class Status(NamedTuple):
    """The synchronizer's state, as its answers report it to an explorer."""

    finished: bool
    metrics: dict[str, float]


class SideWorker(Worker, Generic[Side]):
    """One side of the run. Its own methods and those of its engine's `Servers` can be called too:
    `remote(TrainerSide, handle)`, `remote(Servers, handle)`.
    """

    def __init__(self) -> None:
        self.side: Side | None = None
        self._outbox = Outbox()
        self._device = Device()
        self._held = ExitStack()
        self._engine: RemoteEngine | None = None
        self._calls: set[asyncio.Task[Any]] = set()

    async def _open(self, spec: RunSpec) -> Stage:
        self._held.enter_context(rare_collections())
        load_plugins(spec.plugins)
        plan = spec.plan
        opening = open_stage(plan, spec.model_path, self._device, self._outbox)
        stage = await asyncio.to_thread(self._held.enter_context, opening)
        self._forward_warnings(stage)
        stage.old_report = spec.old_report
        if plan.engine.urls:
            self._engine = RemoteServers().engine(plan, plan.engine.urls, plan.engine.key)
            self._engine.servers.restarted = spec.restarted
        return stage

    def _forward_warnings(self, stage: Stage) -> None:
        """Send warnings to the run's console; errors reach it as the cause of its end."""
        lines = ConsoleLines(stage.folder.log, self._outbox.warn)
        lines.addFilter(lambda record: record.levelno == logging.WARNING)
        root = logging.getLogger(ROOT)
        root.addHandler(lines)
        self._held.callback(root.removeHandler, lines)

    def method(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        """Return the worker's own method, or else the servers', or else the side's. `stop` cancels
        calls of all others.
        """
        if name == "stop":
            return self.stop
        if hasattr(type(self), name):
            return partial(self._run, getattr(self, name))
        if hasattr(Servers, name):
            assert self._engine is not None, "the side has no engine"
            return partial(self._run, getattr(self._engine.servers, name))
        return partial(self._run, getattr(self.opened, name))

    async def _run(self, method: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Any:
        call = asyncio.current_task()
        assert call is not None, "a method runs as a task"
        self._calls.add(call)
        try:
            return await method(*args)
        finally:
            self._calls.discard(call)

    async def events(self, heard: int, wait: float) -> list[bytes]:
        """Return the encoded events after the first `heard`; wait up to `wait` seconds for one."""
        return await self._outbox.events(heard, wait)

    @property
    def opened(self) -> Side:
        """Return the side, once it is open."""
        assert self.side is not None, "the side is not open yet"
        return self.side

    async def stop(self) -> None:
        """Cancel all calls, as in one process: a training finishes the checkpoint that is being
        written, and a push gives up the device. Then leave the engines and close the files.
        """
        for call in (calls := set(self._calls)):
            call.cancel()
        if calls:
            await asyncio.wait(calls)
        if self._engine is not None:
            await self._engine.close()
        self._held.close()
        self._device.close()


class TrainerWorker(SideWorker[TrainerSide]):
    """The trainer's side, with the explorer's way into it."""

    def __init__(self) -> None:
        super().__init__()
        self._explorer_state: State | None = None

    async def meeting_place(self) -> str:
        """Return HOST:PORT on this machine that the other ranks can reach."""
        return free_address(ray.util.get_node_ip_address())

    async def open(self, spec: RunSpec) -> None:
        """Load the model, in the state of the checkpoint."""
        stage, plan = await self._open(spec), spec.plan
        if stage.resumed is not None:  # the command's machine may lack the model's files
            refuse_other_run(stage, stage.resumed)
        if plan.sync.takes_turns and self._engine is not None:
            lock = ColocationLock(self._engine, timeout=plan.config.synchronizer.sync_timeout)
            self._device.colocation = self._engine.colocation = lock
            self._engine.servers.colocation = lock
        ranks, rank0 = plan.places.trainer_ranks, None
        if spec.rank0:
            rank0 = make_rank_spec(plan, 0, ranks, spec.rank0)
        models = await self._device.run(load_models, stage, rank0)
        side = TrainerSide(stage, models, self._engine, host=ray.util.get_node_ip_address())
        if plan.mode == "both":
            side.explorer_state = self._where_the_explorer_is
        self.side = side

    async def for_engine(self) -> None:
        """Wait until the engines that share this trainer's devices work; an explorer calls it
        before it uses them.
        """
        assert self._device.colocation is not None, "the engines have devices of their own"
        await self._device.colocation.for_engine()

    async def stop_training(self) -> bool:
        """Ask the trainer to stop."""
        return self.opened.trainer.stop()

    async def begin(self, state: State) -> None:
        """Set the explorer's position to `state`."""
        self._explorer_state = state

    async def put(self, data: bytes, state: State) -> Status:
        """Put the experiences of one explore step, and the explorer's position after it."""
        await self.opened.buffer.put(decode(data))
        self._explorer_state = state
        return self._status()

    async def pull(self, step: int) -> Status:
        """Wait for the weights of explore step `step + 1`, and return the synchronizer's state."""
        await self.opened.sync.pull(step)
        return self._status()

    async def end_of_puts(self, failure: str | None) -> None:
        """Call the buffer's `close`, or its `fail` if the explorer has failed."""
        buffer = self.opened.buffer
        await (buffer.close() if failure is None else buffer.fail(RuntimeError(failure)))

    def _where_the_explorer_is(self) -> State:
        assert self._explorer_state is not None, "the explorer has not begun"
        return self._explorer_state

    def _status(self) -> Status:
        sync = self.opened.sync
        return Status(sync.finished, sync.metrics())


class Link:
    """The trainer's buffer and synchronizer, as the explorer knows them: Puts and ExplorerSync."""

    def __init__(self, trainer: TrainerWorker, stage: Stage) -> None:
        """A resumed run continues from the version of its checkpoint."""
        self._trainer = trainer
        self._plan = stage.plan
        version = stage.resumed.run_state["version"] if stage.resumed else 0.0
        self._metrics = {"sync/version": version, "sync/skipped": 0.0, "time/sync_wait": 0.0}
        self.finished = False
        self.state: Callable[[], State] = dict
        """The explorer's position after the current put."""

    async def put(self, experiences: Sequence[Experience]) -> None:
        """Send the experiences of one explore step to the trainer's buffer."""
        self._hear(await self._trainer.put(encode(experiences), self.state()))

    async def fail(self, error: BaseException) -> None:
        """Report to the trainer that the explorer has failed."""
        await self._trainer.end_of_puts(f"{type(error).__name__}: {error}")

    async def close(self) -> None:
        """Report to the trainer that no more experiences follow."""
        await self._trainer.end_of_puts(None)

    @property
    def pushes_by_itself(self) -> bool:
        """Return whether the trainer pushes without waiting for the explorer."""
        return self._plan.sync.style not in ("fixed", "explorer_driven")

    def due(self, step: int) -> bool:
        """Return whether the explorer synchronizes with the trainer after explore step `step`."""
        sync = self._plan.sync
        return not self.pushes_by_itself and is_due(step, sync.interval, sync.offset)

    async def pull(self, step: int) -> None:
        """Wait until the engines have the weights of explore step `step + 1`."""
        self._hear(await self._trainer.pull(step))

    def metrics(self) -> dict[str, float]:
        """Return the synchronizer's metrics of the last answer."""
        return dict(self._metrics)

    def _hear(self, status: Status) -> None:
        self.finished = status.finished
        self._metrics |= status.metrics


class EnginesTurn:
    """The trainer's ColocationLock for an explorer in another process; simultaneous calls are sent
    once.
    """

    def __init__(self, trainer: TrainerWorker) -> None:
        self._trainer = trainer
        self._asked: asyncio.Future[None] | None = None

    async def for_engine(self) -> None:
        """Wait until the engines work; calls at the same time share one request to the trainer."""
        if self._asked is None:
            asked = self._asked = asyncio.ensure_future(self._trainer.for_engine())
            asked.add_done_callback(lambda _: setattr(self, "_asked", None))
        await asyncio.shield(self._asked)


class ExplorerWorker(SideWorker[ExplorerSide]):
    """The explorer's side."""

    async def open(self, spec: RunSpec) -> None:
        """Load tokenizer and tasks, and the newest weights if another command trains."""
        stage, plan = await self._open(spec), spec.plan
        self._held.enter_context(stage.exploring())
        engine = self._engine
        assert engine is not None
        if plan.sync.takes_turns:
            engine.colocation = EnginesTurn(remote(TrainerWorker, spec.trainer))
        if plan.mode == "both":
            trainer = remote(TrainerWorker, spec.trainer)
            link = Link(trainer, stage)
            side = self.side = ExplorerSide(stage, engine, link, link)
            link.state = lambda: side.explorer.state(putting=True)
            await trainer.begin(side.explorer.state())
            return
        self.side = await lone_explorer(stage, engine)

    async def try_all(self, rollouts: int | None) -> list[Evaluated]:
        """Evaluate the current model on the tasksets of `trireme eval`."""
        stage, scheduler = self.opened.stage, self.opened.explorer.scheduler
        scheduler.start()
        limit = stage.plan.config.explorer.max_failures
        return await try_tasksets(scheduler, stage.eval_tasksets, rollouts, limit)

    async def stop(self) -> None:
        """End the runners, leave the engines, close the files."""
        if self.side is not None:
            await self.side.close()
        await super().stop()


class FollowerWorker(Worker):
    """One rank in a separate process. Rank 0 ends it."""

    async def follow(self, spec: RunSpec, rank: int) -> None:
        """Run as rank `rank`, from loading to the end. Raises errors of this rank."""
        load_plugins(spec.plugins)
        assert spec.rank0 is not None
        plan = spec.plan
        close_log = setup_logging(plan.job_dir / "log", plan.config.log.level)
        rank_spec = make_rank_spec(plan, rank, plan.places.trainer_ranks, spec.rank0)
        try:
            with rare_collections():
                await asyncio.to_thread(follow_plan, plan, spec.model_path, rank_spec)
        except Exception:
            logging.getLogger("trireme.trainer").exception("rank %d has failed", rank)
            raise
        finally:
            close_log()
