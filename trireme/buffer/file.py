"""FileBuffer: reads experiences from a data set, for stages that train without an explorer.

Invariants:
- Batches span the borders of epochs, in an order that depends only on seed and epoch; the last
  batch of the last epoch may be smaller. The Plan counts whole batches, so that the trainer takes
  it only if rows that are too long made the steps fewer.
- `state` is the number of rows read: a resume continues with exactly the next one.
- A row's id is (epoch, row): the same in every run.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from trireme.buffer.buffer import Closed, Demand
from trireme.buffer.store import StoreParts
from trireme.config import Problem
from trireme.config.lookup import vocabulary_of
from trireme.config.schema_rollout import ExperienceBufferConfig
from trireme.data.kinds import FORMATS
from trireme.data.rows import load_rows
from trireme.data.selectors import RowOrder
from trireme.experience import EID, Experience
from trireme.log import get_logger

logger = get_logger("queue_experience_buffer")


class RowFormat(Protocol):
    """Converts a data set's rows to experiences."""

    counts: Counter[str]
    """How many rows were read, and how many could not be used, by cause."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def __call__(self, index: int, *, eid: EID) -> Experience | None:
        """Return row `index`; None if it cannot be trained on: too long, or, as `counts` say,
        `untrained`.
        """
        ...


class FileStore:
    """The store that reads experiences from a data set's rows."""

    between_processes = False
    keeps_steps = False

    def place(self, path: str, name: str) -> str:
        """Return the data set's path, which is outside of the job's folder."""
        return path

    def examine(
        self, config: ExperienceBufferConfig, key: str, path: str, seed: int
    ) -> Iterable[Problem]:
        """Return nothing: reading the data set checks it."""
        return ()

    def make(self, parts: StoreParts) -> FileBuffer:
        """Load the rows and make the buffer that reads them."""
        plan, config = parts.plan, parts.config
        rows = load_rows(
            config.path or "",
            config.subset_name,
            config.split,
            progress=config.enable_progress_bar,
            on_error=config.on_error,
        )
        form = FORMATS[parts.schema](
            rows,
            parts.tokenizer,
            max_model_len=plan.lengths.max_model_len,
            format_args=config.format.model_dump(),
            end_ids=parts.end_ids,
            chat_template=parts.chat_template,
            enable_thinking=plan.config.model.enable_thinking,
            on_error=config.on_error,
            reader=parts.reader,
            vocabulary=vocabulary_of(plan.model_path),
        )
        epochs = None if parts.endless else plan.steps.passes
        return FileBuffer(config.name, form, total_epochs=epochs, seed=plan.seed)


class FileBuffer:
    """Reads a data set repeatedly."""

    def __init__(
        self,
        name: str,
        format: RowFormat,
        *,
        total_epochs: int | None = None,
        shuffle: bool = True,
        seed: int = 42,
    ) -> None:
        """`total_epochs` None: without end, if steps that the user gave end the training."""
        self.name = name
        self.demand = Demand()
        self._format = format
        self._order = RowOrder(
            len(format), selector="shuffle" if shuffle else "sequential", seed=seed
        )
        self._end = None if total_epochs is None else total_epochs * len(format)
        self._position = 0
        self._reported: Counter[str] = Counter()
        self._closed = False
        self._failure: BaseException | None = None

    async def put(self, experiences: Sequence[Experience]) -> None:
        """Raise ValueError: a data set accepts no experiences."""
        raise ValueError(f"buffer '{self.name}' reads a data set: nothing can be put into it")

    async def take(self, n: int, *, oldest: float = 0) -> list[Experience]:
        """Take the next `n` experiences, without waiting. No weights sampled them: none is old."""
        if self._failure is not None:
            raise RuntimeError(
                f"buffer '{self.name}': the run has failed: {self._failure}"
            ) from self._failure
        taken, position = (
            ([], self._position) if self._closed else await asyncio.to_thread(self._read, n)
        )
        self._position = position
        if not taken:
            raise Closed(f"buffer '{self.name}' has been read to its end")
        logger.info("%d rows taken, up to %s", len(taken), position)
        return taken

    async def take_step(self) -> list[Experience]:
        """Raise an error: the Plan refuses this combination."""
        raise NotImplementedError("a file buffer does not distinguish explore steps")

    async def close(self) -> None:
        """Close the buffer: later takes read nothing."""
        self._closed = True

    async def fail(self, error: BaseException) -> None:
        """Record that the run has failed: later takes raise with `error` as the cause."""
        self._failure = self._failure or error
        self._closed = True

    async def starves(self) -> bool:
        """Return False: a take reads and does not wait."""
        return False

    async def without_reader(self) -> str:
        """Return nothing: its reader is in this process."""
        return ""

    def __len__(self) -> int:
        """Return the rows left; for an endless data set those of an epoch."""
        if self._closed:
            return 0
        return len(self._format) if self._end is None else max(self._end - self._position, 0)

    def metrics(self) -> dict[str, float]:
        """Return the counts of the rows that were read since the last call: `data/rows`, `data/cut`
        …
        """
        counts = Counter(self._format.counts)
        metrics = {f"data/{name}": float(n - self._reported[name]) for name, n in counts.items()}
        self._reported = counts
        return metrics

    def commit(self) -> None:
        """Do nothing: a data set keeps its rows."""

    def state(self) -> dict[str, Any]:
        """Return the position: `current_index`, the rows read so far."""
        return {"current_index": self._position}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue at the position of a checkpoint."""
        self._position = int(state["current_index"])

    def _read(self, n: int) -> tuple[list[Experience], int]:
        """Return the next n experiences, and the position after them."""
        experiences: list[Experience] = []
        position, dropped = self._position, 0
        before = self._format.counts["untrained"]
        while len(experiences) < n and (self._end is None or position < self._end):
            row = self._order[position]
            epoch = position // len(self._format)
            experience = self._format(row, eid=EID(epoch, row))
            position += 1
            if experience is not None:
                experiences.append(experience)
                continue
            dropped += 1
            if dropped >= len(self._format) and not experiences:
                raise ValueError(
                    f"buffer '{self.name}': no row of its {len(self._format)} leaves anything to "
                    "train: " + _why(dropped, self._format.counts["untrained"] - before)
                )
        if dropped:
            why = _why(dropped, self._format.counts["untrained"] - before)
            logger.warning("rows of buffer '%s' are left out: %s", self.name, why)
        return experiences, position


def _why(dropped: int, untrained: int) -> str:
    """Describe rows that are left out, `untrained` of them at any length."""
    causes = {
        "too long for model.max_model_len": dropped - untrained,
        "without a trained token (the weight of every reply is 0, or the mask is)": untrained,
    }
    return ", ".join(f"{count} {cause}" for cause, count in causes.items() if count)
