"""Store: of which kind the trainer's buffer is, and where it lies."""

from __future__ import annotations

import re
from pathlib import Path

from trireme.config.plan import BufferType
from trireme.config.stages import Stage

_REPLAY_OPTIONS = {
    "linear_decay": ("decay",),
    "decay_limit_randomization": ("decay", "use_count_limit", "sigma"),
}
_KEY = "buffer.trainer_input.experience_buffer"


def store_of(stage: Stage, job_dir: Path) -> tuple[BufferType, str]:
    """Kind and place of the trainer's store."""
    config = stage.config
    _check_explorer(stage)
    buffer = config.buffer.trainer_input.experience_buffer
    path = buffer.path or ""
    is_url = "://" in path
    if stage.reads_file:
        if not path:
            learner = config.algorithm.algorithm_type
            stage.problem(f"{_KEY}.path", f"is not given: expected the data that {learner} learns")
        return ("sql", _placed(path, job_dir)) if is_url else ("file", path)
    kind = buffer.storage_type or "queue"
    if config.mode in ("explore", "train", "serve") and kind != "sql":
        stage.notes.append(
            f"{_KEY}.storage_type ({kind}): explorer and trainer are two processes, so experiences "
            f"go through SQLite in the job's folder"
        )
        kind = "sql"
        path = path if is_url else ""
    elif kind == "file":
        stage.notes.append(
            f"{_KEY}.storage_type (file): experiences go through a queue in memory, and a copy of "
            f"each goes to the file"
        )
        kind = "queue"
    _check_replay(stage)
    if kind == "sql" and is_url and not path.startswith(("sqlite://", "postgresql")):
        stage.problem(
            f"{_KEY}.path",
            f"is of the kind {path.partition('://')[0]}: expected sqlite:///<file> or "
            "postgresql://<user>@<host>/<database>",
        )
    if not path:
        path = f"sqlite:///{buffer.name}.db" if kind == "sql" else "experience_buffer.jsonl"
    elif kind == "sql" and not is_url:
        path = f"sqlite:///{path}"
    return kind, _placed(path, job_dir)


def _check_explorer(stage: Stage) -> None:
    """The name of one of several explorers is in ids and names of files."""
    name = stage.config.explorer.name
    fits = re.fullmatch(r"[\w-][\w.-]*", name) and name not in ("trainer", "stage")
    if stage.config.mode == "explore" and not fits:
        stage.problem(
            "explorer.name",
            f"is {name!r}: expected letters, digits, '_', '-' or '.', and neither trainer nor "
            "stage, since files are named after it",
        )


def _check_replay(stage: Stage) -> None:
    """Priority replay's options are those of its priority."""
    replay = stage.config.buffer.trainer_input.experience_buffer.replay_buffer
    key = f"{_KEY}.replay_buffer"
    if not replay.enable:
        return
    known = _REPLAY_OPTIONS[replay.priority_fn]
    for name, value in replay.priority_fn_args.items():
        if name not in known:
            text = f"has '{name}': {replay.priority_fn} knows {', '.join(known)}"
            stage.problem(f"{key}.priority_fn_args", text)
        elif isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            text = f"is {value!r}: expected a number at least 0"
            stage.problem(f"{key}.priority_fn_args.{name}", text)


def _placed(path: str, job_dir: Path) -> str:
    """A relative file or `sqlite:///file` in the job's buffer folder; all else as it is."""
    _, separator, rest = path.rpartition("sqlite:///")
    if "://" in path and (not separator or rest.startswith("/")):
        return path
    return f"{separator}{job_dir / 'buffer' / rest}"
