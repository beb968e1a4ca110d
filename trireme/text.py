"""Text: converts text that files, databases, tokenizers and terminals do not accept.

Models, tools, rewards, rows and clients may produce half a surrogate pair (`json.loads` makes one
of `"\\ud83d"`), NUL, and escape sequences for a terminal. None of these ends a run:
- data that is read again is JSON, which preserves every text (`as_json`);
- ids and text columns of databases are for people: `storable` replaces characters that a database
  refuses;
- log files and the terminal get `shown`, all that is printed by `say`;
- a tokenizer gets `joined`, where U+FFFD replaces half a pair. Two halves that meet are one
  character, as JSON and UTF-16 read them.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
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
"""Control characters by their pictures; those that turn or break a line invisibly by their
number."""
_PLAIN = re.compile(r"[\t\n\x20-\x7e]*")


def as_json(value: Any, **options: Any) -> str:
    """Return JSON with characters unchanged, half a surrogate pair as `\\ud83d`: `json.loads`
    returns the same texts. `options` are those of `json.dumps`.
    """
    return _escaped(json.dumps(value, ensure_ascii=False, **options))


def from_json(text: str | bytes) -> Any:
    """Return what JSON of a user's says. Raises ValueError with the reason if it is none, and for
    an object with a name twice: which of its values is meant is not known.
    """
    try:
        return json.loads(text, object_pairs_hook=_named_once)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except json.JSONDecodeError as error:
        if error.lineno > 1:
            raise
        raise ValueError(f"{error.msg} (column {error.colno})") from error
    except ValueError as error:
        if "set_int_max_str_digits" not in str(error):
            raise
        most = sys.get_int_max_str_digits()  # Python's message is about its own limits
        raise ValueError(f"it has a whole number of more than {most} digits") from error


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of its names and values. Raises ValueError for a name that is there twice:
    which of its values is meant is not known.
    """
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        values = " and ".join(f"{value!r:.30}" for name, value in pairs if name == twice)
        raise ValueError(f"an object has the name '{twice:.60}' more than once: with {values}")
    return made


def has_half(value: Any) -> bool:
    """Return whether a JSON value contains half a surrogate pair, in a text or a key."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return True
    return False


def storable(text: str) -> str:
    """Return `text` in a form that every database accepts: NUL as its picture, half a surrogate
    pair as `\\ud83d`.
    """
    return _escaped(text).replace("\0", _NUL)


def shown(text: str) -> str:
    """Return `text` for a terminal: control characters as pictures, except for tabs and
    line ends.
    """
    if _PLAIN.fullmatch(text):
        return text
    return _escaped(text.replace("\r\n", "\n")).translate(_NOT_SHOWN)


def joined(text: str) -> str:
    """Return `text` for a tokenizer: adjacent halves become one character, other halves U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def all_joined(value: Any) -> Any:
    """Return a JSON value with each of its texts `joined`."""
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
    """Print text that may contain foreign characters, as `print` does."""
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
    """Return `text` with the passwords of the URLs and connection strings in it replaced by
    stars.
    """
    return _PASSWORD.sub(r"\1***", text) if "@" in text or "=" in text else text
