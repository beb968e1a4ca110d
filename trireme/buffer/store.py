"""Store: how the buffer of a kind is checked and made.

Each kind of store is a class by the name in STORES that `storage_type` gives. Which of them there
are stands in manifests, so that each can be left out. The module of such a class is imported to
check a configuration: what takes long to import, such as a database's client, is imported by
`make`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trireme.buffer.buffer import Buffer
from trireme.config import Plan, Problem
from trireme.config.schema_rollout import ExperienceBufferConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trireme.buffer.record import Record


@dataclass(frozen=True)
class StoreParts:
    """The parts that a store may be made of."""

    plan: Plan
    config: ExperienceBufferConfig
    """The section that asks for this store: that of the plan, or of one of its further data sets.
    """
    folder: Path
    """Where the job's stores lie."""
    tokenizer: PreTrainedTokenizerBase
    chat_template: str | None = None
    """The one that the YAML gives; None: the model's own."""
    schema: str = "sft"
    """What the rows of a data set are."""
    end_ids: Collection[int] = ()
    """Where the model's generation stops: what supervised replies have to end with."""
    endless: bool = False
    """Whether a data set begins again at its end, because it is mixed into something else."""

    def copy(self) -> Record:
        """A copy for people of what is put, for a store that nobody can look into."""
        from trireme.buffer.record import record_for

        return record_for(self.config.path, self.folder, **copy_limits(self.plan))


class Store(Protocol):
    """One kind of store. Its class is called without arguments."""

    between_processes: bool
    """Whether explorer and trainer may be two processes; else both are in this one."""
    keeps_steps: bool
    """Whether `take_step` gives what one explore step left."""

    def place(self, path: str, name: str) -> str:
        """Return the store's URL or path, below the job's buffer folder if it is relative.

        `path` and `name` are those of the section; an empty path: the user named none.
        """
        ...

    def examine(
        self, config: ExperienceBufferConfig, key: str, path: str, seed: int
    ) -> Iterable[Problem]:
        """List what is wrong with the section `key`, whose path is `path`."""
        ...

    def make(self, parts: StoreParts) -> Buffer:
        """The buffer. Raises ValueError where it cannot be opened, or a row cannot be used."""
        ...


def copy_limits(plan: Plan) -> dict[str, Any]:
    """How much of a copy stays, as options of a Record."""
    pipeline = plan.config.data_processor.experience_pipeline
    limit = pipeline.copy_limit_mb * 1e6 or math.inf
    return {"limit": limit, "sampled": pipeline.copy_policy == "sampled"}
