"""Stage: opens one plan in one process: folder, log, checkpoint, and what both sides are made of.

Both sides of a run share it: the algorithm, tokenizer and chat template, the tasks, the operators
and the store between the two. Each is made when it is first needed, and only once. What a stage
holds open is closed when it ends, the last first, also where it could not be opened.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from trireme.algorithms.recipes import Recipe, get_recipe
from trireme.buffer.buffer import Buffer
from trireme.buffer.record import Record
from trireme.checkpoint.layout import JobFolder
from trireme.checkpoint.resume import Loaded, load_checkpoint
from trireme.config import Plan
from trireme.data.tasksets import Mixture, Taskset
from trireme.engines.device import Device, RolloutBarrier
from trireme.experience import Experience
from trireme.explorer.explorer import Evaluation
from trireme.launch import data
from trireme.launch.data import Text, make_text
from trireme.log import setup_logging
from trireme.pipeline.operators import Operator
from trireme.pipeline.pipeline import Pipeline
from trireme.pipeline.resampling import Resampling


class Console(Protocol):
    """Who hears what goes on: a terminal, the run's monitors, or a process that passes it on."""

    def note(self, text: str) -> None:
        """A lasting line."""
        ...

    def step(self, part: str, step: int, metrics: Mapping[str, float]) -> None:
        """A part has done a step."""
        ...

    def rollout(self, experience: Experience) -> None:
        """A rollout to look at."""
        ...


@dataclass
class StageResult:
    """What a stage, or one side of it, came to."""

    name: str | None
    mode: str
    schema: str
    first: Evaluation | None = None
    """Evaluation at the start, by taskset."""
    last: Evaluation | None = None
    """Evaluation at the end."""
    first_example: dict[str, Any] | None = None
    """The first held-out task in the evaluation at the start."""
    last_example: dict[str, Any] | None = None
    """The same one in the evaluation at the end."""
    steps: int = 0
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of exploring, training and evaluating."""
    model_dir: str | None = None
    warnings: list[dict[str, Any]] = field(default_factory=list)
    """What the watchdog has seen."""

    def add(self, side: StageResult) -> None:
        """What one side came to; of steps the last side's count."""
        self.first, self.last = side.first or self.first, side.last or self.last
        self.first_example = side.first_example or self.first_example
        self.last_example = side.last_example or self.last_example
        self.steps, self.phases = side.steps, self.phases | side.phases
        self.model_dir = side.model_dir or self.model_dir


class Stage:
    """One open plan. `open_stage` makes it."""

    def __init__(self, plan: Plan, model_path: str, device: Device, console: Console) -> None:
        """`model_path` is the plan's, or the last stage's model."""
        self.plan = plan
        self.model_path = model_path
        self.device = device
        self.console = console
        self.folder = JobFolder(plan.job_dir, plan.explorer_name)
        self.resumed: Loaded | None = None
        self.held = ExitStack()
        """What is closed at the end, the last first."""
        self._shown: dict[str, Record | None] = {}

    @property
    def trains(self) -> bool:
        """Whether the plan has a trainer."""
        return self.plan.mode in ("both", "train")

    @property
    def reads_file(self) -> bool:
        """Whether the trainer reads a data set by itself."""
        return self.plan.buffer_type == "file"

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
        buffer, record = data.make_buffer(
            self.plan, self.folder, self.text, schema=self.recipe.schema, end_ids=ends
        )
        if record is not None:
            self.keep(record)
        if self.resumed is not None:
            buffer.load_state(self.resumed.run_state["buffer"])
        return buffer

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

    def shown_record(self, name: str, *, most: float = math.inf) -> Record | None:
        """Lines of what is not trained, for people, where the YAML wants copies.

        One for all explorers of the stage: each knows which lines are there already.
        """
        if name not in self._shown:
            record = self._shown[name] = data.make_shown_record(self.plan, self.folder, name, most)
            if record is not None:
                self.keep(record)
        return self._shown[name]

    def keep(self, record: Record) -> None:
        """Close it with the stage; what a killed run wrote after its checkpoint goes."""
        self.held.callback(record.close)
        if self.plan.mode == "both":
            record.rewind(self.resumed.run_state["explorer"]["step"] if self.resumed else 0)

    def result(self) -> StageResult:
        """Nothing yet."""
        return StageResult(self.plan.stage_name, self.plan.mode, self.recipe.schema)


@contextmanager
def open_stage(
    plan: Plan, model_path: str, device: Device, console: Console, *, alone: bool = False
) -> Iterator[Stage]:
    """Make the folder, open its log, and look for a checkpoint to go on from.

    `alone`: this process is the run, or starts its others: no second one may train in the folder.
    """
    stage = Stage(plan, model_path, device, console)
    with stage.held:
        stage.folder.make()
        if alone and stage.trains:
            stage.held.enter_context(stage.folder.one_trainer())
        stage.held.callback(setup_logging(stage.folder.log, plan.config.log.level))
        os.environ.update(plan.config.explorer.env_vars)
        if stage.trains:
            stage.resumed = load_checkpoint(stage.folder)
        yield stage
