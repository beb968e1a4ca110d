from __future__ import annotations

from collections.abc import Sequence

from trireme.ext.openai.answer import StreamedText


def of_bytes(ids: Sequence[int]) -> str:
    """One token a byte."""
    return bytes(ids).decode(errors="replace")


def shown(text: str, *barriers: str) -> list[str]:
    pieces = StreamedText(of_bytes, barriers)
    return [pieces.add(byte) for byte in text.encode()]


def test_a_character_of_several_tokens_comes_whole() -> None:
    assert shown("aé€b") == ["a", "", "é", "", "", "€", "b"]


def test_what_may_be_a_barrier_is_held_back_and_shown_when_it_is_none() -> None:
    assert shown("a<tob", "<tool") == ["a", "", "", "", "<tob"]


def test_behind_a_barrier_nothing_is_shown() -> None:
    assert "".join(shown("ab<tool>cd", "<tool>", "STOP")) == "ab"


def test_the_rest_is_what_was_not_shown() -> None:
    pieces = StreamedText(of_bytes, ["STOP"])
    for byte in b"abST":
        pieces.add(byte)
    assert pieces.shown == "ab" and pieces.rest("abST") == "ST"
