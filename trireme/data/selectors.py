"""Selectors: in which order a taskset hands out its rows.

Two forms. A function `(rows, epoch, seed, *, options)` gives the order of one epoch, so that a
position is all the state that a resume needs. A class `(rows, seed, *, options)` with the methods
of Selection learns from feedback, and keeps a state of its own. Where either names `features`, it
gets the columns of `feature_keys`, a list of numbers a row.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from trireme.config.options import fitting_options
from trireme.registry import Registry

Selector = Callable[..., Sequence[int]]

SELECTORS = Registry(
    "data_selector",
    {
        "sequential": "trireme.data.selectors.sequential",
        "shuffle": "trireme.data.selectors.shuffle",
        "random": "trireme.data.selectors.uniform",
        "offline_easy2hard": "trireme.data.selectors.offline_easy2hard",
        "difficulty_based": "trireme.data.difficulty.DifficultyBased",
    },
)

_GIVEN = ("rows", "epoch", "seed", "features")


class Selection(Protocol):
    """Hands out rows."""

    def select(self, count: int) -> list[int]:
        """The next rows."""
        ...

    def feedback(self, pass_rates: Mapping[int, float]) -> None:
        """How often each of these rows was solved."""
        ...

    def state(self) -> dict[str, Any]:
        """All that `select` depends on, as JSON takes it."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Back to where `state` was taken."""
        ...


def sequential(rows: int, epoch: int, seed: int) -> Sequence[int]:
    """Row after row, the same in each epoch."""
    return range(rows)


def shuffle(rows: int, epoch: int, seed: int) -> Sequence[int]:
    """Each row once an epoch, in an order of its own for each epoch."""
    order = list(range(rows))
    random.Random(f"shuffle/{seed}/{epoch}").shuffle(order)
    return order


def uniform(rows: int, epoch: int, seed: int) -> Sequence[int]:
    """Rows drawn with replacement: some come twice in an epoch, some not at all."""
    return random.Random(f"random/{seed}/{epoch}").choices(range(rows), k=rows)


def offline_easy2hard(
    rows: int, epoch: int, seed: int, *, features: Sequence[Sequence[float]]
) -> Sequence[int]:
    """The highest features (pass rates, say) first, the first column before the second; of equal
    rows the later one first.
    """
    return sorted(range(rows), key=lambda row: (*features[row], row), reverse=True)


class Order:
    """The endless sequence of row indices that a function makes, epoch after epoch."""

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
        """The row at a position counted from the start of the run."""
        epoch, place = divmod(position, self._rows)
        if epoch != self._epoch:
            order = self._select(self._rows, epoch, self._seed)
            if len(order) != self._rows:
                raise ValueError(
                    f"the data selector gave {len(order)} rows for an epoch: expected {self._rows}"
                )
            self._epoch, self._order = epoch, order
        return int(self._order[place])

    def select(self, count: int) -> list[int]:
        """See Selection."""
        first, self._position = self._position, self._position + count
        return [self[position] for position in range(first, self._position)]

    def feedback(self, pass_rates: Mapping[int, float]) -> None:
        """The order does not depend on it."""

    def state(self) -> dict[str, Any]:
        """The rows handed out so far."""
        return {"current_index": self._position}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See Selection."""
        self._position = int(state["current_index"])


def selection(
    name: str,
    rows: int,
    *,
    seed: int = 42,
    features: Sequence[Sequence[float]] = (),
    options: Mapping[str, Any] | None = None,
) -> Selection:
    """The selector of a name or path, ready to be asked.

    Raises ValueError for an unknown one, for an option that it has not, and for missing features.
    """
    found: Any = SELECTORS.get(name)
    given = fitting_options(f"data_selector '{name}'", found, options or {}, given=_GIVEN)
    wanted = inspect.signature(found).parameters.get("features")
    if wanted is not None:
        if wanted.default is inspect.Parameter.empty and not features:
            raise ValueError(
                f"data_selector '{name}' orders rows by numbers of theirs: give the columns that "
                "hold them as data_selector.feature_keys"
            )
        given["features"] = features
    if inspect.isclass(found):
        return cast(Any, found)(rows, seed, **given)
    return Order(rows, selector=functools.partial(found, **given) if given else found, seed=seed)
