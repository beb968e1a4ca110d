"""Store: of which kind the trainer's buffer is, and where it lies."""

from __future__ import annotations

from pathlib import Path

from trireme.config.draft import Draft
from trireme.config.plan import BufferType
from trireme.config.stages import reads_file


def store_of(draft: Draft, job_dir: Path) -> tuple[BufferType, str]:
    """Kind and place of the trainer's store."""
    config = draft.config
    buffer = config.buffer.trainer_input.experience_buffer
    path = buffer.path or ""
    is_url = "://" in path
    if reads_file(config):
        if not path:
            draft.problem(
                "buffer.trainer_input.experience_buffer.path",
                f"is not given: expected the data that {config.algorithm.algorithm_type} learns",
            )
        return ("sql", _placed(path, job_dir)) if is_url else ("file", path)
    kind = buffer.storage_type or "queue"
    if config.mode in ("explore", "train") and kind != "sql":
        draft.notes.append(
            f"buffer.trainer_input.experience_buffer.storage_type ({kind}): explorer and trainer "
            f"are two processes, so experiences go through SQLite in the job's folder"
        )
        kind = "sql"
        path = path if is_url else ""
    elif kind == "file":
        draft.notes.append(
            "buffer.trainer_input.experience_buffer.storage_type (file): experiences go through a "
            "queue in memory, and a copy of each goes to the file"
        )
        kind = "queue"
    _examine_replay(draft, kind)
    if not path:
        path = f"sqlite:///{buffer.name}.db" if kind == "sql" else f"{buffer.name}.jsonl"
    elif kind == "sql" and not is_url:
        path = f"sqlite:///{path}"
    return kind, _placed(path, job_dir)


REPLAY_OPTIONS = {
    "linear_decay": ("decay",),
    "decay_limit_randomization": ("decay", "use_count_limit", "sigma"),
}


def _examine_replay(draft: Draft, kind: BufferType) -> None:
    """Priority replay is of the queue in memory, and its options are those of its priority."""
    replay = draft.config.buffer.trainer_input.experience_buffer.replay_buffer
    key = "buffer.trainer_input.experience_buffer.replay_buffer"
    if not replay.enable:
        return
    if kind != "queue":
        draft.problem(f"{key}.enable", f"is true: the store is {kind}, and only a queue has one")
    known = REPLAY_OPTIONS[replay.priority_fn]
    for name, value in replay.priority_fn_args.items():
        if name not in known:
            draft.problem(
                f"{key}.priority_fn_args",
                f"has '{name}': {replay.priority_fn} knows {', '.join(known)}",
            )
        elif isinstance(value, bool) or not isinstance(value, int | float):
            draft.problem(f"{key}.priority_fn_args.{name}", f"is {value!r}: expected a number")


def _placed(path: str, job_dir: Path) -> str:
    """A relative file or `sqlite:///file` in the job's buffer folder; all else as it is."""
    _, separator, rest = path.rpartition("sqlite:///")
    if separator:
        return path if rest.startswith("/") else f"sqlite:///{job_dir / 'buffer' / rest}"
    if "://" in path:
        return path
    return str(job_dir / "buffer" / path)
