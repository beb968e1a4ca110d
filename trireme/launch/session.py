"""Session: holds one plan's parts while it runs, and makes each when it is first needed.

Which parts a mode needs is said by the code that runs it; how they fit together is said here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property, partial
from types import TracebackType
from typing import Any

from trireme.algorithms.recipes import Recipe, get_recipe
from trireme.buffer.buffer import Buffer
from trireme.buffer.record import Record
from trireme.checkpoint.layout import EVALUATED, FAILED, JobFolder
from trireme.checkpoint.resume import Loaded, load_checkpoint
from trireme.checkpoint.save import save_checkpoint
from trireme.config import Plan
from trireme.data.tasksets import Mixture, Taskset
from trireme.engines.device import Device, Gate
from trireme.engines.engine import Engine
from trireme.engines.torch.shell import end_tokens_of
from trireme.experience import Experience
from trireme.explorer.explorer import Explorer
from trireme.launch import data, rollout, training
from trireme.launch.auxiliary import (
    Auxiliary,
    Served,
    make_auxiliary,
    refuse_other_vocabulary,
)
from trireme.launch.data import Text, make_text
from trireme.launch.elsewhere import Console, Elsewhere
from trireme.launch.engine_host import EngineHost
from trireme.launch.opening import open_run
from trireme.launch.trainer_ranks import TrainerRanks
from trireme.launch.training import (
    make_checkpoint_push,
    make_polled_sync,
    make_push,
    make_synchronizer,
)
from trireme.log import get_logger, setup_logging
from trireme.monitor.monitor import Monitors
from trireme.monitor.watchdog import sample_of
from trireme.pipeline.operators import Operator
from trireme.pipeline.pipeline import Pipeline
from trireme.sync.checkpoint import CheckpointPush, PolledSync
from trireme.sync.synchronizer import ExplorerSync, Push, Synchronizer, TrainerSync
from trireme.trainer.backend import Backend
from trireme.trainer.learning import Learning
from trireme.trainer.ranks import Place
from trireme.trainer.trainer import BufferSupply, Supply, Trainer

logger = get_logger("launcher")


class Session(AbstractContextManager["Session"]):
    """One plan with its folder, logs and monitors, open while it runs."""

    def __init__(
        self,
        plan: Plan,
        model_path: str,
        console: Console,
        device: Device,
        measure_end: bool,
        place: Place | None = None,
        hosts: Sequence[EngineHost] = (),
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """`model_path` is the plan's, or the last stage's model.

        `place`: that of rank 0, where several ranks train; the others `trainer_ranks.follow_plan`.
        `hosts`: engine processes, which serve when the engine is first asked for.
        `elsewhere`: this process has one part of the run, and another one its monitors.
        """
        self.plan = plan
        self.model_path = model_path
        self.console = console
        self.device = device
        self.measure_end = measure_end
        self.elsewhere = elsewhere or Elsewhere()
        self._is_whole = elsewhere is None
        self._place = place
        self._ranks: TrainerRanks | None = None
        self._hosts = hosts
        self.folder = JobFolder(plan.job_dir, plan.explorer_name)
        self.resumed: Loaded | None = None
        self.stops: list[Callable[[], bool]] = []
        """What is asked to end where the run is told to stop."""
        self.monitor = Monitors([])
        self._held = ExitStack()
        """What is let go of at the end, the last first."""
        self._explorer: Explorer | None = None
        self._trainer: Trainer | None = None

    def __enter__(self) -> Session:
        """Make the folder, open its files, and look for a checkpoint to go on from."""
        with ExitStack() as unless_open:
            unless_open.push(self._held)
            self._open()
            unless_open.pop_all()
        return self

    def _open(self) -> None:
        plan = self.plan
        self.folder.make()
        if self._is_whole and plan.mode in ("both", "train"):
            self._held.enter_context(self.folder.one_trainer())
        self._held.callback(setup_logging(self.folder.log, plan.config.log.level))
        os.environ.update(plan.config.explorer.env_vars)
        if plan.mode in ("both", "train"):
            self.resumed = load_checkpoint(self.folder)
        if self._is_whole:
            self.monitor, self.alarm = open_run(self)
            self._held.callback(self.monitor.close)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the files and send other trainer ranks home, whatever happened."""
        self._held.__exit__(kind, error, trace)

    @cached_property
    def taskset(self) -> Taskset | Mixture | None:
        """The tasks to explore."""
        return data.make_training_taskset(self.plan)

    @cached_property
    def eval_tasksets(self) -> list[Taskset]:
        """The tasks that measure."""
        return data.make_eval_tasksets(self.plan)

    @property
    def reads_file(self) -> bool:
        """Whether the trainer reads a data set by itself."""
        return self.plan.buffer_type == "file"

    @property
    def measures_start(self) -> bool:
        """Whether a supervised stage evaluates first: the model is as the user gave it."""
        fresh = self.plan.model_from_stage is None and self.resumed is None
        return fresh and self.plan.config.explorer.eval_on_startup

    @property
    def _shares(self) -> bool:
        """Whether the engine reads the trainer's tensors: nothing trains while it generates."""
        lock_step = self.plan.share_tensors or self.recipe.from_data
        alone = not self.engine_urls and self._place is None
        return lock_step and alone and self.backend.adapter is None

    async def refresh_engine(self, version: int) -> None:
        """Give the engine the trainer's weights as they are, without a push."""
        source = None if self._shares else await self.device.run(self.backend.weights)
        await self.engine.update_weights(source, version)

    @cached_property
    def recipe(self) -> Recipe:
        """The algorithm."""
        return get_recipe(self.plan.config.algorithm)

    @cached_property
    def text(self) -> Text:
        """Tokenizer and chat template."""
        return make_text(self.plan, self.model_path)

    @cached_property
    def backend(self) -> Backend:
        """The trained model, where the checkpoint left it."""
        if self._place is not None:
            self._ranks = TrainerRanks(self.plan, self.model_path, self.recipe, self._place)
            self._held.callback(self._ranks.close)
            backend = self._ranks.backend
        else:
            backend = training.make_backend(self.plan, self.model_path, self.recipe)
        if backend.adapter is not None:
            get_logger("trainer").info(line := backend.adapter.trains())
            self.console.note(line)
        if self.resumed is not None:
            backend.load(self.resumed.actor)
        return backend

    @cached_property
    def gate(self) -> Gate | None:
        """Deterministic mode's."""
        return Gate() if self.plan.deterministic else None

    @property
    def engine_urls(self) -> tuple[str, ...]:
        """Where engines of other processes serve; none: the engine is embedded."""
        return tuple(host.url for host in self._hosts) or self.plan.engine_urls

    @cached_property
    def engine(self) -> Engine:
        """The embedded engine, over the trainer's tensors where nothing trains meanwhile; or the
        rollout servers.
        """
        if self.engine_urls:
            own = self._hosts[0].key if self._hosts else None
            key = own or self.plan.engine_key
            return rollout.make_remote_engine(self.plan, self.engine_urls, key)
        share = self.backend.module if self._shares else None
        return rollout.make_engine(
            self.plan, self.model_path, self.text, self.device, self.gate, share
        )

    @cached_property
    def auxiliary_models(self) -> list[Auxiliary | Served]:
        """Models beside the trained one; a teacher has the student's vocabulary."""
        models = make_auxiliary(self.plan, self.device)
        if self.recipe.asks("teacher_logprobs"):
            refuse_other_vocabulary(models, self.text.tokenizer)
        return models

    async def close_engines(self) -> None:
        """Those that were made."""
        for auxiliary in self.__dict__.get("auxiliary_models", ()):
            if isinstance(auxiliary, Auxiliary):
                await auxiliary.engine.close()
        await self.engine.close()

    @cached_property
    def buffer(self) -> Buffer:
        """The store between the two, where the checkpoint left it."""
        if self.elsewhere.buffer is not None:
            return self.elsewhere.buffer
        ends = end_tokens_of(self.model_path, self.text.tokenizer) if self.reads_file else ()
        buffer, record = data.make_buffer(
            self.plan, self.folder, self.text, schema=self.recipe.schema, end_ids=ends
        )
        if record is not None:
            self.keep(record)
        if self.resumed is not None:
            buffer.load_state(self.resumed.run_state["buffer"])
        return buffer

    @cached_property
    def operators(self) -> list[Operator]:
        """What is done to a step's experiences before they are trained."""
        return data.make_operators(self.plan)

    @cached_property
    def pipeline(self) -> Pipeline:
        """The operators, with the copy of what comes in where the YAML wants one."""
        raw = data.make_raw_record(self.plan, self.folder)
        if raw is not None:
            self.keep(raw)
        return Pipeline(self.recipe, raw=raw, operators=self.operators)

    @cached_property
    def auxiliary(self) -> dict[str, Buffer]:
        """Data sets that are mixed into the trainer's batches, where the checkpoint left them."""
        given = self.plan.config.buffer.trainer_input.auxiliary_buffers
        out: dict[str, Buffer] = {}
        for name, config in given.items():
            ends = end_tokens_of(self.model_path, self.text.tokenizer)
            out[name] = data.make_file_buffer(self.plan, config, self.text, ends, endless=True)
            if self.resumed is not None:
                out[name].load_state(self.resumed.run_state["auxiliary"][name])
        return out

    @cached_property
    def learning(self) -> Learning:
        """What train steps share beside the policy, where the checkpoint left it."""
        backend = self.backend  # other ranks make both at once
        learning = (
            self._ranks.learning
            if self._ranks is not None
            else training.make_learning(self.plan, self.model_path, self.recipe)
        )
        if self.resumed is not None:
            if known := self.resumed.run_state.get("learning"):
                learning.load_state(known)
            if learning.critic is not None:
                learning.load_critic(backend, self.folder.critic_dir(self.resumed.step))
        learning.tokens = data.make_trained_tokens(self.plan, self.folder)
        if learning.tokens is not None:
            self._held.callback(learning.tokens.close)
            learning.tokens.rewind(self.resumed.step if self.resumed else 0)
        return learning

    @cached_property
    def synchronizer(self) -> Synchronizer:
        """Both sides in this process, or the trainer's side for explorers elsewhere."""
        plan = self.plan
        alone = plan.mode == "train"
        state = self.resumed.run_state if self.resumed else {"version": 0}
        step = self.resumed.step if self.resumed else 0
        own = self.elsewhere.push or (self._checkpoint_push(None).push if alone else self.push())
        return make_synchronizer(
            plan,
            own,
            demand=self.buffer.demand,
            version=state["version"],
            step=step,
            pushed_step=state.get("pushed_step"),
        )

    def polled_sync(self) -> PolledSync:
        """The explorer's side, for a trainer of another process."""
        return make_polled_sync(self.plan, self.engine, self.folder)

    def announce(self, state: str, step: int) -> None:
        """Tell explorers of other processes how the trainer is."""
        self._checkpoint_push(None).announce(state, step)

    def explorer(self, sync: ExplorerSync, *, prefix: str = "eval") -> Explorer:
        """The explorer with its tasks; `prefix` names its evaluations' metrics."""
        plan = self.plan
        config = plan.config.explorer
        self._explorer = Explorer(
            taskset=self.taskset,
            eval_tasksets=self.eval_tasksets,
            scheduler=rollout.make_scheduler(
                plan,
                self.model_path,
                self.engine,
                self.text,
                self.gate,
                greedy_run=self.recipe.greedy_run,
                auxiliary=self.auxiliary_models,
            ),
            pipeline=self.pipeline,
            buffer=self.buffer if plan.mode in ("both", "explore") else None,
            sync=sync,
            eval_interval=plan.eval_interval,
            eval_on_startup=config.eval_on_startup,
            eval_prefix=prefix,
            report=self.report,
            max_failures=config.max_failures,
            show=self.show,
            folder=self.folder if plan.mode == "explore" else None,
            evaluated=self.evaluated,
            failed=self.failed,
            name=plan.explorer_name or "explorer",
            max_pending=2 if plan.sync_style in ("trainer_driven", "fully_async") else 1 << 30,
        )
        if self.resumed is not None and plan.mode == "both":
            self._explorer.load_state(self.resumed.run_state["explorer"])
        return self._explorer

    @cached_property
    def supply(self) -> Supply:
        """Where the trainer's batches come from."""
        if self.elsewhere.supply is not None:
            return self.elsewhere.supply
        return BufferSupply(
            self.buffer,
            self.recipe,
            self.plan.train_batch_size,
            auxiliary=self.auxiliary,
            turn=None if self.reads_file else self.synchronizer.trainers_turn,
        )

    def trainer(self, sync: TrainerSync | None) -> Trainer:
        """The trainer, where the checkpoint left it."""
        plan = self.plan
        self._trainer = Trainer(
            backend=self.backend,
            recipe=self.recipe,
            supply=self.supply,
            device=self.device,
            sync=sync,
            learning=self.learning,
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
        self.stops.append(self._trainer.stop)
        return self._trainer

    def stop(self) -> bool:
        """Ask what runs to save and end by itself; False where there is nothing to save."""
        return any(ask() for ask in self.stops)

    def doing(self) -> str:
        """What the run would end after, as a noun."""
        return (self._trainer.doing if self._trainer else "") or "the parts of the run to end"

    def report(self, part: str, step: int, metrics: Mapping[str, float]) -> None:
        """One step of one part: to the monitors, the watchdog and the console."""
        if self._is_whole:
            metrics = self.alarm.look(part, step, metrics)
        self.monitor.log(metrics, step, part)
        self.console.step(part, step, metrics)

    def show(self, experience: Experience) -> None:
        """How a rollout ended: to the watchdog, the trackers and the console."""
        if self._is_whole:
            self.alarm.watchdog.sample = sample_of(experience)
        self.monitor.rollout(experience)
        self.console.rollout(experience)

    async def snapshot(self) -> dict[str, Any]:
        """Where explorer, buffer and synchronizer stand now."""
        given = self.elsewhere.snapshot
        state = await given() if given else self._where()
        if self._trainer is not None:
            state["learning"] = self.learning.state()
        return state

    def _where(self) -> dict[str, Any]:
        """Where the parts stand that may live in another process than the trainer."""
        state: dict[str, Any] = {
            "buffer": self.buffer.state(),
            "auxiliary": {name: buffer.state() for name, buffer in self.auxiliary.items()},
            "version": 0,
        }
        if not self.recipe.from_data:
            state["version"] = self.synchronizer.version
            state["pushed_step"] = self.synchronizer.pushed_step
        if self._explorer is not None and self.plan.mode == "both":
            state["explorer"] = self._explorer.state()
        return state

    def save(self, step: int, run_state: dict[str, Any], last: bool) -> None:
        """A whole checkpoint of `step`."""
        trainer = self.plan.config.trainer
        when = trainer.save_hf_checkpoint
        hf = when == "always" or (when == "last" and last)
        learning = self.learning
        save_checkpoint(
            self.folder,
            step,
            save=partial(self.backend.save, hf=hf),
            run_state=run_state,
            model_dir=self.model_path,
            keep=trainer.max_checkpoints_to_keep,
            save_critic=partial(learning.save_critic, self.backend) if learning.critic else None,
        )

    @cached_property
    def evaluated(self) -> Record | None:
        """What evaluations said, for people, where the YAML wants copies."""
        return self._shown(EVALUATED, math.inf)

    @cached_property
    def failed(self) -> Record | None:
        """What failed, for people, where the YAML wants copies."""
        return self._shown(FAILED, data.FAILED_BYTES)

    def _shown(self, name: str, most: float) -> Record | None:
        record = data.make_shown_record(self.plan, self.folder, name, most)
        if record is not None:
            self.keep(record)
        return record

    def keep(self, record: Record) -> None:
        """Close it with the session; what a killed run wrote after its checkpoint goes."""
        self._held.callback(record.close)
        if self.plan.mode == "both":
            record.rewind(self.resumed.run_state["explorer"]["step"] if self.resumed else 0)

    def push(self) -> Push:
        """How weights travel from this process to its engine."""
        if self.plan.sync_method == "checkpoint":
            return self._checkpoint_push(self.engine).push
        return make_push(self.plan, self.backend, self.engine, self.device, self.elsewhere.host)

    def _checkpoint_push(self, engine: Engine | None) -> CheckpointPush:
        def step() -> int:
            return self._trainer.step if self._trainer else 0

        return make_checkpoint_push(self.plan, self.backend, engine, self.device, self.folder, step)
