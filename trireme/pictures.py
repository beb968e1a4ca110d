"""Pictures: images in conversations, as token ids that no vocabulary has.

A picture stands in a prompt as a run of token ids at BEGIN and above, which follow from its digest
and from nothing else. So wherever ids are compared (packed prefixes, prefix caches, shared prompts,
the record of a rollout), two pictures differ although they take the same place under the same text,
and one picture is itself everywhere. The model's own placeholder appears only where a program that
is not ours gets the ids. What a picture looks like to a model is computed by a reader (text side)
and by a vision (device side), which an extension makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, Protocol

BEGIN = 1 << 62
"""The first id of a picture's token; a vocabulary's ids are far below."""
_INDEX_BITS = 14
MOST_TOKENS = 1 << _INDEX_BITS
"""The most tokens of a picture."""
_NUMBER_DIGITS = 12
"""Hexadecimal digits of a digest that are part of an id: 48 bits."""
MOST_KNOWN = 4096
"""The most digests that are remembered as known to another side."""
PICTURE = -1
"""Stands for a picture's token in files and pages for people."""
IMAGES = ("images", "image")
"""Columns with a row's pictures, one or a list, if `format.image_key` names none."""
_SHA = "sha256:"
IMAGE_TAG = "<image>"
"""Stands in a prompt's text where a picture of the row goes."""
IMAGE_PARTS = ("image", "image_url", "input_image")
"""Types of a content's part that shows a picture: of chat templates, and of OpenAI's two APIs."""
_MEDIA_TYPES = {
    b"\x89PNG": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
}
"""The beginnings of files that browsers and OpenAI's API show."""

Message = Mapping[str, Any]
Read = Callable[[Any], Any]
"""Reads a picture, however it is given."""


@dataclass(frozen=True)
class Picture:
    """An encoded image, as a certain model's processor sees it."""

    data: bytes = field(repr=False)
    """The file: PNG, JPEG or another format that Pillow reads."""
    digest: str
    """SHA-256 of `data` and of the processor's settings, in hexadecimal digits."""
    tokens: int
    """The number of tokens that it takes in a prompt."""
    grid: tuple[int, ...]
    """The patches that it is cut into: time, height and width."""

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= MOST_TOKENS:
            raise ValueError(
                f"a picture takes {self.tokens} tokens: expected 1 to {MOST_TOKENS}; "
                "a smaller max_pixels of the model's processor makes it smaller"
            )

    @cached_property
    def first(self) -> int:
        """The id of its first token; the others follow."""
        return BEGIN + (int(self.digest[:_NUMBER_DIGITS], 16) << _INDEX_BITS)

    @property
    def ids(self) -> range:
        """The ids of its tokens."""
        return range(self.first, self.first + self.tokens)


Pictures = Mapping[int, Picture]
"""Pictures by the id of their first token."""


class PictureReader(Protocol):
    """Reads pictures for a model's prompts; made by a function of PICTURE_READERS."""

    placeholder: int
    """The token that stands for a picture where the chat template has one."""
    unsampled: Sequence[int]
    """Token ids that are not sampled in a conversation that shows a picture."""

    def read(self, source: Any) -> Picture:
        """Return a picture from bytes, a file, a data URL or an image of Pillow. Raises ValueError
        for anything else, and for one that is damaged or too large.
        """
        ...

    def tensors(self, picture: Picture) -> Mapping[str, Any]:
        """Return what the model's image processor makes of a picture, as tensors by the names that
        engines of other programs know, each with a first axis for pictures or patches.
        """
        ...

    def template(self, text: str) -> str:
        """Return a chat template that writes the placeholder, and what the model expects around it,
        where the chat template `text` shows a picture; `text` itself if it does so already.
        """
        ...


class KnownPictures:
    """The pictures that another side has, so that they are not sent again."""

    def __init__(self) -> None:
        self._digests: dict[str, None] = {}

    def lacking(self, pictures: Iterable[Picture]) -> list[Picture]:
        """Return those that the other side is not known to have, each once."""
        found = {each.digest: each for each in pictures if each.digest not in self._digests}
        return [*found.values()]

    def add(self, pictures: Iterable[Picture]) -> None:
        """Note that the other side has these; past MOST_KNOWN the oldest are forgotten."""
        self._digests.update(dict.fromkeys(each.digest for each in pictures))
        for digest in [*self._digests][: max(0, len(self._digests) - MOST_KNOWN)]:
            del self._digests[digest]


def first_of(token: int) -> int:
    """Return the id of the first token of the picture that a token belongs to."""
    return token - (token - BEGIN) % MOST_TOKENS


def album(pictures: Iterable[Picture]) -> dict[int, Picture]:
    """Return pictures by their first ids. Raises ValueError if two have the same ids."""
    found: dict[int, Picture] = {}
    for picture in pictures:
        other = found.setdefault(picture.first, picture)
        if other.digest != picture.digest:
            raise ValueError(
                f"pictures {other.digest[:16]} and {picture.digest[:16]} would have the same token "
                "ids: re-encode one of them"
            )
    return found


def shown(ids: Iterable[int], pictures: Pictures) -> dict[int, Picture]:
    """Return those of some pictures whose tokens are among `ids`. Raises ValueError for a picture's
    token that belongs to none of them.
    """
    found: dict[int, Picture] = {}
    for token in ids:
        if token < BEGIN or (first := first_of(token)) in found:
            continue
        if first not in pictures:
            raise ValueError(f"a prompt shows a picture that did not come with it (token {token})")
        found[first] = pictures[first]
    return found


def placed(ids: Sequence[int], pictures: Sequence[Picture], placeholder: int) -> list[int]:
    """Return ids with each placeholder replaced by the tokens of a picture, in order. Raises
    ValueError unless there are as many.
    """
    refuse_other_places(len(pictures), sum(token == placeholder for token in ids))
    following = iter(pictures)
    out: list[int] = []
    for token in ids:
        out += next(following).ids if token == placeholder else (token,)
    return out


def refuse_other_places(pictures: int, places: int) -> None:
    """Raise ValueError unless a conversation's text has a place for each of its pictures."""
    if places != pictures:
        raise ValueError(
            f"a conversation has {pictures} pictures, and its text has {places} places for "
            "one: either a message's text contains the placeholder itself, or the chat template "
            "leaves pictures out"
        )


def with_placeholders(ids: Iterable[int], placeholder: int) -> list[int]:
    """Return ids with each picture as one placeholder, for decoding and for other programs."""
    out: list[int] = []
    before = -1
    for token in ids:
        if token < BEGIN:
            out.append(token)
        elif token == first_of(token) or before != token - 1:
            out.append(placeholder)
        before = token
    return out


def outside(ids: Iterable[int], placeholder: int) -> list[int]:
    """Return ids as other programs know them: the placeholder for each token of a picture."""
    return [placeholder if token >= BEGIN else token for token in ids]


def legible(ids: Iterable[int], decode: Callable[[list[int]], str]) -> str:
    """Return ids as text for people, pictures as `[image, 6 tokens]`."""
    parts = []
    for seen, group in groupby(ids, lambda token: token >= BEGIN):
        tokens = list(group)
        parts.append(f"[image, {len(tokens)} tokens]" if seen else decode(tokens))
    return "".join(parts)


def source_in(part: Mapping[str, Any]) -> Any:
    """Return the source of the picture that a content's part shows; the part itself if it has none
    under a known name.
    """
    return next((part[name] for name in ("image", "image_url", "url") if part.get(name)), part)


def read_part(part: Mapping[str, Any], read: Read) -> dict[str, Any]:
    """Return a content's part with its picture read, in the form of chat templates; the part as it
    is if `read` returns it.
    """
    seen = read(source_in(part))
    return dict(part) if seen is part else {"type": "image", "image": seen}


def with_read(message: Message, read: Read) -> dict[str, Any]:
    """Return a message with the pictures of its content read."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    parts = [read_part(part, read) if is_picture(part) else part for part in content]
    return {**message, "content": parts}


def is_picture(part: Any) -> bool:
    """Return whether a part of a message's content is a picture."""
    return isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS


def pictures_in(messages: Sequence[Message]) -> list[Picture]:
    """Return the pictures of plain messages, in order."""
    contents = [message.get("content") for message in messages]
    return [
        source_in(part)
        for content in contents
        if isinstance(content, list)
        for part in content
        if is_picture(part)
    ]


def media_type(data: bytes) -> str | None:
    """Return the media type of an image file that browsers and OpenAI's API show, else None."""
    return next((kind for start, kind in _MEDIA_TYPES.items() if data.startswith(start)), None)


def digest_in(part: Mapping[str, Any]) -> str:
    """Return the digest of the picture that a part of a plain message shows, or of one as JSON."""
    source = source_in(part)
    if isinstance(source, Picture):
        return source.digest
    return source.removeprefix(_SHA) if isinstance(source, str) else ""


def as_json_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return plain messages as JSON: a picture is named by its digest."""
    return [
        {
            **message,
            "content": [
                {"type": "image", "image": _SHA + part["image"].digest}
                if part["type"] == "image"
                else part
                for part in message["content"]
            ],
        }
        if isinstance(message.get("content"), list)
        else dict(message)
        for message in messages
    ]


def content_text(
    message: Message, mark: Callable[[Mapping[str, Any]], str] = lambda part: "[image]"
) -> str:
    """Return a message's content as text; a picture is the `mark` of its part."""
    content = message.get("content") or ""
    if not isinstance(content, list):
        return str(content)
    return "".join(mark(p) if is_picture(p) else str(p.get("text") or "") for p in content)


def tagged(messages: Sequence[Message], images: Sequence[Any]) -> list[dict[str, Any]]:
    """Return a conversation with a tag for each image: an `<image>` in a text, or a part
    `{"type": "image"}` that names no picture. Those without one come first in the first message of
    the user. Raises ValueError for more tags than images, and where no message can show them.
    """
    tags = sum(_tags(message) for message in messages)
    if tags > len(images):
        raise ValueError(
            f"a conversation has {tags} tags {IMAGE_TAG}, and its row {len(images)} pictures"
        )
    surplus = len(images) - tags
    out = [dict(message) for message in messages]
    first = next((message for message in out if message.get("role") == "user"), None)
    if surplus and first is None:
        raise ValueError(f"the row has {surplus} pictures, and no message of the user shows them")
    if surplus and first is not None:
        content = first.get("content")
        parts = isinstance(content, list)
        first["content"] = (
            [*({"type": "image"} for _ in range(surplus)), *content]
            if parts
            else IMAGE_TAG * surplus + str(content or "")
        )
    return out


def with_images(messages: Sequence[Message], images: Sequence[Any]) -> list[dict[str, Any]]:
    """Return a conversation with images in place of its tags, in order; images without a tag are
    left out. Raises ValueError for more tags than images.
    """
    following = iter(images)
    out = []
    for message in messages:
        if _tags(message):
            try:
                message = {**message, "content": _parts(message["content"], following)}
            except StopIteration:
                tags = sum(map(_tags, messages))
                raise ValueError(
                    f"a conversation has {tags} tags {IMAGE_TAG}, and {len(images)} pictures"
                ) from None
        out.append(dict(message))
    return out


def _is_tag(part: Any) -> bool:
    """Return whether a content's part stands for a picture of the row."""
    return is_picture(part) and source_in(part) is part


def _tags(message: Message) -> int:
    content = message.get("content")
    if isinstance(content, list):
        return sum(map(_is_tag, content))
    return content.count(IMAGE_TAG) if isinstance(content, str) else 0


def _parts(content: str | list[Any], images: Iterator[Any]) -> list[dict[str, Any]]:
    """Return a content with the next image in place of each tag."""
    if isinstance(content, list):
        return [{"type": "image", "image": next(images)} if _is_tag(p) else p for p in content]
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(content.split(IMAGE_TAG)):
        if number:
            parts.append({"type": "image", "image": next(images)})
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts


def with_text(message: Message, text: str) -> dict[str, Any]:
    """Return a user's plain message with another text, which shows the message's pictures: at its
    tags, else before it. Raises ValueError for more tags than pictures.
    """
    changed, seen = {**message, "content": text}, pictures_in([message])
    return with_images(tagged([changed], seen), seen)[0] if seen else changed


def with_row(
    messages: Sequence[Message], row: Mapping[str, Any], key: str | None, *, tags: bool = False
) -> list[dict[str, Any]]:
    """Return a conversation with a row's images in their places, or only with a tag for each: see
    `images_of` and `tagged`. Raises ValueError, as that does, and for tags without images where a
    `key` names their column.
    """
    images = images_of(row, key)
    if not images and not key:
        return [dict(message) for message in messages]
    found = tagged(messages, images)
    return found if tags else with_images(found, images)


def images_of(row: Mapping[str, Any], key: str | None) -> list[Any]:
    """Return the pictures of a row: those of the column `key`, else of a column of IMAGES."""
    names = IMAGES if key is None else (key,)
    value = next((row[name] for name in names if row.get(name) is not None), None)
    if value is None or (isinstance(value, str | list | tuple) and not value):
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
