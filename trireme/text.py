"""Text: what becomes of text that files, databases, tokenizers and terminals do not take.

Models, tools, rewards, rows and clients give half a surrogate pair (`json.loads` makes one of
`"\\ud83d"`), NUL, and escape sequences that command a terminal. None of it ends a run:
- what is kept to be read again is JSON, which holds every text as it is (`as_json`);
- ids and the columns of text that databases have are for people: `storable` names what a database
  refuses;
- log files and the terminal get `shown`, all that is printed by `say`;
- a tokenizer gets `joined`, where U+FFFD stands for half a pair.
Two halves that meet are one character, as JSON and UTF-16 read them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, TextIO

_HALF = re.compile(r"[\ud800-\udfff]")
_NUL = "\u2400"
_BIDI = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_NOT_SHOWN = {
    **{n: chr(0x2400 + n) for n in range(32) if chr(n) not in "\t\n"},
    0x7F: "\u2421",
    **{n: f"\\x{n:02x}" for n in range(0x80, 0xA0)},
    **{ord(c): f"\\u{ord(c):04x}" for c in f"{_BIDI}\u2028\u2029"},
}
"""Control characters by their pictures; what turns or breaks a line unseen by its number."""
_PLAIN = re.compile(r"[\t\n\x20-\x7e]*")


def as_json(value: Any, **options: Any) -> str:
    """JSON with its characters as they are, half a surrogate pair as `\\ud83d`: `json.loads` gives
    the same texts. `options` are those of `json.dumps`.
    """
    return _escaped(json.dumps(value, ensure_ascii=False, **options))


def has_half(value: Any) -> bool:
    """Return whether a JSON value holds half a surrogate pair, in a text or a key."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return True
    return False


def storable(text: str) -> str:
    """`text` as every database takes it: NUL as its picture, half a surrogate pair as `\\ud83d`."""
    return _escaped(text).replace("\0", _NUL)


def shown(text: str) -> str:
    """`text` for a terminal: control characters by their pictures, but for tabs and line ends."""
    if _PLAIN.fullmatch(text):
        return text
    return _escaped(text.replace("\r\n", "\n")).translate(_NOT_SHOWN)


def joined(text: str) -> str:
    """`text` as a tokenizer takes it: halves that meet are one character, others U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def all_joined(value: Any) -> Any:
    """A JSON value with each of its texts `joined`."""
    if isinstance(value, str):
        return joined(value)
    if isinstance(value, Mapping):
        return {all_joined(key): all_joined(inner) for key, inner in value.items()}
    return [all_joined(inner) for inner in value] if isinstance(value, list | tuple) else value


def say(
    *parts: object,
    sep: str = " ",
    end: str = "\n",
    file: TextIO | None = None,
    flush: bool = False,
) -> None:
    """`print`, for all that may hold the words of others."""
    print(shown(sep.join(map(str, parts))), end=end, file=file, flush=flush)


def _escaped(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return _HALF.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    return text


_PASSWORD = re.compile(
    r"(\w://[^\s:/@?]*:(?=[^\s@'\"]+@)|(?:\b|_|ssl)pass(?:word|wd)?=)"
    r"(?:'(?:\\.|[^'\\])*'|\"[^\"]*\"|[^\s@&'\"]+)",
    re.IGNORECASE,
)


def hide_passwords(text: str) -> str:
    """`text` with the passwords of the URLs and connection strings in it replaced by stars."""
    return _PASSWORD.sub(r"\1***", text) if "@" in text or "=" in text else text
