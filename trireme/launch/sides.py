"""Sides: the two halves of a run, trainer and explorer, which take their neighbours as arguments.

The trainer's side has the trained models, the buffer and the synchronizer. The explorer's side is
given an engine, what it puts experiences into and who brings new weights, in this process or
another: neither side knows where the other runs. `launch/modes.py` says what they do together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from trireme.buffer.buffer import Buffer, Puts
from trireme.checkpoint.layout import DATA_ROWS, EVALUATED, FAILED
from trireme.checkpoint.manifest import prove
from trireme.checkpoint.save import Saving
from trireme.config import Plan
from trireme.engines.engine import Engine
from trireme.engines.make import make_torch_engine
from trireme.engines.remote import RemoteEngine
from trireme.experience import Experience
from trireme.explorer.explorer import Explorer
from trireme.launch.data import FAILED_BYTES, end_ids_of, make_file_buffer
from trireme.launch.engines import Auxiliary, engine_spec, make_auxiliary, refuse_other_vocabulary
from trireme.launch.rollout import make_scheduler
from trireme.launch.stage import Stage, StageResult
from trireme.launch.training import (
    Models,
    make_pairs,
    make_push,
    make_synchronizer,
    push_source,
    restarts_by,
)
from trireme.log import get_logger
from trireme.sync.checkpoint import CheckpointPush
from trireme.sync.probe import Probe
from trireme.sync.push import HttpSync
from trireme.sync.synchronizer import ExplorerSync, Push
from trireme.trainer.backend import Backend
from trireme.trainer.measure import Profile
from trireme.trainer.trainer import Stopped, Trainer


def shares_tensors(stage: Stage, backend: Backend) -> bool:
    """Whether an engine of this process may read the trainer's tensors: nothing trains while it
    generates.
    """
    return (stage.plan.share_tensors or stage.recipe.from_data) and backend.adapter is None


def embedded_engine(stage: Stage, backend: Backend | None = None) -> Engine:
    """The engine of this process, over the trainer's tensors where nothing trains meanwhile."""
    share = backend.module if backend is not None and shares_tensors(stage, backend) else None
    spec = engine_spec(stage.plan, stage.model_path)
    return make_torch_engine(
        spec, stage.text.tokenizer, stage.device, barrier=stage.barrier, share_with=share
    )


class TrainerSide:
    """Trainer, buffer and synchronizer of one plan; explorers are here, in an actor, or elsewhere.

    Without an `engine` nothing is measured here, and explorers of other commands read files.
    """

    def __init__(
        self, stage: Stage, models: Models, engine: Engine | None, *, host: str = "127.0.0.1"
    ) -> None:
        """`host`: this machine, as the engines see it."""
        plan, saved = stage.plan, stage.resumed
        if (adapter := models.backend.adapter) is not None:
            get_logger("trainer").info(line := adapter.trains())
            stage.console.note(line)
        self.stage = stage
        self.models = models
        self.engine = engine
        self._saving: Saving | None = None
        self.explorer_state: Callable[[], dict[str, Any]] | None = None
        """Where an explorer of the same run stands: checkpoints hold it too."""
        self._probe = Probe(models.backend.module.config.vocab_size, plan.dtype)
        self._source = push_source(plan, models.backend)
        self._pairs = make_pairs(plan, models.backend)
        if (lock := stage.device.colocation) is not None and self._pairs is not None:
            lock.make_room = partial(stage.device.amid_turn, self._pairs.make_room)
        self._files = CheckpointPush(
            models.backend,
            stage.device,
            stage.folder,
            step=lambda: self.trainer.step,
            probe=self._probe,
            dtype=plan.dtype,
            engine=engine if plan.mode == "both" else None,
        )
        push = self._push(host)
        self.buffer = stage.buffer
        state = saved.run_state if saved else {"version": 0}
        self.sync = make_synchronizer(
            plan,
            push,
            demand=self.buffer.demand,
            version=state["version"],
            step=saved.step if saved else 0,
            pushed_step=state.get("pushed_step"),
        )
        self._refreshing = asyncio.Lock()
        restarts_by(self.sync, engine, self._renew if stage.recipe.from_data else None)
        self.auxiliary = self._auxiliary()
        self.trainer = self._trainer()

    async def refresh(self) -> None:
        """Give the engine the weights as they are, without a push."""
        assert self.engine is not None
        engine, from_data = self.engine, self.stage.recipe.from_data
        version = self.trainer.step if from_data else self.sync.version
        backend, device = self.models.backend, self.stage.device

        async def give() -> None:
            source = self._source
            if isinstance(engine, RemoteEngine):
                dtype = self.stage.plan.dtype
                http = HttpSync(source, engine, device, dtype=dtype, probe=self._probe)
                return await http.give(version)
            shared = shares_tensors(self.stage, backend)
            weights = None if shared else await device.run(source.weights)
            await engine.update_weights(weights, version)

        async with self._refreshing:
            await self.sync.persist(give)

    async def _renew(self, lacking: Callable[[], bool]) -> None:
        """A supervised stage pushes nothing: an engine that was started again is refreshed."""
        if lacking():
            await self.refresh()

    async def calibrate(self) -> None:
        """Measure how far engine and trainer differ while both have the same weights."""
        engine, backend = self.engine, self.models.backend
        if engine is None:
            return

        async def score(ids: list[int]) -> list[float]:
            return (await self.stage.device.run(backend.score, [ids]))[0]

        await self.sync.persist(lambda: self._probe.calibrate(engine, score))

    async def train(self) -> int:
        """To the last step, which is returned. Explorers of other commands are told how it goes."""
        if self.stage.plan.mode == "both" or self.stage.recipe.from_data:
            await self.trainer.train()
        else:
            await self._train_for_others()
        return self.trainer.step

    async def explored(self) -> None:
        """The explorer has ended."""
        self.sync.explored()

    async def final_push(self) -> None:
        """Give the engine the last weights, for the evaluation at the end."""
        if self.stage.recipe.from_data:
            await self.refresh()
        else:
            await self.sync.final_push()

    async def result(self) -> StageResult:
        """What the trainer came to."""
        result, step = self.stage.result(), self.trainer.step
        result.steps = step
        result.phases["train"] = self.trainer.seconds
        result.model_dir = str(self.stage.folder.hf_dir(step))
        return result

    async def snapshot(self) -> dict[str, Any]:
        """Where explorer, buffer and synchronizer stand now."""
        state: dict[str, Any] = {
            "buffer": self.buffer.state(),
            "auxiliary": {name: buffer.state() for name, buffer in self.auxiliary.items()},
            "version": 0,
        }
        if not self.stage.recipe.from_data:
            state["version"] = self.sync.version
            state["pushed_step"] = self.sync.pushed_step
        if self.explorer_state is not None:
            state["explorer"] = self.explorer_state()
        return state | {"learning": self.models.train_state.state()}

    def begin_save(self, step: int, run_state: dict[str, Any], last: bool, behind: bool) -> None:
        """See Checkpointer: a whole checkpoint of `step`."""
        trainer = self.stage.plan.config.trainer
        when = trainer.save_hf_checkpoint
        hf = when == "always" or (when == "last" and last)
        backend, train_state = self.models.backend, self.models.train_state
        saving = Saving(
            self.stage.folder,
            step,
            run_state=run_state,
            model_dir=self.stage.model_path,
            keep=trainer.max_checkpoints_to_keep,
        )
        with saving.abandoned_on_error():
            backend.begin_save(saving.actor, hf=hf, behind=behind)
            if train_state.critic is not None:
                train_state.save_critic(backend, saving.critic)
        self._saving = saving

    def await_save(self) -> None:
        """See Checkpointer."""
        self.models.backend.await_save()

    def end_save(self) -> None:
        """See Checkpointer."""
        assert self._saving is not None, "a save has begun"
        with self._saving.abandoned_on_error():
            self.models.backend.end_save()

    def seal_save(self) -> None:
        """See Checkpointer."""
        assert self._saving is not None, "a save has begun"
        self._saving.finish()
        self._saving = None

    async def _train_for_others(self) -> None:
        """Train on what explorers of other commands put, and tell them how it stands."""
        trainer, announce = self.trainer, self._files.announce
        announce("running", trainer.step)
        try:
            await trainer.train()
            await self.sync.final_push()
        except Stopped:
            raise  # they wait until it is started again
        except Exception as error:
            # explorers of other processes wait for us, for room or for weights
            announce(f"failed: {type(error).__name__}: {error}", trainer.step)
            await self.buffer.fail(error)
            raise
        announce("stopped", trainer.step)

    def _push(self, host: str) -> Push:
        """How weights travel from here to an engine, or to explorers of other commands."""
        plan = self.stage.plan
        if plan.mode == "train" or plan.sync_method == "checkpoint":
            return self._files.push
        assert self.engine is not None
        device = self.stage.device
        return make_push(plan, self._source, self.engine, device, host, self._probe, self._pairs)

    def _auxiliary(self) -> dict[str, Buffer]:
        """Data sets that are mixed into the batches, where the checkpoint left them."""
        stage, saved = self.stage, self.stage.resumed
        buffers: dict[str, Buffer] = {}
        for name, config in stage.plan.config.buffer.trainer_input.auxiliary_buffers.items():
            ends = end_ids_of(stage.model_path, stage.text)
            buffers[name] = make_file_buffer(stage.plan, config, stage.text, ends, endless=True)
            if saved is not None:
                buffers[name].load_state(saved.run_state["auxiliary"][name])
        return buffers

    def _trainer(self) -> Trainer:
        stage, plan = self.stage, self.stage.plan
        trainer = Trainer(
            backend=self.models.backend,
            recipe=stage.recipe,
            buffer=self.buffer,
            batch_size=plan.train_batch_size,
            auxiliary=self.auxiliary,
            turn=None if stage.reads_file else self.sync.trainers_turn,
            device=stage.device,
            sync=None if stage.recipe.from_data else self.sync,
            train_state=self.models.train_state,
            # Together with an explorer the trainer ends when the experiences do.
            total_steps=(
                plan.config.trainer.total_steps if plan.mode == "both" else plan.train_steps
            ),
            save_interval=plan.config.trainer.save_interval,
            # its end would make the engine pause again, amid rollouts
            save_behind=plan.config.trainer.save_behind and not plan.takes_turns,
            save_timeout=plan.config.cluster.stop_timeout,
            checkpointer=self,
            report=stage.console.step,
            show=self._show_rows(),
            profile=self._profile(),
        )
        trainer.step = stage.resumed.step if stage.resumed else 0
        return trainer

    def _profile(self) -> Profile | None:
        steps = frozenset(self.stage.plan.config.trainer.profile.steps)
        stage = self.stage
        return Profile(steps, stage.folder.profile, stage.console.note) if steps else None

    def _show_rows(self) -> Callable[[int, Sequence[Experience]], None] | None:
        """Keeps the text of a data set's rows, step by step, where the YAML wants copies."""
        stage = self.stage
        record = stage.shown_record(DATA_ROWS) if stage.reads_file else None
        if record is None:
            return None
        from trireme.buffer.record import data_lines

        record.rewind(stage.resumed.step if stage.resumed else 0)
        return lambda step, experiences: record.write_lines(data_lines(step, experiences))


def _max_pending(plan: Plan) -> int:
    """Explore steps under way at once where nothing borders them: as many as the runners can work
    on, so that slow environments leave no runner without a task; two at least.
    """
    if plan.sync_style not in ("trainer_driven", "fully_async"):
        return 1 << 30
    return max(2, plan.runners // max(plan.batch_size, 1))


class ExplorerSide:
    """The explorer of one plan; its trainer is here, in an actor, or another command."""

    def __init__(
        self,
        stage: Stage,
        engine: Engine,
        buffer: Puts | None,
        sync: ExplorerSync,
        *,
        prefix: str = "eval",
    ) -> None:
        """Without a `buffer` it only evaluates; `prefix` names its evaluations' metrics."""
        plan, config = stage.plan, stage.plan.config.explorer
        # several explorers would write the same files, and bench over the run's evaluations
        shows = not plan.explorer_name and prefix != "bench"
        self.stage = stage
        self.engine = engine
        self.models = make_auxiliary(plan, stage.device)
        teacher = stage.recipe.needs_teacher and buffer is not None
        if teacher:
            first = self.models[0]
            assert isinstance(first, Auxiliary), "check refuses one that scores no given tokens"
            theirs, ours = first.chat.tokenizer, stage.text.tokenizer
            refuse_other_vocabulary(first.model_path, theirs, ours)
        self.explorer = Explorer(
            taskset=stage.taskset,
            eval_tasksets=stage.eval_tasksets,
            scheduler=make_scheduler(
                plan,
                stage.model_path,
                engine,
                stage.text,
                stage.barrier,
                greedy_run=stage.recipe.greedy_run,
                teacher=teacher,
                auxiliary=self.models,
            ),
            pipeline=stage.pipeline(),
            buffer=buffer,
            sync=sync,
            eval_interval=plan.eval_interval,
            eval_on_startup=config.eval_on_startup,
            eval_prefix=prefix,
            report=stage.console.step,
            max_failures=config.max_failures,
            show=stage.console.rollout,
            folder=stage.folder if plan.mode == "explore" else None,
            evaluated=stage.shown_record(EVALUATED) if shows else None,
            failed=stage.shown_record(FAILED, most=FAILED_BYTES) if shows else None,
            name=plan.explorer_name or "explorer",
            max_pending=_max_pending(plan),
        )
        if stage.resumed is not None and plan.mode == "both":
            self.explorer.load_state(stage.resumed.run_state["explorer"])

    async def explore(self) -> None:
        """Until there are no tasks left, or the trainer wants no more."""
        await self.explorer.explore()

    async def load(self, step: int) -> None:
        """Give the engine a checkpoint's weights, once they are proved."""
        prove(weights := self.stage.folder.weights_dir(step))
        await self.engine.update_weights(weights, step)

    async def evaluate(self, step: int | None = None) -> None:
        """All evaluation tasksets; None: as of the explorer's own last step."""
        await self.explorer.evaluate_last(self.explorer.step if step is None else step)

    async def result(self) -> StageResult:
        """What the explorer came to."""
        result, explorer = self.stage.result(), self.explorer
        result.first, result.first_example = explorer.first_evaluation, explorer.first_example
        if explorer.last_evaluation is not explorer.first_evaluation:
            result.last, result.last_example = explorer.last_evaluation, explorer.last_example
        result.steps = explorer.step
        result.phases |= explorer.seconds
        return result

    async def close(self) -> None:
        """End the runners, and the models beside the trained one."""
        await self.explorer.close()
        for model in self.models:
            if isinstance(model, Auxiliary):
                await model.engine.close()
