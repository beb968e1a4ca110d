"""SQL store: checks and makes the SQL buffer of a plan; buffer.py is the buffer.

It is a separate module, since a configuration is checked without SQLAlchemy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from trireme.buffer.store import StoreParts
from trireme.config import Problem
from trireme.config.schema_rollout import ExperienceBufferConfig, ReplayBufferConfig
from trireme.ext.replay.priority import priority_problems

if TYPE_CHECKING:
    from trireme.ext.sql.buffer import SqlBuffer
    from trireme.ext.sql.claims import Reuse


class SqlStore:
    """The store `sql`: a database that several processes share."""

    between_processes = True
    keeps_steps = False

    def place(self, path: str, name: str) -> str:
        """Return the database's URL; a plain path is that of a SQLite file."""
        if "://" in path:
            return path
        return f"sqlite:///{path or f'{name}.db'}"

    def examine(
        self, config: ExperienceBufferConfig, key: str, path: str, seed: int
    ) -> Iterable[Problem]:
        """Yield the problems of a buffer's settings."""
        if "://" in path and not path.startswith(("sqlite://", "postgresql")):
            yield Problem(
                f"{key}.path",
                f"is of the kind {path.partition('://')[0]}: expected sqlite:///<file> or "
                "postgresql://<user>@<host>/<database>",
            )
        if config.replay_buffer.enable:
            yield from priority_problems(config.replay_buffer, key, seed)

    def make(self, parts: StoreParts) -> SqlBuffer:
        """Make the buffer that the plan's mode needs."""
        from trireme.buffer.table import resolve_url
        from trireme.ext.sql.buffer import SqlBuffer

        plan, config = parts.plan, parts.config
        roles: dict[str, Any] = {"explore": "explore", "serve": "explore", "train": "train"}
        role = roles.get(plan.mode, "both")
        names = {"explore": plan.config.explorer.name, "train": plan.config.trainer.name}
        return SqlBuffer(
            config.name,
            resolve_url(plan.store.path, parts.folder),
            config,
            role=role,
            party=names.get(role),
            reuse=_reuse(config.replay_buffer),
        )


def _reuse(replay: ReplayBufferConfig) -> Reuse | None:
    from trireme.ext.sql.claims import Reuse

    if not replay.enable:
        return None
    limit = 3 if replay.priority_fn == "decay_limit_randomization" else 0
    args = {"use_count_limit": limit, **replay.priority_fn_args}
    return Reuse(cooldown=replay.reuse_cooldown_time, **args)
