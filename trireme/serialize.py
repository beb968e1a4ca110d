"""Serialize: converts experiences to bytes and back: one safetensors block with JSON in it.

No pickle: data from disk or network can contain tensors and JSON values and nothing else. All rows
of numbers are concatenated in one tensor of 4-byte words, each in the shortest of three forms
(unchanged; runs of equal words; nonzero words and their positions), bit for bit, ids of pictures as
two words each; a picture's bytes are there once; text is
compressed, since it contains a reply both as text and in its messages. Version 1 can still be read.

A flipped bit is detected: in the text by zlib, in the rest by a checksum (which older bytes lack).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save

from trireme.experience import EID, TOKEN_FIELDS, Experience
from trireme.pictures import BEGIN, Picture

FORMAT = "trireme-experiences-2"
_FORMAT_1 = "trireme-experiences-1"
_ROWS = ("tokens", *TOKEN_FIELDS, "chosen", "rejected")
_COMPACT = json.JSONEncoder(separators=(",", ":")).encode
JSON_FIELDS = ("info", "metrics", "messages", "tools")
"""The fields with JSON values."""
TEXT_FIELDS = ("stop_reason", "truncate_status", "prompt_text", "response_text")
Words = np.ndarray[Any, np.dtype[np.int32]]
_PLAIN = (
    "prompt_length",
    "reward",
    "temperature",
    *TEXT_FIELDS,
    *JSON_FIELDS,
)


class Damaged(ValueError):
    """Bytes that `encode` did not write, or that have changed since."""


Stored = Callable[[str], bytes | None]
"""Returns the bytes of a picture by its digest, from where they are stored; None: not there."""


def encode(experiences: Sequence[Experience], *, pictures: bool = True) -> bytes:
    """Return all experiences as bytes; without `pictures`, which are stored elsewhere, only their
    digests. Raises TypeError, naming the id, if `info` is not plain JSON.
    """
    images: dict[str, torch.Tensor] = {}
    for index, e in enumerate(experiences):
        for key, value in (e.multi_modal_inputs or {}).items():
            images[f"mm/{index}/{key}"] = value.contiguous()
        for picture in e.pictures if pictures else ():  # once, however many experiences show it
            data = torch.frombuffer(bytearray(picture.data), dtype=torch.uint8)
            images[f"picture/{picture.digest}"] = data
    forms, words = [], []
    for name in _ROWS:
        rows = [row for e in experiences if (row := getattr(e, name)) is not None]
        if rows:
            form, packed = _packed(rows[0] if len(rows) == 1 else torch.cat(rows))
            forms.append([name, form, len(packed)])
            words.append(packed)
    held = dict(images)
    if words:
        held["words"] = torch.from_numpy(np.concatenate(words))
    header = {
        "rows": forms,
        "crc": _checksum(held),
        "experiences": [_header(e) for e in experiences],
    }
    text = zlib.compress(_as_json(header, experiences), 1)
    if words and not images:
        return _block(held["words"].numpy(), text)
    tensors = held | {"json": torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    return save(tensors, metadata={"format": FORMAT})


def _block(words: Words, text: bytes) -> bytes:
    """Return these two in the form of safetensors' `save`, byte for byte, in a fraction of its
    time.
    """
    size = words.nbytes
    entries = {
        "__metadata__": {"format": FORMAT},
        "words": {"dtype": "I32", "shape": [len(words)], "data_offsets": [0, size]},
        "json": {"dtype": "U8", "shape": [len(text)], "data_offsets": [size, size + len(text)]},
    }
    header = _COMPACT(entries).encode()
    header += b" " * (-len(header) % 8)
    return b"".join((len(header).to_bytes(8, "little"), header, words.tobytes(), text))


def _checksum(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the CRC-32 of the names and bytes of all tensors except the text's."""
    crc = 0
    for name in sorted(tensors.keys() - {"json"}):
        crc = zlib.crc32(name.encode(), crc)
        crc = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy(force=True).data, crc)
    return crc


def decode(data: bytes, stored: Stored = lambda digest: None) -> list[Experience]:
    """Return the experiences that `encode` wrote; `stored` has the pictures that are not in the
    bytes. Raises Damaged for bytes that it did not write, and for a picture that is missing.
    """
    try:
        return _decoded(data, stored)
    except Damaged:
        raise
    except Exception as error:  # what a flipped bit makes of lengths, names and numbers is endless
        raise Damaged(f"{type(error).__name__}: {error}".partition("\n")[0]) from error


def _decoded(data: bytes, stored: Stored) -> list[Experience]:
    length = int.from_bytes(data[:8], "little")
    try:
        metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    except (ValueError, KeyError) as error:
        raise Damaged("these bytes are not experiences written by Trireme") from error
    if metadata.get("format") not in (FORMAT, _FORMAT_1):
        raise Damaged(f"experience format {metadata.get('format')!r}: expected {FORMAT!r}")
    tensors = load(data)
    if metadata["format"] == _FORMAT_1:  # one tensor per field, and the JSON in the metadata
        headers, rows = json.loads(metadata["experiences"]), tensors
    else:
        text = json.loads(zlib.decompress(tensors["json"].numpy().tobytes()))
        if text.get("crc") not in (None, _checksum(tensors)):
            raise Damaged("its checksum is another")
        headers, rows = text["experiences"], {}
        sizes = [count for _, _, count in text["rows"]]
        parts = tensors["words"].split(sizes) if sizes else ()
        for (name, form, _), part in zip(text["rows"], parts, strict=True):
            rows[name] = _unpacked(name, form, part.numpy())
    return _experiences(headers, rows, tensors, stored)


def _experiences(
    headers: Sequence[dict[str, Any]],
    rows: dict[str, torch.Tensor],
    tensors: dict[str, torch.Tensor],
    stored: Stored,
) -> list[Experience]:
    """Cut the concatenated rows; `tensors` has the images, `stored` those that are elsewhere."""
    offsets = dict.fromkeys(rows, 0)
    pictures: dict[str, Picture] = {}

    def picture_of(digest: str, tokens: int, grid: Sequence[int]) -> Picture:
        if digest not in pictures:
            held = tensors.get(f"picture/{digest}")
            data = stored(digest) if held is None else held.numpy().tobytes()
            if data is None:
                raise Damaged(f"its picture {digest:.16} is missing")
            pictures[digest] = Picture(data, digest, tokens, tuple(grid))
        return pictures[digest]

    def cut(name: str, length: int) -> torch.Tensor:
        start = offsets[name]
        offsets[name] = start + length
        return rows[name][start : start + length]

    out = []
    for index, header in enumerate(headers):
        fields: dict[str, Any] = {name: cut(name, size) for name, size in header["sizes"].items()}
        fields.update({name: header[name] for name in _PLAIN if name in header})
        prefix = f"mm/{index}/"
        images = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        seen = [picture_of(*each) for each in header.get("pictures", ())]
        out.append(
            Experience(
                **fields, eid=EID(*header["eid"]), multi_modal_inputs=images or None, pictures=seen
            )
        )
    return out


def _header(e: Experience) -> dict[str, Any]:
    """The JSON part of an experience, with the length of each of its rows."""
    rows = {name: row for name in _ROWS if (row := getattr(e, name)) is not None}
    row: dict[str, Any] = {
        "sizes": {name: len(row) for name, row in rows.items()},
        "eid": [e.eid.batch, e.eid.task, e.eid.run, e.eid.step, e.eid.suffix],
    }
    row.update({name: value for name in _PLAIN if (value := getattr(e, name)) not in (None, {})})
    if e.pictures:
        row["pictures"] = [[each.digest, each.tokens, each.grid] for each in e.pictures]
    return row


def _as_json(header: dict[str, Any], experiences: Sequence[Experience]) -> bytes:
    try:
        return json.dumps(header).encode()
    except TypeError:
        for e in experiences:
            try:
                json.dumps(e.info)
            except TypeError as error:
                raise TypeError(
                    f"experience {e.eid.uid}: info must be plain JSON values: {error}"
                ) from error
        raise


def _packed(row: torch.Tensor) -> tuple[str, Words]:
    """Return form and words of a row: `all` of them; `runs`, their values, then lengths; or `some`:
    size, number and lengths of runs of 0 and not 0 (0 first), then the words that are not 0.
    """
    plain = row.numpy(force=True)
    if plain.dtype == np.int64:
        words = plain.astype(np.int32)
        if (words != plain).any():
            if not ((words == plain) | (plain >= BEGIN)).all():
                raise ValueError(f"token ids go up to {plain.max()}: expected less than 2**31")
            return "wide", plain.view(np.int32)
        return "all", words
    words = plain.view(np.int32) if plain.dtype == np.float32 else plain.astype(np.int32)
    size = len(words)
    # borders are mostly few: lists of them take less time than arrays
    before = (words[1:] != words[:-1]).nonzero()[0]
    if 4 * (len(before) + 1) < size:
        starts = [0, *(n + 1 for n in before.tolist())]
        values = [words.item(n) for n in starts]
        return "runs", np.array(values + _lengths(starts, size), np.int32)
    there = words != 0
    before = (there[1:] != there[:-1]).nonzero()[0]
    values = words[there]
    if len(values) + len(before) + 4 > 0.9 * size:  # it would save next to nothing
        return "all", words
    starts = [0, 0] if there.item(0) else [0]  # a row may begin without zeros
    starts += [n + 1 for n in before.tolist()]
    head = [size, len(starts), *_lengths(starts, size)]
    return "some", np.concatenate((np.array(head, np.int32), values))


def _lengths(starts: list[int], size: int) -> list[int]:
    """Return the lengths of the runs of a row that begin at `starts`."""
    return [end - start for start, end in pairwise([*starts, size])]


def _unpacked(name: str, form: str, words: Words) -> torch.Tensor:
    if form == "runs":
        words = np.repeat(words[: len(words) // 2], words[len(words) // 2 :])
    elif form == "some":
        size, runs = words[:2].tolist()
        there = np.repeat(np.arange(runs) % 2 == 1, words[2 : 2 + runs])
        values, words = words[2 + runs :], np.zeros(size, np.int32)
        words[there] = values
    elif form == "wide":
        return torch.from_numpy(words.copy().view(np.int64))
    kind = TOKEN_FIELDS.get(name, torch.int64)
    row = torch.from_numpy(words)
    return row.view(torch.float32) if kind == torch.float32 else row.to(kind)


_WIRE_ROWS = ("mask", "logprobs", "sampler_logprobs", "versions", "loss_weight")
_WIRE_FIELDS = (
    *("prompt_length", "temperature", "stop_reason", "truncate_status", "reward"),
    *("prompt_text", "response_text", "metrics", "info"),
)


def experience_to_wire(experience: Experience) -> dict[str, Any]:
    """Convert an experience to JSON: token lists, and the sample's other data."""
    rows = {name: getattr(experience, name) for name in ("tokens", *_WIRE_ROWS)}
    lists = {name: None if row is None else row.tolist() for name, row in rows.items()}
    return lists | {name: getattr(experience, name) for name in _WIRE_FIELDS}


def experience_of_wire(wire: Mapping[str, Any]) -> Experience:
    """Convert the JSON of `experience_to_wire` back to an experience."""
    return Experience(wire["tokens"], **{name: wire[name] for name in (*_WIRE_ROWS, *_WIRE_FIELDS)})
