"""Selectors: decide the order of a taskset's rows.

There are three forms. A function `(rows, epoch, seed, *, options)` returns the order of one epoch,
so that a resume needs only a position. A class `(rows, seed, *, options)` with the methods of
Selection learns from feedback, and has a state. If either declares `features`, it receives the
columns of `feature_keys`, a list of numbers per row. A BaseSelector is a third form, a
class that keeps its own place.
"""

from __future__ import annotations

import functools
import inspect
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol, cast

from trireme.config.options import fitting_options
from trireme.config.schema_rollout import DataSelectorConfig
from trireme.extensions import former_names
from trireme.registry import SELECTORS
from trireme.usercode import UserCode

Selector = Callable[..., Sequence[int]]

_GIVEN = ("rows", "epoch", "seed", "features")


class Selection(Protocol):
    """Selects rows."""

    def select(self, count: int) -> list[int]:
        """Return the next rows."""
        ...

    def feedback(self, pass_rates: Mapping[int, float]) -> None:
        """Update the selection with each row's pass rate."""
        ...

    def state(self) -> dict[str, Any]:
        """Return all that `select` depends on, in a form that JSON accepts."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        ...


def sequential(rows: int, epoch: int, seed: int) -> Sequence[int]:
    """Return row after row, the same in each epoch."""
    return range(rows)


def shuffle(rows: int, epoch: int, seed: int) -> Sequence[int]:
    """Return each row once per epoch, in a different order in each."""
    order = list(range(rows))
    random.Random(f"shuffle/{seed}/{epoch}").shuffle(order)
    return order


def uniform(rows: int, epoch: int, seed: int) -> Sequence[int]:
    """Return rows drawn with replacement: some occur twice in an epoch, some not at all."""
    return random.Random(f"random/{seed}/{epoch}").choices(range(rows), k=rows)


class RowOrder:
    """The endless sequence of row indices from a function, epoch after epoch."""

    def __init__(
        self, rows: int, *, selector: str | Selector = "sequential", seed: int = 42
    ) -> None:
        """Raises ValueError for an unknown selector."""
        self._rows = rows
        self._seed = seed
        self._select: Selector = SELECTORS.get(selector) if isinstance(selector, str) else selector
        self._epoch = -1
        self._order: Sequence[int] = ()
        self._position = 0

    def __getitem__(self, position: int) -> int:
        """Return the row at a position counted from the start of the run."""
        epoch, index = divmod(position, self._rows)
        if epoch != self._epoch:
            order = self._select(self._rows, epoch, self._seed)
            if len(order) != self._rows:
                raise ValueError(
                    f"the data selector gave {len(order)} rows for an epoch: expected {self._rows}"
                )
            self._epoch, self._order = epoch, order
        return int(self._order[index])

    def select(self, count: int) -> list[int]:
        """Return the next `count` rows of the order."""
        first, self._position = self._position, self._position + count
        return [self[position] for position in range(first, self._position)]

    def feedback(self, pass_rates: Mapping[int, float]) -> None:
        """Do nothing: the order does not depend on it."""

    def state(self) -> dict[str, Any]:
        """Return the number of rows selected so far."""
        return {"current_index": self._position}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of a checkpoint."""
        self._position = int(state["current_index"])


class BaseSelector(ABC):
    """A selector that gets its whole section. `data_source` has the Hugging Face data set,
    `dataset`, and `dataset_size`; `config` is the section `data_selector`.
    """

    def __init__(self, data_source: Any, config: DataSelectorConfig) -> None:
        self.data_source = data_source
        self.config = config

    @abstractmethod
    def get_indices(self, batch_size: int, return_extra_info: bool = False) -> Any:
        """Return the next rows."""

    @abstractmethod
    def feedback(self, indices: list[int], values: list[float]) -> None:
        """Update the selection with each row's pass rate."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return all that `get_indices` depends on, in a form that JSON accepts."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class _Selected:
    """A Selection made from a BaseSelector."""

    def __init__(
        self,
        selector: type[BaseSelector],
        rows: int,
        data: Iterable[Mapping[str, Any]],
        config: DataSelectorConfig,
    ) -> None:
        """Raises ValueError if no checkpoint could store its state."""
        from datasets import Dataset

        self._rows, self._name = rows, f"data_selector '{config.selector_type}'"
        source = SimpleNamespace(dataset=Dataset.from_list(list(map(dict, data))))
        source.dataset_size = rows
        with UserCode(self._name, selector):
            self.selector = selector(source, config)
            state = self.selector.state_dict()
        try:
            json.dumps(state)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{self._name}: state_dict cannot be stored as JSON: {error}"
            ) from error

    def select(self, count: int) -> list[int]:
        """Return the user's choice. Raises ValueError for another number of rows, or for a row that
        does not exist.
        """
        chosen = [int(row) for row in self.selector.get_indices(count)]
        if len(chosen) != count or any(not 0 <= row < self._rows for row in chosen):
            raise ValueError(
                f"{self._name}: get_indices({count}) gave {chosen!r:.60}: expected {count} of the "
                f"rows 0 to {self._rows - 1}"
            )
        return chosen

    def feedback(self, pass_rates: Mapping[int, float]) -> None:
        if pass_rates:
            self.selector.feedback(list(pass_rates), list(pass_rates.values()))

    def state(self) -> dict[str, Any]:
        return self.selector.state_dict()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.selector.load_state_dict(dict(state))


def class_of(selection: Selection) -> str:
    """Return the name of the class that a selection's state is of."""
    return type(selection.selector if isinstance(selection, _Selected) else selection).__name__


def selection(
    config: DataSelectorConfig,
    rows: int,
    *,
    features: Sequence[Sequence[float]] = (),
    data: Iterable[Mapping[str, Any]] = (),
) -> Selection:
    """Make the selector that a section names, by a name or path. `data` are the rows themselves,
    for a BaseSelector.

    Raises ValueError for an unknown one, for an option that it does not have, and for missing
    features.
    """
    name, seed = config.selector_type, config.seed
    selector: Any = SELECTORS.get(name)
    if inspect.isclass(selector) and issubclass(selector, BaseSelector):
        return _Selected(selector, rows, data, config)
    arguments = fitting_options(f"data_selector '{name}'", selector, config.kwargs, given=_GIVEN)
    wanted = inspect.signature(selector).parameters.get("features")
    if wanted is not None:
        if wanted.default is inspect.Parameter.empty and not features:
            raise ValueError(
                f"data_selector '{name}' orders rows by numbers of theirs: give the columns that "
                "hold them as data_selector.feature_keys"
            )
        arguments["features"] = features
    if inspect.isclass(selector):
        return cast(Any, selector)(rows, seed, **arguments)
    return RowOrder(
        rows,
        selector=functools.partial(selector, **arguments) if arguments else selector,
        seed=seed,
    )


__getattr__ = former_names(__name__)
