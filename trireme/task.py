"""Task: one row of a taskset, with everything that a workflow needs to run it."""

from __future__ import annotations

import json
import math
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from dataclasses import dataclass, field, replace
from typing import Any, Self

import yaml
from yaml.representer import SafeRepresenter

from trireme.pictures import IMAGES
from trireme.registry import did_you_mean
from trireme.text import as_json, from_json
from trireme.usercode import Refused

SHOWN_TEXT, SHOWN_ROW = 2_000, 8_000
"""Characters of one value, and of all values of a row, that records of rollouts contain."""
NO_JSON = (ValueError, RecursionError)
"""The errors of `json.loads` for a text that is not JSON, or is nested too deeply."""


class NoSuchKey(Refused, KeyError):
    """A key that a section or a row does not have, as a sentence; a KeyError prints its repr."""

    __str__ = Exception.__str__


class Keys(dict[str, Any]):
    """A dictionary whose error for a missing key lists the present ones."""

    _name = "a section"
    """Its name in the YAML. An object has its own."""

    @classmethod
    def named(cls, name: str, values: dict[str, Any]) -> Self:
        """Return a copy of `values` with this name."""
        keys = cls(values)
        vars(keys)["_name"] = name
        return keys

    def __missing__(self, key: str) -> Any:
        raise NoSuchKey(self._lacks(key))

    def _lacks(self, key: str) -> str:
        hint = did_you_mean(str(key), map(str, self), " (did you mean '{}'?)")
        return f"{self._name} has no '{key}'{hint}: it has {', '.join(map(str, self)) or 'no keys'}"


class Args(Keys):
    """A section of the YAML whose keys are attributes too: `args["n"]`, `args.n`, `**args`."""

    def __getattr__(self, key: str) -> Any:
        if key in self:
            return self[key]
        raise AttributeError(self._lacks(key))

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value


class WatchedKeys(Keys):
    """A dictionary that notes which keys it was asked for, so that one that has no effect can be
    reported. Whoever takes all keys at once may read each. Copies by `named` note together.
    """

    _asked: set[str]

    @classmethod
    def named(cls, name: str, values: dict[str, Any]) -> Self:
        """Return a copy of `values` with this name."""
        keys = super().named(name, dict(dict.items(values)))
        vars(keys)["_asked"] = vars(values)["_asked"] if isinstance(values, cls) else set()
        return keys

    @property
    def asked(self) -> frozenset[str]:
        """The keys that it was asked for, those included that it does not have."""
        return frozenset(self._asked)

    def _all(self) -> Self:
        self._asked.update(dict.keys(self))
        return self

    def __getitem__(self, key: str) -> Any:
        self._asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, else `default`."""
        self._asked.add(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        """Remove a key and return its value, else `default`."""
        self._asked.add(key)
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, which is set to `default` if it has none."""
        self._asked.add(key)
        return super().setdefault(key, default)

    # `**section` and `dict(section)` go through a subclass that defines `__iter__` by these
    def __iter__(self) -> Iterator[str]:
        return super(WatchedKeys, self._all()).__iter__()

    def keys(self) -> KeysView[str]:
        """Return all keys."""
        return super(WatchedKeys, self._all()).keys()

    def items(self) -> ItemsView[str, Any]:
        """Return all keys with their values."""
        return super(WatchedKeys, self._all()).items()

    def values(self) -> ValuesView[Any]:
        """Return all values."""
        return super(WatchedKeys, self._all()).values()

    def copy(self) -> dict[str, Any]:
        """Return all keys and values, unwatched."""
        return dict(self.items())

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).named, (self._name, dict(self.items()))


_KINDS = {
    **{"raw_task": Keys, "format_args": Args, "rollout_args": Args},
    **{"workflow_args": WatchedKeys, "reward_fn_args": Keys},
}
"""The class of each dictionary of a task."""

for _dumper in (yaml.SafeDumper, yaml.Dumper):  # YAML's dumpers know `dict`, but no subclass of it
    for _kind in (Keys, Args, WatchedKeys):
        _dumper.add_representer(_kind, SafeRepresenter.represent_dict)


@dataclass
class Task:
    """The task that a workflow receives. `repeat_times` rollouts of it form a group.

    `raw_task` is the data set's row, all columns as they were read. A column whose name means
    nothing else here is also an attribute: `task.level`. `format_args`, `rollout_args`,
    `workflow_args` and `reward_fn_args` are the dictionaries of the YAML, defaults filled in; the
    first two give their keys as attributes too.
    """

    raw_task: dict[str, Any] = field(default_factory=dict)
    workflow: Any = None
    reward_fn: Any = None
    repeat_times: int = 1
    format_args: Any = field(default_factory=dict)
    rollout_args: Any = field(default_factory=dict)
    workflow_args: dict[str, Any] = field(default_factory=dict)
    reward_fn_args: dict[str, Any] = field(default_factory=dict)
    is_eval: bool = False
    batch_id: int | str = 0
    task_id: int | str = 0
    index: dict[str, int] = field(default_factory=dict)
    num_explore_steps: int | None = None
    """Those of the run, if their number is known."""

    def __post_init__(self) -> None:
        """Copy the sections of the YAML: values that a workflow sets in a task's stay there."""
        for name, kind in _KINDS.items():
            if isinstance(values := getattr(self, name), dict):
                called = "the row" if name == "raw_task" else name
                setattr(self, name, kind.named(called, values))

    def __getattr__(self, name: str) -> Any:
        row = self.__dict__.get("raw_task") or {}  # empty while a copy is being made
        if name in row:
            return row[name]
        raise AttributeError(f"a task has no '{name}'; the columns of its row: {', '.join(row)}")

    def _format(self, key: str, default: Any = None) -> Any:
        args = self.format_args
        return args.get(key, default) if isinstance(args, dict) else getattr(args, key, default)

    @property
    def prompt_key(self) -> str:
        """The column of the prompt."""
        return self._format("prompt_key", "prompt")

    @property
    def prompt(self) -> Any:
        """The value of the column that `format.prompt_key` names: text, or a list of messages."""
        return self.raw_task.get(self.prompt_key)

    @property
    def image_key(self) -> str | None:
        """The column of the row's pictures; None: `images` or `image`, if there is one."""
        return self._format("image_key")

    @property
    def truth_key(self) -> str:
        """The column of the right answer."""
        return self._format("response_key", "response")

    @property
    def truth(self) -> Any:
        """The value of the column that `format.response_key` names; None if the data set has none,
        or if it is missing in the row.
        `a.b` is the entry `b` of the dictionaries in the column `a`, unless a column has that name.

        A number becomes text, since replies are text: CSV, JSON and Parquet give `42` as an
        integer.
        """
        outer, inner = self._truth_place
        value = self.raw_task.get(outer)
        value = value if inner is None else dict(value or {}).get(inner)
        return None if is_missing(value) else as_text(value)

    @property
    def _truth_place(self) -> tuple[str, str | None]:
        """The column of the right answer, and its entry there if it is not the whole column."""
        key, row = self.truth_key, self.raw_task
        outer, _, inner = key.partition(".")
        nested = inner and key not in row and isinstance(row.get(outer), dict)
        return (outer, inner) if nested else (key, None)

    def json_column(self, column: str) -> Any:
        """Return the value of a column, parsed if it is text; None if the row lacks it. Raises
        ValueError for text that is not JSON.
        """
        value = self.raw_task.get(column)
        try:
            return from_json(value) if isinstance(value, str) else value
        except ValueError as error:
            raise ValueError(
                f"the row's column '{column}' holds text that is not JSON: {error}"
            ) from error

    @property
    def task_desc(self) -> Any:
        """The prompt, under the name that classes of workflows use."""
        return self.prompt

    @property
    def args(self) -> dict[str, Any]:
        """The `workflow_args` of the YAML."""
        return self.workflow_args

    @property
    def system_prompt(self) -> str | None:
        """The system prompt: the row's own if `format.system_prompt_key` names a column."""
        key = self._format("system_prompt_key")
        return self.raw_task.get(key) if key else self._format("system_prompt")

    @property
    def reply_prefix(self) -> str | None:
        """The text that every reply begins with, if any."""
        return self._format("reply_prefix")

    def to_dict(self) -> dict[str, Any]:
        """Return the data set's row."""
        return self.raw_task

    def for_rollout(self) -> Task:
        """Return a copy whose row and sections the code of one rollout may change: a message
        appended to `task.prompt` is in no other rollout's. Lists and dictionaries are copied, not
        what they hold.
        """
        own = replace(self)
        for name in _KINDS:
            if isinstance(section := getattr(own, name), dict):
                for key, value in dict.items(section):
                    if isinstance(value, list | dict):
                        dict.__setitem__(section, key, _copied(value))
        return own

    def for_people(self) -> dict[str, Any]:
        """Return `truth`, and the other columns of the row as `row`, as plain JSON for the records
        of rollouts: without prompt and pictures, which have their own place there, and with long
        texts cut.
        """
        asked = {self.prompt_key, self.truth_key, self._format("system_prompt_key")}
        asked |= {self.image_key} if self.image_key else set(IMAGES)
        left, row = SHOWN_ROW, dict[str, Any]()
        for column, value in self.raw_task.items():
            if column in asked or (plain := _shown(value, min(SHOWN_TEXT, left))) is None:
                continue
            row[str(column)] = plain
            left = max(left - len(plain if isinstance(plain, str) else json.dumps(plain)), 0)
        truth = _shown(self.truth, SHOWN_TEXT)
        return ({} if truth is None else {"truth": truth}) | ({"row": row} if row else {})


def _copied(value: Any, deepest: int = 16) -> Any:
    if deepest and isinstance(value, list):
        return [_copied(inner, deepest - 1) for inner in value]
    if deepest and isinstance(value, dict):
        return {key: _copied(inner, deepest - 1) for key, inner in value.items()}
    return value


def without_effect(tasks: Iterable[Task]) -> dict[str, str]:
    """Return the keys of `workflow_args` that no workflow of these tasks was seen to read, each
    with the nearest key that one asked for and did not find, or "".
    """
    have, asked = dict[str, None](), set[str]()
    for task in tasks:
        if isinstance(args := task.workflow_args, WatchedKeys):
            have |= dict.fromkeys(dict.keys(args))
            asked |= args.asked
    missed = asked - have.keys()
    return {key: did_you_mean(key, missed, "{}") for key in have if key not in asked}


def no_effect(taskset: str, key: str, near: str = "") -> str:
    """Write the note on a key that `without_effect` returns for the tasks of a taskset."""
    hint = f": did you mean '{near}'?" if near else ""
    return f"{taskset}: no workflow reads workflow_args.{key}, so that it has no effect{hint}"


def is_missing(value: Any) -> bool:
    """Return whether a row lacks a value: None, or NaN, which pandas has in its place."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def as_text(value: Any) -> Any:
    """Return a scalar as text: 42 is "42", 0.5 "0.5", True "True"; anything else is unchanged.

    A whole float is written as an integer: tables turn whole numbers into floats if a row lacks
    one.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value) if isinstance(value, int | float) else value


def without_truth(task: Task) -> dict[str, Any]:
    """Return the task's row without the right answer, wherever `format.response_key` finds it."""
    outer, inner = task._truth_place
    row = {name: value for name, value in task.raw_task.items() if name != outer}
    if inner is not None:
        row[outer] = {name: value for name, value in task.raw_task[outer].items() if name != inner}
    return row


def _shown(value: Any, most: int) -> Any:
    """Return a value as plain JSON of at most `most` characters; what is longer, as a text that
    says how much it lacks. None if there is nothing to show.
    """
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if value is None or value == "" or isinstance(value, float):
        return None
    nested = isinstance(value, dict | list)
    whole = as_json(value, default=_name, skipkeys=True) if nested else _name(value)
    if len(whole) > most:
        return f"{whole[:most]} … ({len(whole) - most:,} more characters)"
    return json.loads(whole, parse_constant=lambda name: None) if nested else whole


def _name(value: Any) -> str:
    """Return a value that JSON does not have, as text: `12 bytes`, or the form that `str` gives."""
    return f"{len(value):,} bytes" if isinstance(value, bytes) else str(value)


def object_or_text(text: str) -> Any:
    """Return a JSON object, else the text as it is."""
    try:
        value = json.loads(text)
    except NO_JSON:
        return text
    return value if isinstance(value, dict) else text


def with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have their arguments as objects. Most chat templates need these,
    while clients and data sets have text, which would be quoted a second time.
    """
    if not isinstance(calls := message.get("tool_calls"), list | tuple):
        return dict(message)
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    function = (call.get("function") or call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    function = {**function, "arguments": object_or_text(function["arguments"])}
    return {**call, "function": function} if "function" in call else function
