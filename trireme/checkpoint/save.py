"""Save: writes all files of a train step atomically, then advances the run's pointers.

Invariants:
- A step's folder appears under its name complete or not at all; the pointers (`latest_*.txt`, the
  `*_meta.json`) move after it, and a resume does not depend on them.
- Equal weights give equal bytes: sorted names, the same header.
- Configuration and tokenizer are copied byte for byte from the original model.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from trireme.checkpoint.export import OwnFile
from trireme.checkpoint.layout import WEIGHTS, JobFolder, rank_file, step_in
from trireme.checkpoint.manifest import write_manifest
from trireme.config.lookup import located, weight_files
from trireme.files import (
    CannotWrite,
    naming,
    set_aside,
    sync_all,
    whole_file,
    whole_folder,
    write_bytes,
    write_json,
    write_text,
)
from trireme.log import get_logger

logger = get_logger("checkpoint_monitor")

KEPT_WEIGHTS = 2
"""Folders with only weights that stay: an explorer may still read the one before the newest."""


_RENAMING = threading.Lock()
"""A lock for renaming: weights may be published while an older checkpoint gets its name behind the
training. The training waits for it when it publishes weights."""

_MODEL_FILES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".bpe", ".vocab")


class Saving:
    """A checkpoint to resume from, while it is written: others see it once `finish` has ended.

    Its user writes the trainer's own files into `actor`, which already has `huggingface`, and the
    value model's into `critic`.
    """

    def __init__(
        self,
        folder: JobFolder,
        step: int,
        *,
        run_state: Mapping[str, Any],
        model_dir: str | Path,
        keep: int | None = None,
    ) -> None:
        """`run_state` is the positions of explorer, taskset and buffer: JSON values, and bytes,
        which get separate files. `keep` is the number of checkpoints that stay. Raises OSError
        naming the path that cannot be written.
        """
        self._folder, self._step, self._keep = folder, step, keep
        self._run_state, self._published = run_state, _published(folder)
        self._target = folder.step_dir(step).absolute()
        self._held = ExitStack()
        self._temporary = self._held.enter_context(whole_folder(self._target))
        self.actor, self.critic = self._temporary / "actor", self._temporary / "critic"
        with self.abandoned_on_error():
            (self._temporary / ".full_checkpoint").touch()
            (self.actor / "huggingface").mkdir(parents=True)
            self.critic.mkdir()
            copy_model_files(model_dir, self.actor / "huggingface")

    @contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        """Delete what was written if the block raises."""
        with ExitStack() as held:
            held.push(self._held.pop_all())
            yield
            self._held = held.pop_all()

    def finish(self) -> Path:
        """Give the folder its name, once everything is written, and return it."""
        folder, step, target = self._folder, self._step, self._target
        with _removing() as aside, ExitStack() as lock:
            with self._held:
                if not any(self.critic.iterdir()):
                    self.critic.rmdir()
                write_manifest(self._temporary, step, self._run_state)
                with naming(target):
                    sync_all(self._temporary)  # here: only names change under the lock
                lock.enter_context(_RENAMING)
                if target.is_dir():
                    if not folder.is_full(step):
                        _keep_side_files(target, self._temporary)
                    aside.append(set_aside(target))
            _move_pointers(folder, step, self._run_state, self._published)
            aside += _set_old_aside(folder, step, self._keep)
        size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
        logger.info("saved %s, %.1f MB", target, size / 1e6)
        return target


def save_weights(
    folder: JobFolder,
    step: int,
    *,
    weights: Mapping[str, Tensor],
    extra_files: Mapping[str, bytes] | None = None,
) -> Path:
    """Write only the weights, for an explorer to load; returns their folder. Older such folders are
    removed. If the step's checkpoint exists and has them only rounded, or incomplete, they are
    added to it.

    `extra_files` are written next to `actor/`. Raises OSError naming the path that cannot be
    written.
    """
    target = folder.step_dir(step)
    with _removing() as aside, _RENAMING:
        if folder.is_full(step):
            if _lacks_exact(actor := folder.actor_dir(step)):
                with whole_file(actor / WEIGHTS) as temporary:
                    write_weights(temporary, weights)
            for name, data in (extra_files or {}).items():
                write_bytes(target / name, data)
        else:
            with whole_folder(target) as temporary:
                (temporary / "actor").mkdir()
                write_weights(temporary / "actor" / WEIGHTS, weights)
                for name, data in (extra_files or {}).items():
                    (temporary / name).write_bytes(data)
        write_text(folder.latest_weights, str(step))
        light = [s for s in folder.steps() if s <= step and not folder.is_full(s)]
        aside += (set_aside(folder.step_dir(old)) for old in light[:-KEPT_WEIGHTS])
    return target


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write one safetensors file: CPU, contiguous, names sorted."""
    tensors = {name: weights[name].detach().cpu().contiguous() for name in sorted(weights)}
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # disk errors too
        raise CannotWrite(f"cannot write {path}: {error}") from error


def copy_model_files(model_dir: str | Path, target: Path) -> None:
    """Copy configuration, tokenizer and templates, byte for byte; no weights."""
    source = located(str(model_dir), "models")
    if source is None or not source.is_dir():
        raise ValueError(f"there is no model folder '{model_dir}' to copy the tokenizer from")
    for path in sorted(source.iterdir()):
        if path.is_dir() and path.name == "additional_chat_templates":
            shutil.copytree(path, target / path.name)
        elif is_model_file(path):
            shutil.copyfile(path, target / path.name)


def is_model_file(path: Path) -> bool:
    """Return whether a model folder's file belongs to the model, but is neither weights nor a list
    of them.
    """
    listing = path.name.endswith(".index.json") or path.name.upper().startswith(
        ("README", "LICENSE")
    )
    return path.is_file() and path.suffix in _MODEL_FILES and not listing


def write_pt(path: Path, value: Mapping[str, Any]) -> None:
    """Write plain tensors and values, which `torch.load(weights_only=True)` reads."""
    with naming(path), path.open("wb") as file:
        try:
            torch.save(dict(value), file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # torch's writer hides the disk's error
                raise error.__context__ from error
            raise


def _keep_side_files(old: Path, new: Path) -> None:
    """Copy the files that lay alongside the weights of this step (the probe), and move the weights
    themselves if the checkpoint has no others that the probe is true of.

    They belong to no checkpoint: a later push of this step writes them again.
    """
    for path in old.iterdir():
        if path.is_file():
            shutil.copyfile(path, new / path.name)
    published = old / "actor" / WEIGHTS
    if published.exists() and _lacks_exact(new / "actor"):
        published.rename(new / "actor" / WEIGHTS)


def _lacks_exact(actor: Path) -> bool:
    """Return whether a checkpoint lacks exactly trained weights for other programs: several ranks
    write them in their own files, and the export is rounded, or missing.
    """
    own = actor / WEIGHTS
    files = [own] if own.exists() else weight_files(actor / "huggingface")
    dtypes = {spec.dtype for file in files for spec in OwnFile(file).specs.values()}
    return not dtypes or not dtypes.isdisjoint((torch.bfloat16, torch.float16))


def _move_pointers(
    folder: JobFolder, step: int, run_state: Mapping[str, Any], published: int | None
) -> None:
    explorer = run_state.get("explorer")
    if isinstance(explorer, Mapping) and "step" in explorer:
        states = [explorer["taskset"]] if "taskset" in explorer else []
        meta = {"latest_iteration": explorer["step"], "taskset_states": states}
        write_json(folder.explorer_meta, meta)
    write_json(folder.trainer_meta, {"latest_iteration": step})
    write_text(folder.latest_checkpoint, str(step))
    if published == _published(folder):  # otherwise newer weights are out meanwhile
        write_text(folder.latest_weights, str(step))


def _published(folder: JobFolder) -> int | None:
    return step_in(folder.latest_weights)


@contextmanager
def _removing() -> Iterator[list[Path]]:
    aside: list[Path] = []
    try:
        yield aside
    finally:
        for path in aside:
            shutil.rmtree(path, ignore_errors=True)


def _set_old_aside(folder: JobFolder, step: int, keep: int | None) -> Iterator[Path]:
    """Rename checkpoints beyond `keep`, and weights older than this checkpoint's."""
    older = [s for s in folder.steps() if s < step]
    full = [s for s in older if folder.is_full(s)]
    light = [s for s in older if not folder.is_full(s)]
    surplus = full[: max(len(full) - (keep - 1), 0)] if keep else []
    for old in (*surplus, *light[: -(KEPT_WEIGHTS - 1)]):
        yield set_aside(folder.step_dir(old))
        logger.info("removed %s", folder.step_dir(old))
    for old in [s for s in full if s not in surplus][: -(KEPT_WEIGHTS - 1)]:
        if any(folder.actor_dir(old).glob(rank_file("model", "*", 0))):  # they never write this one
            (folder.actor_dir(old) / WEIGHTS).unlink(missing_ok=True)
