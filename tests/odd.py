"""Texts that are no text: what models, tools, rewards, rows and clients may give all the same."""

from __future__ import annotations

HIGH, LOW, NUL, ESC = "\ud83d", "\ude00", "\0", "\x1b]0;owned\x07\x1b[2J\x1b[31m"
ODD = {
    "half a pair": f"cut {HIGH}",
    "the other half": f"{LOW} cut",
    "a half behind a backslash": f"\\{HIGH}\\",
    "halves that meet": f"{HIGH}{LOW}",
    "halves the wrong way round": f"{LOW}{HIGH}",
    "NUL": f"a{NUL}b",
    "escape sequences": f"red {ESC} plain\x9b31m",
    "control characters": "".join(map(chr, range(32))) + "\x7f\x85",
    "bidirectional marks": "\u202etxt.exe\u2066\u2069\u200f",
    "line separators": "a\u2028b\u2029c\vd\fe\r\nf",
    "astral": "\U0001f600\U0010ffff\U0001d11e",
    "no characters": "\uffff\ufffe\ufeff",
    "an escape that is none": "\\ud83d \\x \\u12 %s {} \\N",
    "JSON": '{"a": "\\ud83d"}',
    "very long": "x\0\ud800\x1b" * 5000,
    "a file name of other bytes": "caf\udce9",
}
ALL = " | ".join(text for name, text in ODD.items() if name != "very long")
