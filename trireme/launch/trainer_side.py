"""Trainer side: the half of a run that learns, with the buffer, the synchronizer and checkpoints.

It receives an engine, in this process or another: it does not know where its explorer runs.
`launch/modes.py` runs the two together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from trireme.buffer.buffer import Buffer, InMemory
from trireme.checkpoint.layout import DATA_ROWS
from trireme.checkpoint.save import Saving
from trireme.config.shape import experts_of
from trireme.engines.engine import Engine
from trireme.launch.data import end_ids_of, make_buffer
from trireme.launch.models import make_pairs, pushed_part
from trireme.launch.results import StageResult
from trireme.launch.stage import Stage
from trireme.log import get_logger
from trireme.monitor.events import Noted
from trireme.registry import PUSHES
from trireme.sync.checkpoint import CheckpointPush
from trireme.sync.probe import Probe, WeightSource
from trireme.sync.push import Pairs, PushParts, WeightPush
from trireme.sync.synchronizer import Push, Synchronizer
from trireme.trainer.led import Models
from trireme.trainer.measure import Profile
from trireme.trainer.source import PartSource
from trireme.trainer.steering import SteeringParts, make_steering
from trireme.trainer.trainer import Stopped, Trainer, TrainerSettings


class TrainerSide:
    """Trainer, buffer and synchronizer of one plan; explorers are here, in an actor, or elsewhere.

    Without an `engine` nothing is evaluated here, and explorers of other commands read files.
    """

    def __init__(
        self, stage: Stage, models: Models, engine: Engine | None, *, host: str = "127.0.0.1"
    ) -> None:
        """`host`: the address of this machine, as the engines see it."""
        plan, saved, backend = stage.plan, stage.resumed, models.backend
        if (adapter := backend.adapter) is not None:
            get_logger("trainer").info(line := adapter.trains())
            stage.emit(Noted(line))
        self.stage = stage
        self.models = models
        self.engine = engine
        self._host = host
        self._saving: Saving | None = None
        self.explorer_state: Callable[[], dict[str, Any]] | None = None
        """Returns the state of an explorer of the same run: checkpoints hold it too."""
        facts = backend.module.config.to_dict()
        vocabulary = backend.module.config.get_text_config().vocab_size
        self._probe = Probe(vocabulary, plan.dtype, mixture=experts_of(facts) > 0)
        part = pushed_part(plan, backend)
        self._source: WeightSource = backend if part == "merged" else PartSource(backend, part)
        self._files = CheckpointPush(
            backend,
            stage.device,
            stage.folder,
            step=lambda: self.trainer.step,
            probe=self._probe,
            dtype=plan.dtype,
            engine=engine if plan.mode == "both" else None,
        )
        push = self._push()
        self.buffer = stage.buffer
        state = saved.run_state if saved else {"version": 0}
        self.sync = Synchronizer(
            push,
            style="trainer_driven" if plan.mode == "train" else plan.sync.style,
            interval=plan.sync.interval,
            offset=plan.sync.offset,
            timeout=plan.config.synchronizer.sync_timeout,
            lock_step=plan.sync.lock_step,
            demand=self.buffer.demand,
            version=state["version"],
            step=saved.step if saved else 0,
            pushed_step=state.get("pushed_step"),
        )
        self._refreshing = asyncio.Lock()
        servers = None if engine is None else engine.servers
        if servers is not None:  # restarted servers get their weights this way
            self.sync.persist = servers.persist
            servers.renew = self._renew if stage.recipe.from_data else self.sync.renew
        self.auxiliary = self._auxiliary()
        self.trainer = self._trainer()
        if stage.reads_file:
            stage.copy(DATA_ROWS)

    async def refresh(self) -> None:
        """Load the current weights into the engine, without a push."""
        from_data = self.stage.recipe.from_data
        version = self.trainer.step if from_data else self.sync.version
        direct = self._push_named("memory")
        async with self._refreshing:
            await self.sync.persist(lambda: direct.give(version))

    async def _renew(self, lacking: Callable[[], bool]) -> None:
        """Refresh an engine that was restarted: a supervised stage pushes nothing."""
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
        """Train to the last step and return it. Publishes its progress to explorers of other
        commands.
        """
        if self.stage.plan.mode == "both" or self.stage.recipe.from_data:
            await self.trainer.train()
        else:
            await self._train_for_others()
        return self.trainer.step

    async def explored(self) -> None:
        """Note that the explorer has ended."""
        self.sync.explored()

    async def final_push(self) -> None:
        """Push the last weights to the engine, for the evaluation at the end."""
        if self.stage.recipe.from_data:
            await self.refresh()
        else:
            await self.sync.final_push()

    async def result(self) -> StageResult:
        """Return the trainer's result."""
        result, step = self.stage.result(), self.trainer.step
        result.steps, result.ended_by = step, self.trainer.ended_by
        result.phases["train"] = self.trainer.seconds
        result.model_dir = str(self.stage.folder.hf_dir(step))
        return result

    async def snapshot(self) -> dict[str, Any]:
        """Return the current state of explorer, buffer and synchronizer, once the copies of all
        experiences in it are on the disk.
        """
        state: dict[str, Any] = {
            "made_with": self.stage.made_with,
            "buffer": self.buffer.state(),
            "auxiliary": {name: buffer.state() for name, buffer in self.auxiliary.items()},
            "version": 0,
            "sizes": self.stage.plan.steps.sizes,
            "earlier": self.stage.plan.steps.earlier,
        }
        if not self.stage.recipe.from_data:
            state["version"] = self.sync.version
            state["pushed_step"] = self.sync.pushed_step
        if self.explorer_state is not None:
            state["explorer"] = self.explorer_state()
        state["learning"] = self.models.train_state.state()
        # last: what was read before belongs together, and this may wait for a database's server
        for buffer in (self.buffer, *self.auxiliary.values()):
            if isinstance(buffer, InMemory) and buffer.record is not None:
                await buffer.record.flushed()
        return state

    def begin_save(self, step: int, run_state: dict[str, Any], last: bool, behind: bool) -> None:
        """Implement Checkpointer.begin_save: a whole checkpoint of `step`."""
        trainer = self.stage.plan.config.trainer
        when = trainer.save_hf_checkpoint
        hf = when == "always" or (when == "last" and last)
        saving = Saving(
            self.stage.folder,
            step,
            run_state=run_state,
            model_dir=self.stage.model_path,
            keep=trainer.max_checkpoints_to_keep,
        )
        with saving.abandoned_on_error():
            self.models.backend.begin_save(saving.actor, hf=hf, behind=behind)
            if self.models.train_state.critic is not None:
                self.models.save_critic(saving.critic)
        self._saving = saving

    def await_save(self) -> None:
        """Implement Checkpointer.await_save."""
        self.models.backend.await_save()

    def end_save(self) -> None:
        """Implement Checkpointer.end_save."""
        assert self._saving is not None, "a save has begun"
        with self._saving.abandoned_on_error():
            self.models.backend.end_save()

    def seal_save(self) -> None:
        """Implement Checkpointer.seal_save."""
        assert self._saving is not None, "a save has begun"
        self._saving.finish()
        self._saving = None

    async def _turn(self) -> None:
        """Wait for the trainer's turn. An engine of this process that generates nothing until it
        has new weights then frees keys and values, which these make worthless.
        """
        if not self.stage.reads_file:
            await self.sync.trainers_turn()
        engine, rests = self.engine, self.stage.plan.sync.lock_step or self.stage.recipe.from_data
        if engine is not None and engine.servers is None and rests:
            await engine.pause()
            await engine.resume()

    async def _train_for_others(self) -> None:
        """Train on the experiences of other commands' explorers, and publish the trainer's state to
        them.
        """
        trainer, announce = self.trainer, self._files.announce
        announce("running", trainer.step)
        try:
            await trainer.train()
            await self.sync.final_push()
        except Stopped:
            raise  # explorers wait until the trainer is started again
        except Exception as error:
            # explorers of other processes wait for room or for weights
            announce(f"failed: {type(error).__name__}: {error}", trainer.step)
            await self.buffer.fail(error)
            raise
        announce("stopped", trainer.step)

    def _push(self) -> Push:
        """Choose how weights reach an engine: by the method that the engine names, or by files."""
        plan, device = self.stage.plan, self.stage.device
        pairs = make_pairs(plan, self.models)
        if pairs is not None and device.colocation is not None:
            device.colocation.make_room = partial(device.amid_turn, pairs.make_room)
        if plan.mode == "train" or plan.sync.method == "checkpoint":
            return self._files.push
        return self._push_named("paired" if pairs is not None else plan.sync.method, pairs).push

    def _push_named(self, way: str, pairs: Pairs | None = None) -> WeightPush:
        """Make the engine's own push for this method. Raises ValueError if it has none."""
        engine, plan = self.engine, self.stage.plan
        assert engine is not None, "a push needs an engine"
        if (name := engine.traits.pushes.get(way)) is None:
            raise ValueError(
                f"an engine of the kind {plan.engine.kind} cannot receive weights by {way}"
            )
        parts = PushParts(
            self._source,
            engine,
            self.stage.device,
            dtype=plan.dtype,
            probe=self._probe,
            shared=self.stage.shares_tensors(self.models.backend),
            lock_step=plan.sync.lock_step,
            host=self._host,
            on_gpu=plan.device == "cuda",
            pairs=pairs,
        )
        return PUSHES.get(name).of(parts)

    def _auxiliary(self) -> dict[str, Buffer]:
        """Open the data sets that are mixed into the batches, in the state of the checkpoint; one
        that it does not know begins at its first row.
        """
        stage, saved = self.stage, self.stage.resumed
        buffers: dict[str, Buffer] = {}
        for name, config in stage.plan.config.buffer.trainer_input.auxiliary_buffers.items():
            ends = end_ids_of(stage.model_path, stage.text)
            buffers[name] = make_buffer(
                stage.plan, stage.folder, stage.text, config=config, end_ids=ends
            )
            state = None if saved is None else saved.run_state["auxiliary"].get(name)
            if state is not None:
                buffers[name].load_state(state)
        return buffers

    def _trainer(self) -> Trainer:
        stage, plan = self.stage, self.stage.plan
        options = plan.config.trainer
        steps = frozenset(options.profile.steps)
        settings = TrainerSettings(
            batch_size=plan.steps.train_batch_size,
            # With an explorer, the trainer ends when the experiences do.
            total_steps=options.total_steps if plan.mode == "both" else plan.steps.train,
            save_interval=options.save_interval,
            # its end would make the engine pause again, in the middle of rollouts
            save_behind=options.save_behind and not plan.sync.takes_turns,
            save_timeout=plan.config.cluster.stop_timeout,
            profile=Profile(steps, stage.folder.profile) if steps else None,
        )
        backend = self.models.backend
        steering = SteeringParts(
            plan, stage.folder, backend.module, backend.broken_weights, stage.emit
        )
        trainer = Trainer(
            models=self.models,
            buffer=self.buffer,
            settings=settings,
            auxiliary=self.auxiliary,
            turn=self._turn,
            device=stage.device,
            sync=None if stage.recipe.from_data else self.sync,
            checkpointer=self,
            emit=stage.emit,
            steering=make_steering(steering),
        )
        trainer.step = stage.resumed.step if stage.resumed else 0
        return trainer
