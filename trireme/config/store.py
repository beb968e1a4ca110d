"""Store: decides which kind of store a stage's experiences use, and its path."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trireme.config import Findings
from trireme.config.schema_rollout import ExperienceBufferConfig
from trireme.config.stages import StageFacts
from trireme.extensions import missing
from trireme.registry import STORES, did_you_mean, is_path

if TYPE_CHECKING:
    from trireme.buffer.store import Store

_KEY = "buffer.trainer_input.experience_buffer"
_QUEUE = "queue"
"""The store of a run in one process that names none."""


@dataclass(frozen=True)
class StorePlan:
    """The store of experiences between explorer and trainer."""

    kind: str
    """A name in STORES, or `file` if the trainer reads a data set."""
    path: str
    """A store's URL, a queue's copy (URL or .jsonl), or a data set's path."""


def store_named(kind: str, config: ExperienceBufferConfig) -> Store:
    """Return the store of a kind; a queue with replay is a separate one.

    Raises ValueError for an unknown name.
    """
    name = "replay" if kind == _QUEUE and config.replay_buffer.enable else kind
    return STORES.get(name)()


def store_of(stage: StageFacts, job_dir: Path) -> tuple[StorePlan, Findings]:
    """Decide kind and path of the trainer's store, and check it."""
    findings, config = Findings(), stage.config
    buffer = config.buffer.trainer_input.experience_buffer
    path = buffer.path or ""
    is_url = "://" in path
    kind = buffer.storage_type or _QUEUE
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
        kind = _QUEUE
    try:
        store = store_named(kind, buffer)
    except (ValueError, ImportError) as error:
        findings.problem(f"{_KEY}.storage_type", _refused(kind) or f"cannot be used: {error}")
        kind, store = _QUEUE, STORES.get(_QUEUE)()  # what a plan without this key shows
    else:
        findings.problems += store.examine(buffer, _KEY, path, config.seed)
    path = store.place(path, buffer.name)
    path = path if kind == "file" else _placed(path, job_dir)
    return StorePlan(kind, path), findings


def is_between_processes(config: ExperienceBufferConfig) -> bool:
    """Return True if explorer and trainer may be two processes."""
    store = _known(config)
    return store is None or store.between_processes


def keeps_steps(config: ExperienceBufferConfig) -> bool:
    """Return True if a batch can be exactly one explore step, as long as nothing replays."""
    store = _known(config)
    return store is None or store.keeps_steps


def _known(config: ExperienceBufferConfig) -> Store | None:
    """Return the store that the section names; None if it is unknown: `store_of` reports it."""
    named = config.storage_type or _QUEUE
    kind = _QUEUE if named == "file" else named  # a copy of what passes through the queue
    try:
        return STORES.get(kind)()
    except (ValueError, ImportError):
        return None


def _refused(kind: str) -> str:
    """Return why a name that is no store's is refused; nothing where the registry says more."""
    if kind in STORES or is_path(kind) or missing("store", kind):
        return ""
    return f"is {kind!r}: expected one of {', '.join(STORES)}{did_you_mean(kind, STORES)}"


def _placed(path: str, job_dir: Path) -> str:
    """Return a relative file or `sqlite:///file` in the job's buffer folder; anything else
    unchanged.
    """
    _, separator, rest = path.rpartition("sqlite:///")
    if "://" in path and (not separator or rest.startswith("/")):
        return path
    return f"{separator}{job_dir / 'buffer' / rest}"
