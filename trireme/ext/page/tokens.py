"""Tokens: reads one rollout token by token, from the copies of experiences and of training values.

Invariants:
- Every row of numbers has the length of `text`; null where a token has none.
- The ratio is that of the step that trained the token, before its update: new over sampled.
"""

from __future__ import annotations

import math
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trireme.buffer import trained
from trireme.buffer.blocks import stored_experiences
from trireme.ext.page.rollouts import open_read_only
from trireme.ext.page.runs import RunFolder, starts_of
from trireme.pictures import BEGIN, PICTURE

if TYPE_CHECKING:
    from trireme.experience import Experience

SETTLED_NS = 2 * 10**9
"""A folder that was changed this long ago has another time of modification after its next
change."""


class Tokens:
    """The tokens of one run's rollouts."""

    def __init__(self, run: RunFolder) -> None:
        """`run` may have no tokens yet."""
        self._run = run
        self._buffer = run.folder / "buffer"
        self._lock = threading.Lock()
        self._steps: dict[str, set[int]] = {}
        self._read_at: dict[int, int] = {}
        """The modification time of each step's file when it was read: a resumed run rewrites it."""
        self._files: Mapping[int, Path] = {}
        """The file of each step."""
        self._changed_at: int | None = None
        """The modification time of their folder when all were read; None: they must be read on."""

    def of(self, eid: str, kind: str = "train") -> dict[str, Any]:
        """Return text, ids and every number of the tokens of a rollout, or of a data set's row.

        Raises ValueError if neither copy has any.
        """
        experience = self.experience(eid)
        learned, step = self._learned(eid)
        if experience is None and learned is None:
            raise ValueError(
                f"no tokens of '{eid}' are stored: expected a copy in a database "
                "(data_processor.experience_pipeline.save_input), or in buffer/trained"
            )
        rows: dict[str, Any] = {}
        if experience is not None:
            ids = experience.tokens.tolist()
            rows["ids"] = [PICTURE if token >= BEGIN else token for token in ids]
            rows["mask"] = experience.mask.int().tolist()
            for name in ("logprobs", "sampler_logprobs", "versions", "advantages"):
                row = getattr(experience, name)
                rows[name] = None if row is None else _plain(row.tolist())
        if learned is not None:
            _add_learned(rows, learned)
        notes = _notes(rows, kind, is_learned=learned is not None)
        mask = rows["mask"]
        if rows.get("logprobs") is not None:  # 0 means none if nothing was sampled
            rows["logprobs"] = [
                v if m else None for v, m in zip(rows["logprobs"], mask, strict=True)
            ]
        return {**rows, "text": self._texts(rows["ids"]), "trained_step": step, "notes": notes}

    def experience(self, eid: str) -> Experience | None:
        """Return the whole experience, from whichever database of the run has it."""
        for path in sorted(self._buffer.glob("*.db")):
            with closing(open_read_only(path)) as database:
                # of pictures only the places are shown
                found = stored_experiences(database, lambda digest: b"", "WHERE msg_id = ?", [eid])
                try:
                    experience = next(found, None)
                except sqlite3.OperationalError as error:
                    if "no such table" not in str(error):
                        raise
                    continue  # a database of something else
            if experience is not None:
                return experience
        return None

    def _learned(self, eid: str) -> tuple[dict[str, Any] | None, int | None]:
        """Return the values of the last train step that used it, and the number of that step."""
        with self._lock:
            self._read_on()
            files = self._files
            steps = sorted(self._steps.get(eid, ()), reverse=True)
        for step in steps:  # some may have been removed since: thinned, or rewound by a resume
            learned = trained.read_trained(files[step], eid) if step in files else None
            if learned is not None:
                return learned, step
        return None, None

    def _read_on(self) -> None:
        """Read the ids in the files that were written since the last time."""
        folder = self._buffer / trained.FOLDER
        changed_at = folder.stat().st_mtime_ns if folder.is_dir() else 0
        if changed_at == self._changed_at:  # a file is renamed into its folder
            return
        self._files = dict(trained.files(folder))
        for step, path in self._files.items():
            written_at = path.stat().st_mtime_ns
            if self._read_at.get(step) != written_at:
                self._read_at[step] = written_at
                for trained_eid in trained.eids_of(path):
                    self._steps.setdefault(trained_eid, set()).add(step)
        is_settled = time.time_ns() - changed_at > SETTLED_NS
        self._changed_at = changed_at if is_settled else None

    def _texts(self, ids: Sequence[int]) -> list[str]:
        path = tokenizer_file(self._run)
        if path is None:
            return [f"{token} " for token in ids]
        return texts_of(path, ids)


def _notes(rows: Mapping[str, Any], kind: str, *, is_learned: bool) -> list[str]:
    """Explain which numbers are missing, if any."""
    if not is_learned and kind == "train":
        return [
            "No train step stored this rollout's tokens (a large step stores only some of its "
            "groups, and older steps are deleted at the limit of copies), or none has trained it "
            "yet: new log-probability, ratio and advantage are unknown."
        ]
    if is_learned and not any(rows["mask"]):
        return ["It has no trained token."]
    if is_learned and all(value is None for value in rows["trained_logprobs"]):
        return ["All its advantages are 0: the step skipped it, and computed no ratio."]
    return []


def _add_learned(rows: dict[str, Any], learned: Mapping[str, Any]) -> None:
    """Spread the numbers of trained tokens over all tokens."""
    total, at = len(learned["tokens"]), learned["positions"].tolist()
    rows.setdefault("ids", learned["tokens"].tolist())
    rows.setdefault("mask", _spread(total, at, [1] * len(at), 0))

    def spread(name: str) -> list[Any] | None:
        return _spread(total, at, _plain(learned[name].tolist())) if name in learned else None

    rows["trained_logprobs"] = spread("trained_logprobs")
    rows["advantages"] = spread("advantages") or rows.get("advantages")
    rows["logprobs"] = rows.get("logprobs") or spread("old_logprobs")
    sampled = (learned.get("versions", np.array(-1)) >= 0).any()  # not the rows of a data set
    rows["versions"] = rows.get("versions") or (spread("versions") if sampled else None)
    if "old_logprobs" in learned:
        difference = learned["trained_logprobs"] - learned["old_logprobs"]
        ratios = [math.exp(min(value, 50.0)) for value in difference.tolist()]
        rows["ratio"] = _spread(total, at, _plain(ratios))


def _spread(total: int, at: Sequence[int], values: Sequence[Any], fill: Any = None) -> list[Any]:
    """Return `total` values: those `at` the given places, and `fill` elsewhere."""
    out = [fill] * total
    for index, value in zip(at, values, strict=True):
        out[index] = value
    return out


def _plain(values: Sequence[Any]) -> list[Any]:
    """Round numbers to six digits for JSON; None for one that is not finite."""

    def plain(value: Any) -> Any:
        if isinstance(value, int):
            return value
        return float(f"{value:.6g}") if math.isfinite(value) else None

    return [plain(value) for value in values]


def tokenizer_file(run: RunFolder) -> Path | None:
    """Return the run's `tokenizer.json`: of a checkpoint, else of the original model."""
    checkpoints = sorted(run.folder.glob("global_step_*/actor/huggingface/tokenizer.json"))
    if checkpoints:
        return checkpoints[-1]
    for start in reversed(starts_of(run)):
        path = Path((start.get("model") or {}).get("path") or "") / "tokenizer.json"
        if path.is_file():
            return path
    return None


@lru_cache(maxsize=4)
def _tokenizer(path: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def texts_of(path: Path, ids: Sequence[int]) -> list[str]:
    """Return the text of each id; text that several ids write together belongs to the last
    of them.
    """
    tokenizer = _tokenizer(path)
    out, pending, before = [], [], ""
    for token in ids:
        if token == PICTURE:
            out.append("▣")
            pending, before = [], ""
            continue
        pending.append(token)
        text = tokenizer.decode(pending, skip_special_tokens=False)
        if text.endswith("\ufffd") and len(pending) < 8:  # the middle of a character
            out.append("")
            continue
        out.append(text[len(before) :] if text.startswith(before) else text)
        # the piece before it shows a decoder whether a space belongs between them
        pending, before = [token], tokenizer.decode([token], skip_special_tokens=False)
    return out
