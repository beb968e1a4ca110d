"""Store: decides through which kind of store a stage's experiences go, and where it lies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trireme.config import Findings
from trireme.config.schema_rollout import ExperienceBufferConfig
from trireme.config.stages import StageFacts
from trireme.registry import STORES

if TYPE_CHECKING:
    from trireme.buffer.store import Store

_KEY = "buffer.trainer_input.experience_buffer"


def store_named(kind: str, config: ExperienceBufferConfig) -> Store:
    """The store of a kind; a queue that replays is one of its own.

    Raises ValueError for a name that there is not.
    """
    name = "replay" if kind == "queue" and config.replay_buffer.enable else kind
    return STORES.get(name)()


def store_of(stage: StageFacts, job_dir: Path) -> tuple[tuple[str, str], Findings]:
    """Decide the kind and the place of the trainer's store, and examine it."""
    findings, config = Findings(), stage.config
    buffer = config.buffer.trainer_input.experience_buffer
    path = buffer.path or ""
    is_url = "://" in path
    kind = buffer.storage_type or "queue"
    if stage.reads_file:
        if not path:
            learner = config.algorithm.algorithm_type
            text = f"is not given: expected the data that {learner} learns"
            findings.problem(f"{_KEY}.path", text)
        kind = "sql" if is_url else "file"
    elif config.mode in ("explore", "train", "serve") and not is_between_processes(buffer):
        findings.note(
            f"{_KEY}.storage_type ({kind}): explorer and trainer are two processes, so experiences "
            f"go through SQLite in the job's folder"
        )
        kind = "sql"
        path = path if is_url else ""
    elif kind == "file":
        findings.note(
            f"{_KEY}.storage_type (file): experiences go through a queue in memory, and a copy of "
            f"each goes to the file"
        )
        kind = "queue"
    try:
        store = store_named(kind, buffer)
    except (ValueError, ImportError) as error:
        findings.problem(f"{_KEY}.storage_type", f"cannot be used: {error}")
        return (kind, path), findings
    findings.problems += store.examine(buffer, _KEY, path, config.seed)
    path = store.place(path, buffer.name)
    path = path if kind == "file" else _placed(path, job_dir)
    return (kind, path), findings


def is_between_processes(config: ExperienceBufferConfig) -> bool:
    """Return whether explorer and trainer may be two processes."""
    store = _known(config)
    return store is None or store.between_processes


def keeps_steps(config: ExperienceBufferConfig) -> bool:
    """Return whether a batch can be what one explore step left, as long as nothing replays."""
    store = _known(config)
    return store is None or store.keeps_steps


def _known(config: ExperienceBufferConfig) -> Store | None:
    """The store that the section names; None where there is none: `store_of` says so."""
    named = config.storage_type or "queue"
    kind = "queue" if named == "file" else named  # a copy of what goes through the queue
    try:
        return STORES.get(kind)()
    except (ValueError, ImportError):
        return None


def _placed(path: str, job_dir: Path) -> str:
    """A relative file or `sqlite:///file` in the job's buffer folder; all else as it is."""
    _, separator, rest = path.rpartition("sqlite:///")
    if "://" in path and (not separator or rest.startswith("/")):
        return path
    return f"{separator}{job_dir / 'buffer' / rest}"
