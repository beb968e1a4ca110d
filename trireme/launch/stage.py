"""Stage: opens one plan in one process: folder, log, checkpoint, and what both sides are made of.

Both sides of a run share it: the algorithm, tokenizer and chat template, the tasks, the operators
and the store between the two. Each is made when it is first needed, and only once. What a stage
holds open is closed when it ends, the last first, also where it could not be opened.

The process that is the run, or starts its others, opens it with `open_run`: the stage is validated,
and its stream of events has `metrics.jsonl` and the listeners that manifests name, which begin
where the checkpoint does.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trireme.algorithms.recipes import Recipe, get_recipe
from trireme.buffer.buffer import Buffer, InMemory
from trireme.buffer.record import Record, data_lines
from trireme.checkpoint.layout import DATA_ROWS, EVALUATED, FAILED, JobFolder
from trireme.checkpoint.manifest import Loaded, load_checkpoint
from trireme.config import ConfigError, Plan, Problem
from trireme.config.lookup import model_config
from trireme.data.tasksets import Mixture, Taskset
from trireme.engines.device import Device, RolloutBarrier
from trireme.engines.engine import Engine
from trireme.engines.make import make_engine
from trireme.explorer.explorer import explorer_state
from trireme.files import read_json
from trireme.launch import data
from trireme.launch.data import Text, examine_taskset, make_text
from trireme.launch.engines import engine_spec, examine_auxiliary
from trireme.launch.listeners import RunListener, listener_named
from trireme.launch.results import StageResult
from trireme.log import get_logger, setup_logging
from trireme.monitor.events import (
    Emit,
    Ended,
    Evaluated,
    Event,
    Failures,
    Listener,
    Noted,
    Stream,
    Trained,
)
from trireme.monitor.monitor import JsonLinesMonitor
from trireme.pipeline.operators import Operator
from trireme.pipeline.pipeline import Pipeline, Resampling
from trireme.processes import ending_leftovers, environment
from trireme.registry import LISTENERS

if TYPE_CHECKING:
    from trireme.trainer.backend import Backend

logger = get_logger("launcher")

_SHAPE = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings",
)  # fmt: skip
"""Keys of a model's config.json without which weights mean nothing."""


class Copy:
    """A listener that keeps lines for people: of evaluations, failures or a data set's rows."""

    def __init__(self, file: str, record: Record) -> None:
        """`file` says which of them."""
        self.name = f"the copy buffer/{file}"
        self._file, self._record = file, record

    def hear(self, event: Event) -> None:
        """See Listener."""
        match event:
            case Evaluated() if self._file == EVALUATED:
                self._record.write_soon(event.rollouts)
            case Failures() if self._file == FAILED:
                self._record.write_lines(event.lines)
            case Trained() if self._file == DATA_ROWS:
                self._record.write_lines(data_lines(event.step, event.experiences))
            case Ended():
                self._record.close()


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
        self.resumed: Loaded | None = None
        self.held = ExitStack()
        """What is closed at the end, the last first."""
        self._copied: set[str] = set()

    @property
    def trains(self) -> bool:
        """Whether the plan has a trainer."""
        return self.plan.mode in ("both", "train")

    @property
    def reads_file(self) -> bool:
        """Whether the trainer reads a data set by itself."""
        return self.plan.buffer_type == "file"

    @property
    def part(self) -> str | None:
        """The one part of the run that this command has, explorer or trainer; None: all of it."""
        if self.plan.mode == "explore":
            return "explorer"
        return "trainer" if self.plan.mode == "train" and not self.reads_file else None

    @cached_property
    def explored(self) -> dict[str, Any] | None:
        """Where the explorer stood when the run last ended; None: it begins."""
        plan = self.plan
        if plan.mode == "explore":
            state_file = self.folder.state_of(plan.config.explorer.name)
            return explorer_state(state_file) if os.path.lexists(state_file) else None
        return self.resumed.run_state.get("explorer") if self.resumed else None

    @property
    def goes_on(self) -> bool:
        """Whether an earlier start has left something that this one goes on from."""
        return self.resumed is not None or self.explored is not None

    @property
    def steps_that_count(self) -> dict[str, int]:
        """The last step that does not come anew, of each part whose later steps do."""
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
        """Whether a supervised stage evaluates first: the model is as the user gave it."""
        fresh = self.plan.model_from_stage is None and self.resumed is None
        return fresh and self.plan.config.explorer.eval_on_startup

    @cached_property
    def recipe(self) -> Recipe:
        """The algorithm."""
        return get_recipe(self.plan.config.algorithm)

    @cached_property
    def text(self) -> Text:
        """Tokenizer and chat template."""
        return make_text(self.plan, self.model_path)

    @cached_property
    def barrier(self) -> RolloutBarrier | None:
        """Deterministic mode's."""
        return RolloutBarrier() if self.plan.deterministic else None

    @cached_property
    def taskset(self) -> Taskset | Mixture | None:
        """The tasks to explore."""
        return data.make_training_taskset(self.plan)

    @cached_property
    def eval_tasksets(self) -> list[Taskset]:
        """The tasks that measure."""
        return data.make_eval_tasksets(self.plan)

    @cached_property
    def operators(self) -> list[Operator]:
        """What is done to a step's experiences before they are trained."""
        return data.make_operators(self.plan)

    @cached_property
    def buffer(self) -> Buffer:
        """The store between the two sides, where the checkpoint left it."""
        ends = data.end_ids_of(self.model_path, self.text) if self.reads_file else ()
        buffer = data.make_buffer(
            self.plan, self.folder, self.text, schema=self.recipe.schema, end_ids=ends
        )
        if isinstance(buffer, InMemory) and buffer.record is not None:
            self.keep(buffer.record)
        if self.resumed is not None:
            buffer.load_state(self.resumed.run_state["buffer"])
        return buffer

    def shares_tensors(self, backend: Backend) -> bool:
        """Whether an engine of this process may read the trainer's tensors: nothing trains while
        it generates.
        """
        return (self.plan.share_tensors or self.recipe.from_data) and backend.adapter is None

    async def embedded_engine(self, backend: Backend | None = None) -> Engine:
        """The engine of this process, over the trainer's tensors where nothing trains meanwhile."""
        share = backend.module if backend is not None and self.shares_tensors(backend) else None
        spec, tokenizer = engine_spec(self.plan, self.model_path), self.text.tokenizer
        return await make_engine(
            spec, tokenizer, self.device, barrier=self.barrier, share_with=share
        )

    def pipeline(self) -> Pipeline:
        """The operators, with the copy of what comes in where the YAML wants one."""
        raw = data.make_raw_record(self.plan, self.folder)
        if raw is not None:
            self.keep(raw)
        plan, most, resampling = self.plan, self.recipe.max_resample_times, None
        if most is not None and plan.mode == "both":
            rollouts = plan.batch_size * plan.config.algorithm.repeat_times
            sizes = {"batch_size": plan.train_batch_size, "rollouts": rollouts}
            resampling = Resampling(most, **sizes)
        return Pipeline(self.recipe, raw=raw, operators=self.operators, resampling=resampling)

    def copy(self, file: str, *, most: float = math.inf) -> None:
        """Keep lines of what is not in the store, for people, where the YAML wants copies.

        One for all explorers of the stage: each knows which lines are there already.
        """
        if file in self._copied:
            return
        self._copied.add(file)
        record = data.make_shown_record(self.plan, self.folder, file, most)
        if record is None:
            return
        if file == DATA_ROWS:
            record.rewind(self.resumed.step if self.resumed else 0)
        else:
            self._rewind(record)
        self.stream.subscribe(Copy(file, record))

    @contextmanager
    def exploring(self) -> Iterator[None]:
        """Users' code has its environment; what it leaves running is ended after the block."""

        def note(text: str) -> None:
            logger.info(text)
            self.emit(Noted(text))

        with environment(self.plan.config.explorer.env_vars), ending_leftovers(note):
            yield

    def keep(self, record: Record) -> None:
        """Close it with the stage; what a killed run wrote after its checkpoint goes."""
        self.held.callback(record.close)
        self._rewind(record)

    def _rewind(self, record: Record) -> None:
        if self.plan.mode == "both":
            record.rewind(self.resumed.run_state["explorer"]["step"] if self.resumed else 0)

    def result(self) -> StageResult:
        """Nothing yet."""
        return StageResult(self.plan.stage_name, self.plan.mode, self.recipe.schema)


@contextmanager
def open_stage(
    plan: Plan, model_path: str, device: Device, listener: Listener, *, alone: bool = False
) -> Iterator[Stage]:
    """Make the folder, open its log, and look for a checkpoint to go on from.

    `listener` hears all events. `alone`: this process is the run, or starts its others: no second
    one may train in the folder.
    """
    stage = Stage(plan, model_path, device)
    with stage.held:
        stage.folder.make()
        if alone and stage.trains:
            stage.held.enter_context(stage.folder.one_trainer())
        stage.held.callback(setup_logging(stage.folder.log, plan.config.log.level))
        stage.held.push(lambda kind, *_: stage.stream.close(failed=kind is not None))
        stage.stream.subscribe(listener)
        own = [stage.folder.explorer_meta] if plan.mode == "both" else []
        stage.folder.make_way(*own)  # the meta of an explorer alone is its state
        if stage.trains:
            stage.resumed = load_checkpoint(stage.folder)
        yield stage


@contextmanager
def open_run(
    plan: Plan, model_path: str, device: Device, console: Listener
) -> Iterator[tuple[Stage, Sequence[RunListener]]]:
    """A stage that is a run of its own: checked, with `metrics.jsonl` and all that follow a run.

    Raises ConfigError for a run that cannot be.
    """
    with open_stage(plan, model_path, device, console, alone=True) as stage:
        for note in plan.notes:
            logger.info(note)
        _validate(stage)
        following = [listener_named(name) for name in LISTENERS]
        _refuse_other_model(stage)
        for one in following:
            one.begin(stage)
        metrics = JsonLinesMonitor(stage.folder.monitor)
        metrics.keep_until(stage.steps_that_count)
        stage.stream.subscribe(metrics)
        if stage.resumed is not None:
            logger.info(line := f"resuming from {stage.folder.step_dir(stage.resumed.step)}")
            stage.emit(Noted(line))
        for one in following:
            one.listen(stage)
        yield stage, following


def _validate(stage: Stage) -> None:
    """Raise ConfigError for parts and options that cannot be, before a model is loaded."""
    newest = stage.plan.config.explorer.bench_on_latest_checkpoint
    try:
        if stage.plan.mode == "bench" and newest and not stage.folder.steps():
            raise ValueError(f"mode bench: there is no checkpoint in {stage.folder.root}")
        _ = stage.operators  # made now, and used by the run
        with environment(stage.plan.config.explorer.env_vars):
            examine_auxiliary(stage.plan, teacher=stage.recipe.needs_teacher)
            for taskset in (stage.taskset, *stage.eval_tasksets):
                if taskset is not None:
                    recipe = stage.recipe
                    examine_taskset(
                        taskset,
                        stage.plan,
                        greedy_run=recipe.greedy_run,
                        rewards_teach=recipe.rewards_teach,
                    )
        if stage.reads_file:  # a malformed row is named now
            _ = stage.buffer
    except (ValueError, ImportError) as error:
        raise ConfigError([Problem("", str(error))]) from error


def refused(text: str) -> ConfigError:
    """A resume that cannot be, and what makes it one that can."""
    expected = "expected as it was, or another name (or continue_from_checkpoint: false)"
    return ConfigError([Problem("", f"{text}; {expected}")])


def _refuse_other_model(stage: Stage) -> None:
    """Raise ConfigError where the checkpoint is of another model than the YAML names."""
    if stage.resumed is None:
        return
    folder, step, model_path = stage.folder, stage.resumed.step, stage.model_path
    other = _other_shape(folder.hf_dir(step) / "config.json", model_path)
    if other is not None:
        key, was, now = other
        raise refused(
            f"model.model_path is {model_path}, whose {key} is {now}, and the checkpoint "
            f"{folder.step_dir(step)} has {was}"
        )
    if stage.recipe.needs_critic and not folder.critic_dir(step).is_dir():
        learner = stage.plan.config.algorithm.algorithm_type
        raise refused(
            f"algorithm.algorithm_type is {learner}, which learns a value model, and the "
            f"checkpoint {folder.step_dir(step)} has none"
        )


def _other_shape(saved: Path, model_path: str) -> tuple[str, Any, Any] | None:
    """The first key in which a model's configuration differs from the checkpoint's."""
    now = model_config(model_path)
    if not now or not saved.is_file():
        return None
    was = read_json(saved)
    differ = (key for key in _SHAPE if was.get(key) != now.get(key))
    key = next(differ, None)
    return None if key is None else (key, was.get(key), now.get(key))
