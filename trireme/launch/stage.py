"""Stage: opens one plan in one process: folder, log, checkpoint, and the parts of both sides.

Both sides of a run share it: the algorithm, tokenizer and chat template, the tasks, the operators
and the store between the two. Each is made on first use, once. All that a stage holds open is
closed when it ends, in reverse order, also if opening it failed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from trireme.algorithms.recipes import Recipe, get_recipe
from trireme.buffer.buffer import Buffer, InMemory
from trireme.buffer.record import Record
from trireme.checkpoint.layout import DATA_ROWS, JobFolder
from trireme.checkpoint.manifest import Loaded, load_checkpoint
from trireme.config import Plan
from trireme.data.tasksets import Mixture, Taskset
from trireme.engines.barrier import RolloutBarrier
from trireme.engines.device import Device
from trireme.engines.engine import Engine
from trireme.engines.make import make_engine
from trireme.explorer.explorer import explorer_state
from trireme.launch.copies import Copy, make_raw_record, make_shown_record
from trireme.launch.data import Text, end_ids_of, make_buffer, make_text
from trireme.launch.engines import engine_spec
from trireme.launch.operators import make_operators
from trireme.launch.results import StageResult
from trireme.launch.resume import made_with
from trireme.launch.tasksets import make_eval_tasksets, make_training_taskset
from trireme.log import get_logger, hide_passwords, setup_logging
from trireme.monitor.events import Emit, Listener, Noted, Stream
from trireme.pipeline.operators import Operator
from trireme.pipeline.pipeline import Pipeline, Resampling
from trireme.processes import ending_leftovers, environment
from trireme.sync.checkpoint import last_report
from trireme.usercode import ending

if TYPE_CHECKING:
    from trireme.trainer.backend import Backend

logger = get_logger("launcher")


class Stage:
    """One open plan. `open_stage` makes it."""

    def __init__(self, plan: Plan, model_path: str, device: Device) -> None:
        """`model_path` is the plan's, or the last stage's model."""
        self.plan = plan
        self.model_path = model_path
        self.device = device
        self.stream = Stream()
        self.emit: Emit = self.stream.emit
        self.folder = JobFolder(plan.job_dir, plan.explorer_name)
        self.old_report = last_report(self.folder)
        """The time of the last attempt's report. It is read before the engine is loaded, which may
        take as long as a trainer that fails at its start."""
        self.resumed: Loaded | None = None
        self.closing = ExitStack()
        """Closed at the end, in reverse order."""
        self._copied: set[str] = set()

    @property
    def trains(self) -> bool:
        """Return True if the plan has a trainer."""
        return self.plan.mode in ("both", "train")

    @property
    def reads_file(self) -> bool:
        """Return True if the trainer reads a data set itself."""
        return self.plan.store.kind == "file"

    @property
    def part(self) -> str | None:
        """Return the only part of the run in this command, explorer or trainer; None: both."""
        if self.plan.mode == "explore":
            return "explorer"
        return "trainer" if self.plan.mode == "train" and not self.reads_file else None

    @cached_property
    def explored(self) -> dict[str, Any] | None:
        """Return the explorer's state at the end of the last attempt; None: it begins."""
        plan = self.plan
        if plan.mode == "explore":
            state_file = self.folder.state_of(plan.config.explorer.name)
            return explorer_state(state_file) if os.path.lexists(state_file) else None
        return self.resumed.run_state.get("explorer") if self.resumed else None

    @property
    def resumes(self) -> bool:
        """Return True if an earlier attempt left something to resume."""
        return self.resumed is not None or self.explored is not None

    @property
    def steps_that_count(self) -> dict[str, int]:
        """Return, for each part that repeats its later steps, the last step that it does not
        repeat.
        """
        resumed, mode = self.resumed, self.plan.mode
        step = resumed.step if resumed else 0
        if mode == "train" and not self.recipe.from_data:
            return {"trainer": step}
        if mode not in ("both", "train"):
            return {}
        state = resumed.run_state if resumed else {}
        explored = state.get("explorer", {"step": step})["step"]
        return {"trainer": step, "explorer": explored, "eval": explored}

    @property
    def measures_start(self) -> bool:
        """Return True if a supervised stage evaluates first: the model is as the user
        supplied it.
        """
        fresh = self.plan.model_from_stage is None and self.resumed is None
        return fresh and self.plan.config.explorer.eval_on_startup

    @cached_property
    def recipe(self) -> Recipe:
        """Make the algorithm."""
        return get_recipe(self.plan.config.algorithm)

    @cached_property
    def made_with(self) -> dict[str, str | None]:
        """The facts without which a checkpoint of this run means nothing."""
        return made_with(self.plan, self.model_path, self.recipe)

    @cached_property
    def text(self) -> Text:
        """Make the tokenizer and chat template."""
        return make_text(self.plan, self.model_path)

    @cached_property
    def barrier(self) -> RolloutBarrier | None:
        """Make the barrier of deterministic mode."""
        return RolloutBarrier() if self.plan.deterministic else None

    @cached_property
    def taskset(self) -> Taskset | Mixture | None:
        """Make the tasks to explore."""
        return make_training_taskset(self.plan)

    @cached_property
    def eval_tasksets(self) -> list[Taskset]:
        """Make the evaluation tasks."""
        return make_eval_tasksets(self.plan)

    @cached_property
    def operators(self) -> list[Operator]:
        """Make the operators that process a step's experiences before training."""
        return make_operators(self.plan)

    @cached_property
    def buffer(self) -> Buffer:
        """Open the store between the two sides, in the state of the checkpoint."""
        ends = end_ids_of(self.model_path, self.text) if self.reads_file else ()
        buffer = make_buffer(
            self.plan, self.folder, self.text, schema=self.recipe.schema, end_ids=ends
        )
        if isinstance(buffer, InMemory) and buffer.record is not None:
            self.keep(buffer.record, "buffer.trainer_input.experience_buffer.path")
        if self.resumed is not None:
            buffer.load_state(self.resumed.run_state["buffer"])
        return buffer

    def shares_tensors(self, backend: Backend) -> bool:
        """Return True if an engine of this process may read the trainer's tensors: nothing trains
        while it generates.
        """
        return (self.plan.sync.share_tensors or self.recipe.from_data) and backend.adapter is None

    async def embedded_engine(self, backend: Backend | None = None) -> Engine:
        """Make the engine of this process, over the trainer's tensors if nothing trains while it
        generates, or over those that an adapter leaves as they are.
        """
        share = None
        if backend is not None and (self.shares_tensors(backend) or self.plan.sync.share_base):
            share = backend.module
        spec, tokenizer = engine_spec(self.plan, self.model_path), self.text.tokenizer
        return await make_engine(
            spec, tokenizer, self.device, barrier=self.barrier, share_with=share
        )

    @cached_property
    def raw_record(self) -> Record | None:
        """Make the copy of what workflows return, if the YAML wants one. Raises ValueError if it is
        another job's.
        """
        raw = make_raw_record(self.plan, self.folder)
        if raw is not None:
            self.keep(raw, "data_processor.experience_pipeline.input_save_path")
        return raw

    def pipeline(self) -> Pipeline:
        """Make the pipeline of operators, with a copy of its input if the YAML wants one."""
        raw = self.raw_record
        plan, most, resampling = self.plan, self.recipe.max_resample_times, None
        if most is not None and plan.mode == "both":
            rollouts = plan.steps.batch_size * plan.steps.repeat_times
            sizes = {"batch_size": plan.steps.train_batch_size, "rollouts": rollouts}
            resampling = Resampling(most, **sizes)
        return Pipeline(self.recipe, raw=raw, operators=self.operators, resampling=resampling)

    def copy(self, file: str, *, most: float = math.inf) -> None:
        """Write lines for people about data outside the store, if the YAML wants copies.

        One copy serves all explorers of the stage: each knows which lines are already there.
        """
        if file in self._copied:
            return
        self._copied.add(file)
        record = make_shown_record(self.plan, self.folder, file, most)
        if record is None:
            return
        if file == DATA_ROWS:
            record.rewind(self.resumed.step if self.resumed else 0)
        else:
            self._rewind(record)
        self.stream.subscribe(Copy(file, record))

    @contextmanager
    def exploring(self) -> Iterator[None]:
        """Set the environment of user code; processes that it leaves running are ended after the
        block.
        """

        def note(text: str) -> None:
            logger.info(text)
            self.emit(Noted(text))

        with environment(self.plan.config.explorer.env_vars), ending_leftovers(note):
            yield

    def keep(self, record: Record, key: str) -> None:
        """Close the record with the stage, and drop what a killed run wrote after its
        checkpoint. Raises ValueError if the copy that `key` names is another job's.
        """
        self.closing.callback(record.close)
        if self.plan.mode == "both":
            record.claim(self.folder.root, key=key, resumes=self.resumed is not None)
        self._rewind(record)

    def _rewind(self, record: Record) -> None:
        if self.plan.mode == "both":
            record.rewind(self.resumed.run_state["explorer"]["step"] if self.resumed else 0)

    def result(self) -> StageResult:
        """Make an empty result."""
        return StageResult(self.plan.stage_name, self.plan.mode, self.recipe.schema)


def _close(stream: Stream, error: BaseException | None) -> None:
    """End a stream with the error that ended the stage; a run that was stopped has none."""
    from trireme.trainer.trainer import Stopped

    stopped = isinstance(error, Stopped) or not isinstance(error, Exception)
    text = "" if error is None or stopped else hide_passwords(ending(error))
    stream.close(failed=error is not None, error=text)


@contextmanager
def open_stage(
    plan: Plan, model_path: str, device: Device, listener: Listener, *, alone: bool = False
) -> Iterator[Stage]:
    """Make the folder, open its log, and look for a checkpoint to resume from.

    `listener` hears all events. `alone`: this process is the run, or starts its others: no second
    one may train in the folder.
    """
    stage = Stage(plan, model_path, device)
    with stage.closing:
        stage.folder.make()
        if alone and stage.trains:
            stage.closing.enter_context(stage.folder.one_trainer())
        stage.closing.callback(setup_logging(stage.folder.log, plan.config.log.level))
        stage.closing.push(lambda kind, error, _: _close(stage.stream, error))
        stage.stream.subscribe(listener)
        own = [stage.folder.explorer_meta] if plan.mode == "both" else []
        stage.folder.make_way(*own)  # for an explorer alone, the meta is its state
        if stage.trains:
            stage.resumed = load_checkpoint(stage.folder, *own)
        yield stage
