"""Taskset: chooses the tasks of the next explore step.

Invariants:
- Batches span the borders of epochs; the last rows that fill no training batch are left out, those
  of an evaluation are used.
- `state` holds the numbers of steps and of rows used, and the selector's own state: a resume
  continues with exactly the next ones, also in batches of another size.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trireme.config.schema_rollout import DataSelectorConfig
from trireme.data.rows import Rows, usual
from trireme.data.selectors import RowOrder, class_of, selection
from trireme.task import Task
from trireme.usercode import UserCode

PassRates = Mapping[int, Mapping[int, float]]
"""Maps taskset -> row -> pass rate, 0 to 1."""

_OWN = ("workflow_key", "reward_fn_key")


class Exhausted(Exception):
    """A taskset has no more tasks: the end of exploring, not a failure."""


_ANSWERS = ("response", "solution")
"""The default columns of answers: no user has chosen them."""


@dataclass(frozen=True)
class TasksetSettings:
    """The settings of a taskset: its batches, and what each of its tasks carries."""

    name: str
    batch_size: int
    total_epochs: int = 1
    """Passes over the rows; an evaluation makes one."""
    total_steps: int | None = None
    """Explore steps, in place of `total_epochs`."""
    workflow: Any = None
    workflow_args: Mapping[str, Any] = field(default_factory=dict)
    reward_fn: Any = None
    reward_fn_args: Mapping[str, Any] = field(default_factory=dict)
    format_args: Mapping[str, Any] = field(default_factory=dict)
    """The fields of the YAML's `format`."""
    rollout_args: Mapping[str, Any] = field(default_factory=dict)
    repeat_times: int = 1
    selector: DataSelectorConfig = field(default_factory=DataSelectorConfig)
    is_eval: bool = False
    taskset_id: int = 0
    reads_prompt: bool = True
    """Whether the workflow reads the columns that `format_args` name, so that a row without the
    answer, or without the default column `prompt` if none is named, is refused."""


class Taskset:
    """Turns rows into tasks, a batch at a time."""

    def __init__(self, rows: Rows, settings: TasksetSettings) -> None:
        """Raises ValueError if a column is missing or if there is not a single step."""
        self.name = settings.name
        self.rows = rows
        self.batch_size = settings.batch_size
        self.repeat_times = settings.repeat_times
        self.is_eval = settings.is_eval
        self.taskset_id = settings.taskset_id
        self._settings = settings
        self._format = settings.format_args
        self._reads_prompt = settings.reads_prompt
        self._selection = selection(
            settings.selector,
            len(rows),
            features=_features(rows, settings.selector.feature_keys),
            data=rows,
        )
        self._position = 0
        self._step = 0
        self._check_columns()
        self.total_steps = self._count_steps(settings.total_epochs, settings.total_steps)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    @property
    def steps_per_epoch(self) -> float:
        """The number of explore steps in one pass over the rows; seldom a whole number."""
        return len(self.rows) / self.batch_size

    def next(self) -> list[Task]:
        """Return the tasks of the next explore step. Raises Exhausted after the last."""
        size, epochs = self.batch_size, self._settings.total_epochs
        if self.is_eval:
            size = min(size, len(self.rows) - self._position)
        if size == 0 or is_over(
            self._step, self._settings.total_steps, self._position + size, len(self.rows) * epochs
        ):
            raise Exhausted(f"taskset '{self.name}' has no more tasks after step {self._step}")
        self._step += 1
        return [self.task(self._step, index, row) for index, row in enumerate(self.draw(size))]

    def draw(self, count: int) -> list[int]:
        """Return the next rows in the selector's order. Raises ValueError if it gives others than
        there are.
        """
        with UserCode(f"the data selector of taskset '{self.name}'", self._selection):
            chosen = [int(row) for row in self._selection.select(count)]
        if len(chosen) != count or any(not 0 <= row < len(self.rows) for row in chosen):
            raise ValueError(
                f"taskset '{self.name}': its data_selector gave the rows {chosen!r:.60}: expected "
                f"{count} of 0 to {len(self.rows) - 1}"
            )
        self._position += count
        return chosen

    def all(self) -> list[Task]:
        """Return every row once, in file order, without advancing. For evaluation."""
        return [self.task(0, row, row) for row in range(len(self.rows))]

    def kinds(self) -> list[Task]:
        """Return one task of each pair of a workflow and a reward in the rows."""
        if not any(self._format.get(key) for key in _OWN):
            return [self.task(0, 0, 0)]
        first: dict[str, int] = {}
        for index, row in enumerate(self.rows):
            first.setdefault(repr([row.get(str(self._format.get(key))) for key in _OWN]), index)
        return [self.task(0, index, index) for index in first.values()]

    @property
    def sizes(self) -> dict[int, int]:
        """Return its id and number of rows."""
        return {self.taskset_id: len(self.rows)}

    @property
    def learns(self) -> bool:
        """True if the selected rows depend on `feedback`."""
        return not isinstance(self._selection, RowOrder)

    def feedback(self, rates: PassRates) -> None:
        """Update the selector with its rows' pass rates; other tasksets' are ignored."""
        with UserCode(f"the data selector of taskset '{self.name}'", self._selection):
            self._selection.feedback(rates.get(self.taskset_id, {}))

    def state(self) -> dict[str, Any]:
        """Return the position: `current_index`, the rows handed out, and in how many steps; class
        and state of a `selector` that learns.
        """
        state: dict[str, Any] = {"current_index": self._position, "step": self._step}
        if self.learns:  # a user's selector may go on to change what it returned
            state["selector"] = copy.deepcopy(self._selection.state())
            state["selector_class"] = class_of(self._selection)
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned. Raises ValueError for that of several tasksets, or of
        another selector.
        """
        if "tasksets" in state:
            raise ValueError(
                f"buffer.explorer_input.taskset is one, '{self.name}', and the checkpoint has the "
                f"state of {len(state['tasksets'])}: a resumed run needs the same"
            )
        self._position = int(state["current_index"])
        # earlier versions had rows alone
        self._step = int(state.get("step", math.ceil(self._position / self.batch_size)))
        if not self.learns:  # an order of rows needs only the number that were handed out
            self._selection.load_state(state)
            return
        now = class_of(self._selection)
        was = state.get("selector_class", now)  # earlier versions did not note it
        if was != now or "selector" not in state:
            has = f"that of {was}" if was != now else "none"
            raise ValueError(
                f"taskset '{self.name}': its data_selector is {now}, which resumes from a state of "
                f"its own, and the checkpoint has {has}: expected the former data_selector, or "
                "another name (or continue_from_checkpoint: false)"
            )
        with UserCode(f"the data selector of taskset '{self.name}'", self._selection):
            self._selection.load_state(state["selector"])

    def task(self, step: int, task_id: int, row_index: int) -> Task:
        """Make a row into a task of an explore step."""
        row = self.rows[row_index]
        settings = self._settings
        return Task(
            raw_task=row,
            workflow=self._own(row, "workflow_key", settings.workflow),
            reward_fn=self._own(row, "reward_fn_key", settings.reward_fn),
            repeat_times=self.repeat_times,
            format_args=self._format,
            is_eval=self.is_eval,
            batch_id=step,
            task_id=task_id,
            index={"index": row_index, "taskset_id": self.taskset_id},
            # each task has separate dictionaries: a workflow may write into them
            rollout_args=copy.deepcopy(dict(settings.rollout_args)),
            workflow_args=copy.deepcopy(dict(settings.workflow_args)),
            reward_fn_args=copy.deepcopy(dict(settings.reward_fn_args)),
        )

    def _own(self, row: dict[str, Any], key: str, default: Any) -> Any:
        """Return the row's own workflow or reward if the format names a column and it has a
        value.
        """
        column = self._format.get(key)
        return (row.get(column) if column else None) or default

    def sources(self, task: Task) -> dict[str, str]:
        """Return where the task's row names its own workflow and reward: keys of the format, each
        with its column and the row.
        """
        return {
            key: f"format.{key} ({column}, row {task.index['index']})"
            for key in _OWN
            if (column := self._format.get(key)) and task.raw_task.get(column)
        }

    def _check_columns(self) -> None:
        for key in ("prompt_key", "response_key", "system_prompt_key", "image_key", *_OWN):
            column = self._format.get(key, "prompt" if key == "prompt_key" else None)
            if key == "prompt_key" and not self._reads_prompt and column not in self.rows.columns:
                column = None if column == "prompt" else column
            # a data set need not have answers: only a column that the user chose must exist
            of_answer = key == "response_key"
            optional = of_answer and (column in _ANSWERS or not self._reads_prompt)
            if column and not optional:
                self.rows.require(column, f"format.{key}", entries=of_answer)
            if column and key == "prompt_key":
                self.rows.require_values(column, f"format.{key}")

    def notes(self) -> list[str]:
        """Describe columns that are probably not what was meant: empty prompts, missing answers."""
        prompt = str(self._format.get("prompt_key", "prompt"))
        notes = [self._answers_note(prompt)]
        if (
            self._reads_prompt
            and prompt in self.rows.columns
            and (empty := self.rows.blank(prompt))
        ):
            notes.append(
                f"{self.name}: {self._some(empty)} an empty '{prompt}' (format.prompt_key), so "
                f"that nothing is asked; the first: {self.rows.where(empty[0])}"
            )
        return [note for note in notes if note]

    def _some(self, rows: Sequence[int]) -> str:
        return f"{len(rows)} of {len(self.rows)} rows " + ("has" if len(rows) == 1 else "have")

    def _answers_note(self, prompt: str) -> str | None:
        column = str(self._format.get("response_key", _ANSWERS[0]))
        mixed = any(self._format.get(key) for key in _OWN)  # rows of some kinds may need none
        if not self._reads_prompt or mixed:
            return None
        if column not in self.rows.columns:
            near = usual("response_key", self.rows.columns)
            return near and (
                f"{self.name}: task.truth is None, since no column is '{column}' "
                f"(format.response_key); if a reward reads it, did you mean '{near}'?"
            )
        if column == prompt:
            return (
                f"{self.name}: format.response_key and format.prompt_key are both '{column}', so "
                "that task.truth is the prompt"
            )
        if len(self.rows) and (note := self._entry_note(column, self.rows[0].get(column))):
            return note
        lacking = sorted({*self.rows.without(column), *self.rows.blank(column)})
        if not lacking or len(lacking) == len(self.rows):
            return None
        of = f"{len(lacking)} of {len(self.rows)} rows"
        return (
            f"{self.name}: {of} hold nothing in '{column}' (format.response_key), so that their "
            f"task.truth is None or empty; the first: {self.rows.where(lacking[0])}"
        )

    def _entry_note(self, column: str, first: Any) -> str | None:
        """Name the entry that a dictionary in place of a right answer has for it."""
        if not isinstance(first, Mapping):
            return None
        texts = [name for name in first if isinstance(first[name], str | int | float)]
        near = next((name for name in texts if "truth" in name), usual("response_key", texts))
        return near and (
            f"{self.name}: task.truth is a dictionary with {', '.join(map(str, first))} "
            f"(format.response_key); if a reward reads text, did you mean '{column}.{near}'?"
        )

    def _count_steps(self, total_epochs: int, total_steps: int | None) -> int:
        if self.is_eval:
            return math.ceil(len(self.rows) / self.batch_size)
        source = f"{self.rows.source} has {len(self.rows)} rows"
        return count_steps(source, len(self.rows), self.batch_size, total_epochs, total_steps)


def count_steps(
    source: str, rows: int, batch_size: int, total_epochs: int, total_steps: int | None
) -> int:
    """Return the explore steps of training. Raises ValueError, beginning with `source`, if there
    are none.
    """
    if total_steps is not None:
        return total_steps
    steps = rows * total_epochs // batch_size
    if steps == 0:
        epochs = "1 epoch" if total_epochs == 1 else f"{total_epochs} epochs"
        raise ValueError(
            f"{source}: in {epochs} that is not one batch of buffer.batch_size {batch_size}: set "
            f"it to at most {rows * total_epochs}, or give more epochs"
        )
    return steps


def is_over(step: int, total_steps: int | None, rows: int, most: int) -> bool:
    """Return whether no step follows: by the number of steps, if that is given, else by the rows
    handed out with another one. A resumed run may have another batch size.
    """
    return rows > most if total_steps is None else step >= total_steps


def check_task(row: Mapping[str, Any], prompt_key: str | None, feature_keys: Sequence[str]) -> None:
    """Raise ValueError if a row has no prompt, or lacks a number that a selector needs."""
    if prompt_key is not None and row.get(prompt_key) is None:
        raise ValueError(f"the column '{prompt_key}' (format.prompt_key) is empty")
    for key in feature_keys:
        _number(row, key)


def _number(row: Mapping[str, Any], key: str) -> float:
    value = row.get(key)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(
            f"the column '{key}' (data_selector.feature_keys) holds {value!r:.60}: expected a "
            "number"
        )
    return float(value)


def _features(rows: Rows, keys: Sequence[str]) -> list[tuple[float, ...]]:
    """Return the numbers of each row; none without keys. Raises ValueError naming a row without
    one.
    """
    for key in keys:
        rows.require(key, "data_selector.feature_keys")
    features: list[tuple[float, ...]] = []
    if keys:
        rows.checked(lambda row: features.append(tuple(_number(row, key) for key in keys)), "fail")
    return features


class Mixture:
    """Several tasksets as one, a mixed batch at a time. It has the methods of a Taskset."""

    def __init__(
        self,
        tasksets: Sequence[Taskset],
        *,
        batch_size: int,
        total_epochs: int = 1,
        total_steps: int | None = None,
    ) -> None:
        """Raises ValueError if all rows together are fewer than one step."""
        self.tasksets = list(tasksets)
        self.name = "+".join(taskset.name for taskset in tasksets)
        self.batch_size = batch_size
        self._size = sum(len(taskset) for taskset in tasksets)
        source = f"the tasksets {self.name} have {self._size} rows"
        self.total_steps = count_steps(source, self._size, batch_size, total_epochs, total_steps)
        self._given_steps, self._most = total_steps, self._size * total_epochs
        self._step = 0
        self._position = 0
        self._epoch = -1
        self._order: list[int] = []

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._size

    def next(self) -> list[Task]:
        """Return the tasks of the next explore step. Raises Exhausted after the last."""
        first, after = self._position, self._position + self.batch_size
        if is_over(self._step, self._given_steps, after, self._most):
            raise Exhausted(f"tasksets '{self.name}' have no more tasks after step {self._step}")
        chosen = [self._taskset_at(position) for position in range(first, after)]
        drawn = {i: iter(self.tasksets[i].draw(n)) for i, n in Counter(chosen).items()}
        self._step, self._position = self._step + 1, after
        return [
            self.tasksets[i].task(self._step, offset, next(drawn[i]))
            for offset, i in enumerate(chosen)
        ]

    def all(self) -> list[Task]:
        """Return every row of each taskset once, without advancing."""
        return [task for taskset in self.tasksets for task in taskset.all()]

    def kinds(self) -> list[Task]:
        """Return the kinds of all the tasksets, one after another."""
        return [task for taskset in self.tasksets for task in taskset.kinds()]

    @property
    def sizes(self) -> dict[int, int]:
        """Return the number of rows of each taskset, by its id."""
        return {taskset.taskset_id: len(taskset) for taskset in self.tasksets}

    @property
    def learns(self) -> bool:
        """True if the selected rows of one taskset depend on `feedback`."""
        return any(taskset.learns for taskset in self.tasksets)

    def feedback(self, rates: PassRates) -> None:
        """Pass the pass rates on to their tasksets."""
        for taskset in self.tasksets:
            taskset.feedback(rates)

    def state(self) -> dict[str, Any]:
        """Return the position: steps, and each taskset's own state."""
        return {"step": self._step, "tasksets": [taskset.state() for taskset in self.tasksets]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned. Raises ValueError for another number of tasksets."""
        states = state.get("tasksets", [state])
        if len(states) != len(self.tasksets):
            raise ValueError(
                f"buffer.explorer_input.tasksets are {len(self.tasksets)} and the checkpoint has "
                f"the state of {len(states)}: a resumed run needs the same"
            )
        self._step = int(state["step"])
        for taskset, taskset_state in zip(self.tasksets, states, strict=True):
            taskset.load_state(taskset_state)
        self._position = sum(int(taskset_state["current_index"]) for taskset_state in states)

    def _taskset_at(self, position: int) -> int:
        import numpy as np

        epoch, index = divmod(position, self._size)
        if epoch != self._epoch:
            order = np.repeat(np.arange(len(self.tasksets)), [len(t) for t in self.tasksets])
            np.random.default_rng(epoch).shuffle(order)
            self._epoch, self._order = epoch, order.tolist()
        return self._order[index]
