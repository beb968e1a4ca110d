"""Serialize: converts experiences to bytes and back: one safetensors block with JSON in it.

No pickle: data from disk or network can contain tensors and JSON values and nothing else. All rows
of numbers are concatenated in one tensor of 4-byte words, each in the shortest of three forms
(unchanged; runs of equal words; nonzero words and their positions), bit for bit, ids of pictures as
two words each; a picture's bytes, and the experts that computed a sample's tokens, are there once;
text is compressed, since it contains a reply both as text and in its messages. Version 1 can still
be read.

A flipped bit is detected: in the text by zlib, in the rest by a checksum (which older bytes lack).
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load, save

from trireme.experience import EID, TOKEN_FIELDS, Experience
from trireme.pictures import BEGIN, Picture

FORMAT = "trireme-experiences-2"
_FORMAT_1 = "trireme-experiences-1"
_ROWS = ("tokens", *TOKEN_FIELDS, "chosen", "rejected")
JSON_FIELDS = ("info", "metrics", "messages", "tools")
"""The fields with JSON values."""
TEXT_FIELDS = ("stop_reason", "truncate_status", "prompt_text", "response_text")
TOKENS_TOGETHER = 2**17
"""Tokens whose rows are packed together: some megabytes."""
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
    return encode_each([experiences], pictures=pictures)[0]


def encode_each(groups: Sequence[Sequence[Experience]], *, pictures: bool = True) -> list[bytes]:
    """Return `encode` of each group, for small groups in a fraction of its time: an array operation
    takes as long for the row of one as for the rows of many together.
    """
    out: list[bytes] = []
    start = tokens = 0
    for number, group in enumerate(groups, 1):
        tokens += sum(e.tokens.shape[0] for e in group)
        if tokens >= TOKENS_TOGETHER or number == len(groups):
            out += _encode_together(groups[start:number], pictures)
            start, tokens = number, 0
    return out


def _encode_together(groups: Sequence[Sequence[Experience]], pictures: bool) -> list[bytes]:
    forms: list[list[tuple[str, str, int]]] = [[] for _ in groups]
    words: list[list[bytes]] = [[] for _ in groups]
    for name in _ROWS:
        rows = [[row for e in group if (row := getattr(e, name)) is not None] for group in groups]
        there = [number for number, some in enumerate(rows) if some]
        sizes = [sum(row.shape[0] for row in rows[number]) for number in there]
        each = [row for number in there for row in rows[number]]
        kind = TOKEN_FIELDS.get(name, torch.int64)
        for number, (form, packed) in zip(there, _packed(each, sizes, kind), strict=True):
            forms[number].append((name, form, len(packed) // 4))
            words[number].append(packed)
    return [
        _encoded(group, some, b"".join(packed), pictures)
        for group, some, packed in zip(groups, forms, words, strict=True)
    ]


def _encoded(
    experiences: Sequence[Experience],
    forms: list[tuple[str, str, int]],
    words: bytes,
    pictures: bool,
) -> bytes:
    """Return the bytes of experiences whose rows are packed."""
    images: dict[str, torch.Tensor] = {}
    for index, e in enumerate(experiences):
        for key, value in (e.multi_modal_inputs or {}).items():
            images[f"mm/{index}/{key}"] = value.contiguous()
        if e.routed_experts is not None:
            images[f"routed_experts/{index}"] = e.routed_experts.contiguous()
        for picture in e.pictures if pictures else ():  # once, however many experiences show it
            data = torch.frombuffer(bytearray(picture.data), dtype=torch.uint8)
            images[f"picture/{picture.digest}"] = data
    header = {
        "rows": forms,
        "crc": _checksum(images, words),
        "experiences": [_header(e) for e in experiences],
    }
    text = zlib.compress(_as_json(header, experiences), 1)
    if words and not images:
        return _block(words, text)
    tensors = images | {"json": torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    if words:
        tensors["words"] = torch.frombuffer(bytearray(words), dtype=torch.int32)
    return save(tensors, metadata={"format": FORMAT})


def _block(words: bytes, text: bytes) -> bytes:
    """Return these two in the form of safetensors' `save`, byte for byte, in a fraction of its
    time.
    """
    size, end = len(words), len(words) + len(text)
    header = (
        f'{{"__metadata__":{{"format":"{FORMAT}"}},'
        f'"words":{{"dtype":"I32","shape":[{size // 4}],"data_offsets":[0,{size}]}},'
        f'"json":{{"dtype":"U8","shape":[{len(text)}],"data_offsets":[{size},{end}]}}}}'
    ).encode()
    header += b" " * (-len(header) % 8)
    return b"".join((len(header).to_bytes(8, "little"), header, words, text))


def _checksum(tensors: Mapping[str, torch.Tensor], words: bytes = b"") -> int:
    """Return the CRC-32 of the names and bytes of all tensors except the text's. `words` are those
    of the tensor of that name, the last by name, where they are bytes.
    """
    crc = 0
    for name in sorted(tensors.keys() - {"json"}):
        crc = zlib.crc32(name.encode(), crc)
        crc = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy(force=True).data, crc)
    return zlib.crc32(words, zlib.crc32(b"words", crc)) if words else crc


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
                **fields,
                eid=EID(*header["eid"]),
                multi_modal_inputs=images or None,
                pictures=seen,
                routed_experts=tensors.get(f"routed_experts/{index}"),
            )
        )
    return out


def _header(e: Experience) -> dict[str, Any]:
    """The JSON part of an experience, with the length of each of its rows."""
    sizes = {name: each.shape[0] for name in _ROWS if (each := getattr(e, name)) is not None}
    row: dict[str, Any] = {
        "sizes": sizes,
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


def _packed(
    rows: Sequence[torch.Tensor], sizes: Sequence[int], kind: torch.dtype
) -> Iterator[tuple[str, bytes]]:
    """Yield form and words of each row; the rows are the given ones, joined to these sizes and
    cast to `kind`, since user code may have left another dtype.

    A form is `all` of them; `runs`, their values, then lengths; `some`: size, number and lengths of
    runs of 0 and not 0 (0 first), then the words that are not 0; or `wide`: two words each.
    """
    if not all(sizes):
        packed = _packed(rows, [size for size in sizes if size], kind)
        yield from (next(packed) if size else ("all", b"") for size in sizes)
        return
    if not sizes:
        return
    joined = rows[0] if len(rows) == 1 else torch.cat(list(rows))
    plain = joined.to(kind).numpy(force=True)
    each = np.array(sizes, np.int64)
    ends = each.cumsum()
    starts = ends - each
    if kind == torch.int64:
        yield from (_ids(plain[start:end]) for start, end in zip(starts, ends, strict=True))
        return
    words = plain.view(np.int32) if kind == torch.float32 else plain.astype(np.int32)
    alike, there = _Runs.of(words, starts), _Runs.of(words != 0, starts)
    values = words[words != 0]
    before = [0, *np.cumsum(np.add.reduceat(words != 0, starts, dtype=np.int64)).tolist()]
    for number, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        size, (first, last) = end - start, alike.places[number]
        if 4 * (last - first) < size:
            lengths = alike.lengths[first:last]
            yield "runs", words[alike.starts[first:last]].tobytes() + lengths.tobytes()
            continue
        first, last = there.places[number]
        held = before[number + 1] - before[number]
        if held + last - first + 3 > 0.9 * size:  # it would save next to nothing
            yield "all", words[start:end].tobytes()
            continue
        leading = [0] if words.item(start) else []  # a row may begin without zeros
        head = np.array([size, last - first + len(leading), *leading], np.int32)
        lengths = there.lengths[first:last]
        own = values[before[number] : before[number + 1]]
        yield "some", head.tobytes() + lengths.tobytes() + own.tobytes()


class _Runs(NamedTuple):
    """The runs of equal entries in rows that follow one another."""

    starts: np.ndarray[Any, np.dtype[np.int64]]
    """The first place of each run."""
    lengths: Words
    places: list[tuple[int, int]]
    """The first run of each row, and the first that is not its own."""

    @classmethod
    def of(cls, entries: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]) -> _Runs:
        """Find the runs of entries; a row begins at each of `rows`."""
        begins = np.empty(len(entries), bool)
        np.not_equal(entries[1:], entries[:-1], out=begins[1:])
        begins[rows] = True
        starts = begins.nonzero()[0]
        lengths = np.diff(starts, append=len(entries)).astype(np.int32)
        firsts = [*np.searchsorted(starts, rows).tolist(), len(starts)]
        return cls(starts, lengths, list(pairwise(firsts)))


def _ids(plain: np.ndarray[Any, Any]) -> tuple[str, bytes]:
    words = plain.astype(np.int32)
    if (words == plain).all():
        return "all", words.tobytes()
    if not ((words == plain) | (plain >= BEGIN)).all():
        raise ValueError(f"token ids go up to {plain.max()}: expected less than 2**31")
    return "wide", plain.tobytes()


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


def array_to_wire(array: np.ndarray) -> dict[str, Any]:
    """Convert an array of numbers to JSON."""
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": data}


def array_from_wire(wire: Mapping[str, Any]) -> np.ndarray:
    """Return the array that `array_to_wire` converted. Raises ValueError if its size is wrong."""
    data = base64.b64decode(wire["data"])
    return np.frombuffer(data, np.dtype(wire["dtype"])).reshape(wire["shape"])


_WIRE_ROWS = ("mask", "logprobs", "sampler_logprobs", "versions", "loss_weight")
_WIRE_FIELDS = (
    *("prompt_length", "temperature", "stop_reason", "truncate_status", "reward"),
    *("prompt_text", "response_text", "metrics", "info"),
)


def experience_to_wire(experience: Experience) -> dict[str, Any]:
    """Convert an experience to JSON: token lists, the sample's other data, and its pictures."""
    rows = {name: getattr(experience, name) for name in ("tokens", *_WIRE_ROWS)}
    lists = {name: None if row is None else row.tolist() for name, row in rows.items()}
    seen = [picture_to_wire(picture) for picture in experience.pictures]
    wire = lists | {name: getattr(experience, name) for name in _WIRE_FIELDS} | {"pictures": seen}
    if (routing := experience.routed_experts) is not None:
        wire["routed_experts"] = array_to_wire(routing.numpy(force=True))
    return wire


def experience_of_wire(wire: Mapping[str, Any]) -> Experience:
    """Convert the JSON of `experience_to_wire` back to an experience."""
    fields = {name: wire[name] for name in (*_WIRE_ROWS, *_WIRE_FIELDS)}
    pictures = [picture_of_wire(picture) for picture in wire.get("pictures", ())]
    routing = wire.get("routed_experts")
    routed_experts = None if routing is None else torch.tensor(array_from_wire(routing))
    return Experience(wire["tokens"], **fields, pictures=pictures, routed_experts=routed_experts)


def picture_to_wire(picture: Picture) -> dict[str, Any]:
    """Convert a picture to JSON; its file is in base64."""
    data = base64.b64encode(picture.data).decode()
    about = {"digest": picture.digest, "tokens": picture.tokens, "grid": list(picture.grid)}
    return about | {"data": data}


def picture_of_wire(wire: Mapping[str, Any]) -> Picture:
    """Convert the JSON of `picture_to_wire` back to a picture. Raises ValueError for data that is
    not in base64.
    """
    data = base64.b64decode(wire["data"], validate=True)
    return Picture(data, wire["digest"], wire["tokens"], tuple(wire["grid"]))
