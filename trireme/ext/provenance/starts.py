"""Starts: records each start of a run in its folder: `run/starts.json`, `run/start_N.yaml`.

Invariants:
- One entry a start, in order; a file is written whole. Several processes of a job add theirs in
  turn.
- An entry gets its `end` when its run finishes, fails or is stopped; one without an end runs, or
  its process was killed.
- `start_N.yaml` is the whole configuration as it was understood (what the user wrote, defaults,
  paths of plug-ins) and `trireme run` takes it. An entry whose configuration is that of an earlier
  one names that one's file.
- No key, token or password gets into either.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from trireme.checkpoint.layout import JobFolder
from trireme.checkpoint.manifest import Loaded
from trireme.config import Plan
from trireme.config.hidden import HIDDEN, hidden_words, resolved
from trireme.config.lookup import located, plugin_files
from trireme.data.files import SAVED
from trireme.data.rows import DataSet, load_rows, source_of, split_files
from trireme.files import (
    Unreadable,
    fingerprint,
    in_turn,
    json_or,
    out_of_the_way,
    read_text,
    write_json,
    write_text,
)
from trireme.launch.tasksets import data_set
from trireme.log import get_logger, hide_passwords
from trireme.monitor.events import Ended
from trireme.processes import began

logger = get_logger("launcher")

FORMAT = "trireme-starts-1"
PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "datasets", "peft", "numpy",
    "SQLAlchemy", "ray", "vllm",
)  # fmt: skip
GIT_SECONDS = 5.0


def _command() -> list[str]:
    """Return the words of this process's command, as a shell would start it again."""
    if Path(sys.argv[0]).name == "__main__.py":
        return ["python", "-m", Path(sys.argv[0]).parent.name, *sys.argv[1:]]
    return sys.argv


def this_start(plan: Plan, model_path: str, resumed: Loaded | None) -> dict[str, Any]:
    """The entry of the start that is being made; `config` is the configuration itself."""
    return {
        "time": _now(),
        "mode": plan.mode,
        "name": plan.explorer_name,
        "resumed_from": resumed.step if resumed else None,
        "command": hidden_words(_command()),
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "process": os.getpid(),
        "process_began": began(os.getpid()),  # the number may be another process's later
        "steps": dict(zip(("by", "total"), plan.counted, strict=True)),
        "seed": plan.seed,
        "versions": versions(),
        "code": {"trireme": commit(Path(__file__).parent), "folder": commit(Path.cwd())},
        "plugins": {str(path): fingerprint([path]) for path in plugin_files(plan.config.plugins)},
        "model": model_facts(model_path),
        "data": {key: data_facts(data) for key, data in data_of(plan)},
        "config": resolved(plan, model_path),
    }


def same_part(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return whether two entries are of the same part of a job: both, the trainer, one explorer."""
    return (old["mode"], old["name"]) == (new["mode"], new["name"])


def read_starts(folder: JobFolder) -> list[dict[str, Any]]:
    """The entries so far, each with its `config`; none of an older job.

    What is damaged is renamed out of the way, with a warning: a run goes on without it, and what
    has changed since is not compared.
    """
    held = json_or(folder.starts, dict[str, Any]()).get("starts", [])
    if not isinstance(held, list) or not all(_is_entry(entry) for entry in held):
        error = Unreadable(f"{folder.starts} is not a list of starts")
        out_of_the_way(folder.starts, error)
        return []
    starts = []
    for entry in held:
        path = folder.starts.parent / entry["config_file"]
        try:
            config = yaml.safe_load(read_text(path))
            if not isinstance(config, dict):
                raise Unreadable(f"{path} is not a configuration")
        except FileNotFoundError:
            logger.warning("%s is missing: that start is left out", path)
        except (Unreadable, yaml.YAMLError, RecursionError) as error:
            if not isinstance(error, Unreadable):
                error = Unreadable(f"{path} is not YAML")
            out_of_the_way(path, error, "that start is left out")
        else:
            starts.append({**entry, "config": config})
    return starts


def _is_entry(entry: Any) -> bool:
    texts = ("config_file", "time", "mode")
    tables = ("model", "data", "plugins", "versions", "code")
    return (
        isinstance(entry, dict)
        and all(isinstance(entry.get(key), str) for key in texts)
        and all(isinstance(entry.get(key), dict) for key in tables)
        and PurePosixPath(entry["config_file"]).name == entry["config_file"]
        and "name" in entry
    )


def add_start(folder: JobFolder, entry: Mapping[str, Any]) -> Path:
    """Write an entry after those that are there; returns the file of its configuration."""
    run_folder = folder.starts.parent
    run_folder.mkdir(parents=True, exist_ok=True)
    with in_turn(run_folder / ".lock"):
        starts = read_starts(folder)
        alike = [old["config_file"] for old in starts if old["config"] == entry["config"]]
        names = ((n, f"start_{n}.yaml") for n in count(len(starts) + 1))
        number, free = next(n for n in names if not os.path.lexists(run_folder / n[1]))
        name = alike[-1] if alike else free
        if not alike:
            write_text(run_folder / name, _as_yaml(entry, number))
        rows = [*starts, {**entry, "config_file": name}]
        plain = [{key: row[key] for key in row if key != "config"} for row in rows]
        write_json(folder.starts, {"format": FORMAT, "starts": plain})
    return run_folder / name


def add_end(folder: JobFolder, start: Mapping[str, Any], event: Ended) -> None:
    """Note in the newest entry of a start how it ended."""
    how = "failed" if event.error else "stopped" if event.failed else "finished"
    end = {"time": _now(), "how": how, "error": event.error}
    with in_turn(folder.starts.parent / ".lock"):
        held = json_or(folder.starts, dict[str, Any]())
        own = [e for e in held.get("starts", []) if _is_entry(e) and same_part(e, start)]
        if own:
            own[-1]["end"] = end
            write_json(folder.starts, held)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _as_yaml(entry: Mapping[str, Any], number: int) -> str:
    head = (
        f"# The configuration of start {number} ({entry['time']}), defaults included. Relative "
        f"paths begin at\n# {entry['folder']}. Where a value is '{HIDDEN}' a key or password was.\n"
    )
    return head + yaml.safe_dump(entry["config"], sort_keys=False, allow_unicode=True)


def versions() -> dict[str, str]:
    """Return the versions of Python, the machine and the packages that affect numbers."""
    import trireme

    out = {"python": platform.python_version(), "platform": platform.platform()}
    out["trireme"] = trireme.__version__
    for name in PACKAGES:
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return out


def commit(folder: Path) -> str | None:
    """Return the commit of a folder's repository, `…+` if files differ; None: there is none."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS)
        return done.stdout.strip()

    try:
        head = git("rev-parse", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no") if head else ""
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}{'+' if changed else ''}" if head else None


def data_of(plan: Plan) -> Iterator[tuple[str, DataSet]]:
    """Yield key and place of every data set that a stage reads."""
    read, trained = plan.config.buffer.explorer_input, plan.config.buffer.trainer_input
    sets = [("taskset", read.taskset)] if read.taskset else []
    sets += [(f"tasksets[{i}]", one) for i, one in enumerate(read.tasksets)]
    sets += [(f"eval_tasksets[{i}]", one) for i, one in enumerate(read.eval_tasksets)]
    datasets: list[tuple[str, Any]] = [(f"buffer.explorer_input.{key}", one) for key, one in sets]
    if plan.store.kind == "file":
        datasets.append(("buffer.trainer_input.experience_buffer", trained.experience_buffer))
    for name, one in trained.auxiliary_buffers.items():
        datasets.append((f"buffer.trainer_input.auxiliary_buffers.{name}", one))
    for key, one in datasets:
        if one.path:
            yield key, data_set(one)


def data_facts(data: DataSet) -> dict[str, Any]:
    """Return path, rows and fingerprint of a data set; nulls if it is on the hub and not here."""
    source = source_of(data)
    files = split_files(data) if source is None else source.files(data)
    facts: dict[str, Any] = {"path": hide_passwords(data.path), "rows": None, "sha256": None}
    if files is None:
        return facts
    rows = load_rows(  # the run uses them too
        data.path, data.subset, data.split, on_error=data.on_error, otherwise=data.otherwise
    )
    facts["rows"] = len(rows)
    if files and files[0].name == SAVED:
        files = _files(files[0].parent)
    if files:
        facts["sha256"] = fingerprint(files)
    elif source is not None and not source.reproducible:
        digest = hashlib.sha256()
        for row in rows:
            digest.update(json.dumps(row, default=str).encode())
        facts["sha256"] = digest.hexdigest()
    return facts


def model_facts(path: str) -> dict[str, Any]:
    """Return the path of a model, and fingerprints of its configuration, weights and tokenizer."""
    folder = located(path, "models")
    if folder is None or not folder.is_dir():
        return {"path": path, "config": None, "weights": None, "tokenizer": None}
    files = _files(folder)
    weights = [file for file in files if file.suffix in (".safetensors", ".bin")]
    tokenizer = [f for f in files if "token" in f.name or f.stem in ("vocab", "merges")]
    tokenizer += [f for f in files if f.stem.startswith("chat_template")]
    return {
        "path": path,
        "config": fingerprint([folder / "config.json"]),
        "weights": fingerprint(weights),
        "tokenizer": fingerprint(sorted(set(tokenizer))),
    }


def _files(path: Path) -> list[Path]:
    """Return the file itself, or a folder's visible files."""
    if path.is_file():
        return [path]
    return sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
