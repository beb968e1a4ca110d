"""Tasks: which keys of their `workflow_args` somebody has read."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from trireme.task import Task, WatchedKeys, without_effect

GIVEN = {"one": 1, "two": {"deep": [2]}}


def made() -> Task:
    return Task(workflow_args=copy.deepcopy(GIVEN))


@pytest.mark.parametrize(
    "read",
    [
        lambda args: args["one"],
        lambda args: args.get("one"),
        lambda args: "one" in args,
        lambda args: args.pop("one"),
        lambda args: args.pop("one", 3),
        lambda args: args.setdefault("one", 4),
    ],
)
def test_one_key_is_read(read: Callable[[Any], Any]) -> None:
    task = made()
    read(task.workflow_args)
    assert list(without_effect([task])) == ["two"]


@pytest.mark.parametrize(
    "read",
    [
        lambda args: dict(args),
        lambda args: dict(**args),
        lambda args: {**args},
        lambda args: args | {},
        lambda args: {} | args,
        lambda args: args.copy(),
        lambda args: {key: args[key] for key in args},
        lambda args: dict(zip(args.keys(), args.values(), strict=True)),
        lambda args: dict(args.items()),
        lambda args: json.loads(json.dumps(args)),
        lambda args: yaml.safe_load(yaml.safe_dump(args)),
        copy.copy,
        copy.deepcopy,
        lambda args: pickle.loads(pickle.dumps(args)),
    ],
)
def test_all_keys_are_read(read: Callable[[Any], Any]) -> None:
    task = made()
    assert read(task.workflow_args) == GIVEN
    assert without_effect([task]) == {}


def test_copies_of_a_task_note_together_and_keys_that_are_set_are_no_ones() -> None:
    task = made()
    twin = dataclasses.replace(task, repeat_times=2)
    twin.workflow_args["own"] = 3
    assert twin.workflow_args["one"] == 1 and twin.workflow_args.get("tow") is None
    assert without_effect([task]) == {"two": "tow"}


def test_whole_copies_keep_their_values_and_name() -> None:
    for whole in (copy.deepcopy, copy.copy, lambda one: pickle.loads(pickle.dumps(one))):
        args = whole(made().workflow_args)
        assert type(args) is WatchedKeys and args == GIVEN
        with pytest.raises(KeyError, match=r"workflow_args has no 'tow' .did you mean 'two'"):
            args["tow"]


def test_a_column_is_not_hidden_by_what_a_task_knows_of_its_run() -> None:
    assert Task({"total_steps": 7}).total_steps == 7
