"""Cache: values by name up to a number of bytes, for several threads."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")


class SizedCache(Generic[V]):
    """The most recently used values; the last one stays, however large it is."""

    def __init__(self, limit: int) -> None:
        """`limit`: bytes of all values."""
        self._limit = limit
        self._values: OrderedDict[str, tuple[V, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, name: str) -> V | None:
        """Return a value; None if it is not there."""
        with self._lock:
            if name not in self._values:
                return None
            self._values.move_to_end(name)
            return self._values[name][0]

    def put(self, name: str, value: V, size: int) -> None:
        """Store a value of `size` bytes."""
        with self._lock:
            self._bytes += size - self._values.pop(name, (value, 0))[1]
            self._values[name] = value, size
            while self._bytes > self._limit and len(self._values) > 1:
                self._bytes -= self._values.popitem(last=False)[1][1]

    def clear(self) -> None:
        """Drop all values."""
        with self._lock:
            self._values.clear()
            self._bytes = 0
