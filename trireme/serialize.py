"""Serialize: experiences as bytes and back, as one safetensors block with a JSON header.

No pickle: what comes from a disk or a wire can hold tensors and JSON values and nothing else.
Rows are laid end to end (one tensor per field, not per experience), so that thousands cost one
copy.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import load, save

from trireme.experience import EID, TOKEN_FIELDS, Experience

FORMAT = "trireme-experiences-1"
_SIDE_TENSORS = ("chosen", "rejected")
_PLAIN = (
    "prompt_length",
    "reward",
    "temperature",
    "stop_reason",
    "truncate_status",
    "prompt_text",
    "response_text",
    "info",
    "metrics",
    "messages",
    "tools",
)


def encode(experiences: Sequence[Experience]) -> bytes:
    """All experiences as bytes. Raises TypeError, naming the id, where `info` is not plain JSON."""
    tensors: dict[str, torch.Tensor] = {}
    if experiences:
        tensors["tokens"] = torch.cat([e.tokens for e in experiences])
    for name in (*TOKEN_FIELDS, *_SIDE_TENSORS):
        rows = [row for e in experiences if (row := getattr(e, name)) is not None]
        if rows:
            tensors[name] = torch.cat(rows)
    for index, e in enumerate(experiences):
        for key, value in (e.multi_modal_inputs or {}).items():
            tensors[f"mm/{index}/{key}"] = value.contiguous()
    header = json.dumps([_header(e) for e in experiences])
    return save(tensors, metadata={"format": FORMAT, "experiences": header})


def decode(data: bytes) -> list[Experience]:
    """The experiences that `encode` wrote. Raises ValueError for bytes that it did not write."""
    length = int.from_bytes(data[:8], "little")
    try:
        metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    except (ValueError, KeyError) as error:
        raise ValueError("these bytes are not experiences written by Trireme") from error
    if metadata.get("format") != FORMAT:
        raise ValueError(f"experience format {metadata.get('format')!r}: expected {FORMAT!r}")
    tensors = load(data)
    offsets = dict.fromkeys(tensors, 0)

    def cut(name: str, length: int) -> torch.Tensor:
        start = offsets[name]
        offsets[name] = start + length
        return tensors[name][start : start + length]

    out = []
    for index, row in enumerate(json.loads(metadata["experiences"])):
        fields: dict[str, Any] = {name: cut(name, size) for name, size in row["sizes"].items()}
        fields.update({name: row[name] for name in _PLAIN if name in row})
        prefix = f"mm/{index}/"
        images = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        out.append(Experience(**fields, eid=EID(*row["eid"]), multi_modal_inputs=images or None))
    return out


def _header(e: Experience) -> dict[str, Any]:
    """What of an experience is JSON, and the length of each of its tensor rows."""
    sizes = {"tokens": len(e.tokens)}
    for name in (*TOKEN_FIELDS, *_SIDE_TENSORS):
        value = getattr(e, name)
        if value is not None:
            sizes[name] = len(value)
    row: dict[str, Any] = {
        "sizes": sizes,
        "eid": [e.eid.batch, e.eid.task, e.eid.run, e.eid.step, e.eid.suffix],
    }
    row.update({name: value for name in _PLAIN if (value := getattr(e, name)) not in (None, {})})
    try:
        json.dumps(row.get("info"))
    except TypeError as error:
        raise TypeError(
            f"experience {e.eid.uid}: info must be plain JSON values: {error}"
        ) from error
    return row
