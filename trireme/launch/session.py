"""Session: one plan's parts while it runs, each made when it is first asked for.

Which parts a mode needs is said by the code that runs it; how they fit together is said here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Any

from safetensors.torch import load_file

from trireme.algorithms.recipes import Recipe
from trireme.buffer.buffer import Buffer
from trireme.buffer.record import Record
from trireme.checkpoint.layout import JobFolder
from trireme.checkpoint.resume import Loaded, load_checkpoint
from trireme.checkpoint.save import save_checkpoint
from trireme.config import Plan
from trireme.data.mixture import Mixture
from trireme.data.tasksets import Taskset
from trireme.engines.device import Device
from trireme.engines.engine import Engine
from trireme.engines.gate import Gate
from trireme.engines.torch.engine import end_tokens
from trireme.explorer.explorer import Evaluation, Explorer
from trireme.launch import parts
from trireme.launch.auxiliary import Auxiliary, make_auxiliary
from trireme.log import get_logger, setup_logging
from trireme.monitor.console import Console
from trireme.monitor.monitor import open_monitor
from trireme.pipeline.pipeline import Pipeline
from trireme.sync.checkpoint import CheckpointPush, PolledSync
from trireme.sync.memory import MemorySync
from trireme.sync.synchronizer import ExplorerSync, Synchronizer
from trireme.trainer.backend import TorchBackend
from trireme.trainer.supply import BufferSupply
from trireme.trainer.trainer import Trainer

logger = get_logger("launcher")


@dataclass
class StageResult:
    """What a stage came to."""

    name: str | None
    mode: str
    schema: str
    first: Evaluation | None = None
    """Evaluation at the start, by taskset."""
    last: Evaluation | None = None
    """Evaluation at the end."""
    steps: int = 0
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of exploring, training and evaluating."""
    model_dir: str | None = None


class Session(AbstractContextManager["Session"]):
    """One plan with its folder, logs and monitors, open while it runs."""

    def __init__(
        self,
        plan: Plan,
        model_path: str,
        console: Console,
        device: Device,
        measure_end: bool,
    ) -> None:
        """`model_path` is the plan's, or the last stage's model."""
        self.plan = plan
        self.model_path = model_path
        self.console = console
        self.device = device
        self.measure_end = measure_end
        self.folder = JobFolder(plan.job_dir)
        self.resumed: Loaded | None = None
        self._records: list[Record] = []
        self._explorer: Explorer | None = None
        self._trainer: Trainer | None = None

    def __enter__(self) -> Session:
        """Make the folder, open its files, and look for a checkpoint to go on from."""
        plan = self.plan
        self.folder.make()
        self._close_log = setup_logging(
            self.folder.log,
            plan.config.log.level,
            runners=0 if plan.mode == "train" else plan.runners,
        )
        for note in plan.notes:
            logger.info(note)
        self.monitor = open_monitor(self.folder.monitor, plan.config.monitor.monitor_type)
        os.environ.update(plan.config.explorer.env_vars)
        if plan.mode in ("both", "train"):
            self.resumed = load_checkpoint(self.folder)
        self._examine()
        if self.resumed is not None:
            self.console.note(f"going on from {self.folder.step_dir(self.resumed.step)}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the files, whatever happened."""
        for record in self._records:
            record.close()
        self.monitor.close()
        self._close_log()

    def _examine(self) -> None:
        """Raise ValueError for parts and options that cannot be, before a model is loaded."""
        assert self.recipe.parts
        for taskset in (self.taskset, *self.eval_tasksets):
            if taskset is not None:
                parts.examine_taskset(taskset)
        if self._reads_file:  # a malformed row is named now
            parts.make_buffer(self.plan, self.folder, self.text)

    @cached_property
    def taskset(self) -> Taskset | Mixture | None:
        """The tasks to explore."""
        return parts.make_training_taskset(self.plan)

    @cached_property
    def eval_tasksets(self) -> list[Taskset]:
        """The tasks that measure."""
        return parts.make_eval_tasksets(self.plan)

    @property
    def _reads_file(self) -> bool:
        return self.plan.buffer_type == "file"

    @property
    def measures_start(self) -> bool:
        """Whether a supervised stage evaluates first: the model is as the user gave it."""
        fresh = self.plan.model_from_stage is None and self.resumed is None
        return fresh and self.plan.config.explorer.eval_on_startup

    @property
    def _shares(self) -> bool:
        """Whether the engine reads the trainer's tensors: nothing trains while it generates."""
        lock_step = self.plan.share_tensors or self.recipe.schema == "sft"
        return lock_step and self.backend.adapter is None

    async def refresh_engine(self, version: int) -> None:
        """Give the engine the trainer's weights as they are, without a push."""
        await self.engine.update_weights(None if self._shares else self.backend.weights(), version)

    @cached_property
    def recipe(self) -> Recipe:
        """The algorithm."""
        return parts.make_recipe(self.plan)

    @cached_property
    def text(self) -> parts.Text:
        """Tokenizer and chat template."""
        return parts.make_text(self.plan, self.model_path)

    @cached_property
    def backend(self) -> TorchBackend:
        """The trained model, where the checkpoint left it."""
        backend = parts.make_backend(self.plan, self.model_path, self.recipe)
        if self.resumed is not None:
            _restore(backend, self.resumed)
        return backend

    @cached_property
    def gate(self) -> Gate | None:
        """Deterministic mode's."""
        return Gate() if self.plan.deterministic else None

    @cached_property
    def engine(self) -> Engine:
        """The embedded engine, over the trainer's tensors where nothing trains meanwhile; or the
        rollout servers.
        """
        if self.plan.engine_urls:
            return parts.make_remote_engine(self.plan)
        share = self.backend.module if self._shares else None
        return parts.make_engine(
            self.plan, self.model_path, self.text, self.device, self.gate, share
        )

    @cached_property
    def auxiliary_models(self) -> list[Auxiliary]:
        """Further models that judge or teach."""
        return make_auxiliary(self.plan, self.device)

    async def close_engines(self) -> None:
        """The engine, and those of auxiliary models that were made."""
        for further in vars(self).get("auxiliary_models", ()):
            if further.engine is not None:
                await further.engine.close()
        await self.engine.close()

    @cached_property
    def buffer(self) -> Buffer:
        """The store between the two, where the checkpoint left it."""
        ends = end_tokens(self.backend.module, self.text.tokenizer) if self._reads_file else ()
        buffer, record = parts.make_buffer(self.plan, self.folder, self.text, end_ids=ends)
        if record is not None:
            self.keep(record)
        if self.resumed is not None:
            buffer.load_state(self.resumed.run_state["buffer"])
        return buffer

    @cached_property
    def synchronizer(self) -> Synchronizer:
        """Both sides in this process, or the trainer's side for explorers elsewhere."""
        plan = self.plan
        alone = plan.mode == "train"
        state = self.resumed.run_state if self.resumed else {"version": 0}
        step = self.resumed.step if self.resumed else 0
        return Synchronizer(
            self._checkpoint_push(None).push if alone else self._push(),
            style="trainer_driven" if alone else plan.sync_style,
            interval=plan.sync_interval,
            offset=plan.sync_offset,
            timeout=plan.config.synchronizer.sync_timeout,
            lock_step=plan.share_tensors,
            short=lambda: len(self.buffer) < plan.least_batch,
            version=state["version"],
            step=step,
        )

    def polled_sync(self) -> PolledSync:
        """The explorer's side, for a trainer of another process."""
        plan = self.plan
        return PolledSync(
            self.engine,
            self.folder,
            style=plan.sync_style,
            interval=plan.sync_interval,
            offset=plan.sync_offset,
            timeout=plan.config.synchronizer.sync_timeout,
            dtype=plan.dtype,
        )

    def announce(self, state: str, step: int) -> None:
        """Tell explorers of other processes how the trainer is."""
        self._checkpoint_push(None).announce(state, step)

    def explorer(self, sync: ExplorerSync, *, prefix: str = "eval") -> Explorer:
        """The explorer with its tasks; `prefix` names its evaluations' metrics."""
        plan = self.plan
        raw = parts.make_raw_record(plan, self.folder)
        if raw is not None:
            self.keep(raw)
        config = plan.config.explorer
        self._explorer = Explorer(
            taskset=self.taskset,
            eval_tasksets=self.eval_tasksets,
            scheduler=parts.make_scheduler(
                plan, self.model_path, self.engine, self.text, self.gate, self.auxiliary_models
            ),
            pipeline=Pipeline(self.recipe, raw=raw),
            buffer=self.buffer if plan.mode in ("both", "explore") else None,
            sync=sync,
            eval_interval=plan.eval_interval,
            eval_on_startup=config.eval_on_startup,
            eval_prefix=prefix,
            report=self.report,
            max_failures=config.max_failures,
            show=self.console.rollout,
            folder=self.folder if plan.mode == "explore" else None,
            max_pending=2 if plan.sync_style in ("trainer_driven", "fully_async") else 1 << 30,
        )
        if self.resumed is not None and plan.mode == "both":
            self._explorer.load_state(self.resumed.run_state["explorer"])
        return self._explorer

    def trainer(self, sync: Synchronizer | None) -> Trainer:
        """The trainer, where the checkpoint left it."""
        plan = self.plan
        self._trainer = Trainer(
            backend=self.backend,
            recipe=self.recipe,
            supply=BufferSupply(
                self.buffer, self.recipe, plan.least_batch, sync.waiting if sync else None
            ),
            device=self.device,
            sync=sync,
            # Together with an explorer the trainer ends when the experiences do.
            total_steps=(
                plan.config.trainer.total_steps if plan.mode == "both" else plan.train_steps
            ),
            save_interval=plan.config.trainer.save_interval,
            checkpointer=self,
            report=self.report,
            version=lambda: sync.version if sync else 0,
            moved=lambda: sync is not None and sync.trained_step > sync.pushed_step,
        )
        self._trainer.step = self.resumed.step if self.resumed else 0
        return self._trainer

    def report(self, part: str, step: int, metrics: Mapping[str, float]) -> None:
        """One step of one part: to the monitors and the console."""
        self.monitor.log(metrics, step, part)
        self.console.step(part, step, metrics)

    async def snapshot(self) -> dict[str, Any]:
        """Where explorer, buffer and synchronizer stand now."""
        state: dict[str, Any] = {"buffer": self.buffer.state(), "version": 0}
        if self.recipe.schema == "experience":
            state["version"] = self.synchronizer.version
        if self._explorer is not None and self.plan.mode == "both":
            state["explorer"] = self._explorer.state()
        return state

    def save(self, step: int, run_state: dict[str, Any], last: bool) -> None:
        """A whole checkpoint of `step`."""
        trainer = self.plan.config.trainer
        when = trainer.save_hf_checkpoint
        state = self.backend.state()
        save_checkpoint(
            self.folder,
            step,
            weights=self.backend.weights(),
            optimizer=state.pop("optimizer"),
            extra=state,
            run_state=run_state,
            model_dir=self.model_path,
            hf=when == "always" or (when == "last" and last),
            keep=trainer.max_checkpoints_to_keep,
        )

    def result(self, explorer: Explorer | None, trainer: Trainer | None) -> StageResult:
        """What the stage came to."""
        result = StageResult(self.plan.stage_name, self.plan.mode, self.recipe.schema)
        if explorer is not None:
            result.first = explorer.first_evaluation
            if explorer.last_evaluation is not explorer.first_evaluation:
                result.last = explorer.last_evaluation
            result.steps = explorer.step
            result.phases |= explorer.seconds
        if trainer is not None:
            result.steps = trainer.step
            result.phases["train"] = trainer.seconds
            result.model_dir = str(self.folder.hf_dir(trainer.step))
        return result

    def keep(self, record: Record) -> None:
        """Close it with the session; what a killed run wrote after its checkpoint goes."""
        self._records.append(record)
        if self.plan.mode == "both":
            record.rewind(self.resumed.run_state["explorer"]["step"] if self.resumed else 0)

    def _push(self) -> Any:
        """How weights travel inside this process."""
        plan, backend = self.plan, self.backend
        if plan.sync_method == "checkpoint":
            return self._checkpoint_push(self.engine).push
        return MemorySync(
            backend,
            self.engine,
            self.device,
            shared=plan.share_tensors,
            dtype=plan.dtype,
            vocabulary=backend.module.config.vocab_size,
        ).push

    def _checkpoint_push(self, engine: Engine | None) -> CheckpointPush:
        return CheckpointPush(
            self.backend,
            self.device,
            self.folder,
            step=lambda: self.synchronizer.trained_step,
            vocabulary=self.backend.module.config.vocab_size,
            dtype=self.plan.dtype,
            engine=engine,
        )


def _restore(backend: TorchBackend, saved: Loaded) -> None:
    """Weights, optimizer, schedule and random state as the checkpoint has them."""
    if backend.adapter is None:
        own, weights = backend.weights(), load_file(saved.weights_path)
        odd = sorted(set(weights) ^ set(own))
        if odd:
            raise ValueError(
                f"{saved.weights_path} is of another model: {len(odd)} tensors differ, "
                f"{odd[0]} first"
            )
        for name, tensor in own.items():
            tensor.copy_(weights[name])
    backend.load_state(saved.extra | {"optimizer": saved.optimizer})
