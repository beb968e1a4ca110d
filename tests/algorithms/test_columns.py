"""Columns: one table has all that functions of an algorithm may name, and they are given it."""

from __future__ import annotations

import inspect

import pytest
import torch

from trireme.algorithms.assign import columns_of
from trireme.batch import COLUMNS, GROUPS, IN_TRAINER, LOSS, SELECTS, Columns
from trireme.experience import EID, Experience
from trireme.registry import ADVANTAGES, ENTROPIES, KLS, POLICY_LOSSES, Registry


def _asked(function: object) -> list[str]:
    """Names of the arguments that a part is given as data."""
    assert callable(function)
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


@pytest.mark.parametrize("registry", [ADVANTAGES, POLICY_LOSSES, KLS, ENTROPIES])
def test_built_in_functions_name_columns_of_their_kind(registry: Registry) -> None:
    for name in registry.built_in():
        function = registry.get(name)
        kind = LOSS
        if registry is ADVANTAGES:
            kind = IN_TRAINER if getattr(function, "in_trainer", False) else GROUPS
        for column in _asked(function):
            assert kind in COLUMNS[column].kinds, f"{name} asks for {column}"
        if (choose := getattr(function, "selects", None)) is not None:
            for column in _asked(choose):
                assert SELECTS in COLUMNS[column].kinds, f"{name} chooses by {column}"


def test_an_advantage_is_given_every_column_of_its_kind() -> None:
    e = Experience([1, 2], prompt_length=1, logprobs=[0, -1], reward=1.0, eid=EID(0, 0, 0))
    e.info["reward_parts"] = {"right": (1.0, 1.0)}
    columns = columns_of([e])
    for name, column in COLUMNS.items():
        assert (name in columns) == (GROUPS in column.kinds), name
        if name in columns:
            assert columns.get(name).dim() == (2 if column.shape == "[N, K]" else 1), name


def test_what_is_asked_for_in_vain_is_explained() -> None:
    columns = Columns({"logprobs": torch.zeros(2)})
    expected = (
        "mine asks for 'values'. There is: logprobs ('values' is V of the state before the token: "
        "for an advantage marked `in_trainer`)"
    )
    with pytest.raises(ValueError) as caught:
        columns.get("values", asked_by="mine")
    assert str(caught.value) == expected
    with pytest.raises(ValueError, match=r"mine asks for 'other'. There is: logprobs$"):
        columns.get("other", asked_by="mine")


def test_a_column_that_is_replaced_is_so_in_a_copy_alone() -> None:
    columns = Columns({"logprobs": torch.zeros(1)})
    assert float(columns.replaced(logprobs=torch.ones(1)).get("logprobs")) == 1
    assert float(columns.get("logprobs")) == 0
