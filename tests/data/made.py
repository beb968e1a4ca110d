"""Tasksets and selectors from plain arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trireme.config.schema_rollout import DataSelectorConfig
from trireme.data.rows import Rows
from trireme.data.selectors import Selection, selection
from trireme.data.tasksets import Taskset, TasksetSettings


def taskset_of(
    rows: Rows,
    *,
    selector: str = "sequential",
    seed: int = 42,
    feature_keys: Sequence[str] = (),
    selector_args: Mapping[str, Any] | None = None,
    **options: Any,
) -> Taskset:
    section = DataSelectorConfig(
        selector_type=selector,
        seed=seed,
        feature_keys=[*feature_keys],
        kwargs=dict(selector_args or {}),
    )
    return Taskset(rows, TasksetSettings(selector=section, **options))


def selection_of(
    name: str,
    rows: int,
    *,
    seed: int = 42,
    feature_keys: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    **more: Any,
) -> Selection:
    section = DataSelectorConfig(
        selector_type=name, seed=seed, feature_keys=[*feature_keys], kwargs=dict(options or {})
    )
    return selection(section, rows, **more)
