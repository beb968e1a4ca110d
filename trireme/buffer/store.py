"""Store: the contract by which the buffer of a kind is checked and made.

Each kind of store is a class by the name in STORES that `storage_type` gives. Manifests list them,
so that each can be left out. The module of such a class is imported to check a configuration: slow
packages, such as a database's client, are imported by `make`.
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
from trireme.pictures import PictureReader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trireme.buffer.record import Record


@dataclass(frozen=True)
class StoreParts:
    """The inputs from which a store may be made."""

    plan: Plan
    config: ExperienceBufferConfig
    """The section that asks for this store: that of the plan, or of one of its further data sets.
    """
    folder: Path
    """The folder of the job's stores."""
    tokenizer: PreTrainedTokenizerBase
    chat_template: str | None = None
    """The chat template from the YAML; None: the model's own."""
    schema: str = "sft"
    """The format of a data set's rows."""
    end_ids: Collection[int] = ()
    """The ids that end the model's generation: supervised replies must end with one."""
    endless: bool = False
    """Whether a data set restarts at its end, because it is mixed into something else."""
    reader: PictureReader | None = None
    """Reads the pictures of rows; None: the model takes none."""

    def copy(self) -> Record:
        """Make the copy for people, for a store whose contents nobody can read."""
        from trireme.buffer.record import record_for

        return record_for(self.config.path, self.folder, **copy_limits(self.plan))


class Store(Protocol):
    """One kind of store. Its class is called without arguments."""

    between_processes: bool
    """Whether explorer and trainer may be two processes; otherwise both are in this one."""
    keeps_steps: bool
    """Whether `take_step` returns exactly one explore step."""

    def place(self, path: str, name: str) -> str:
        """Return the store's URL or path, below the job's buffer folder if it is relative.

        `path` and `name` are those of the section; an empty path: the user set none.
        """
        ...

    def examine(
        self, config: ExperienceBufferConfig, key: str, path: str, seed: int
    ) -> Iterable[Problem]:
        """Return the problems of the section `key`, whose path is `path`."""
        ...

    def make(self, parts: StoreParts) -> Buffer:
        """Make the buffer. Raises ValueError if it cannot be opened, or a row cannot be used."""
        ...


def copy_limits(plan: Plan) -> dict[str, Any]:
    """Return a copy's limits, as options of a Record: bytes, and seconds without its server."""
    pipeline = plan.config.data_processor.experience_pipeline
    limit = pipeline.copy_limit_mb * 1e6 or math.inf
    patience = plan.config.buffer.trainer_input.experience_buffer.max_read_timeout
    return {"limit": limit, "sampled": pipeline.copy_policy == "sampled", "patience": patience}
