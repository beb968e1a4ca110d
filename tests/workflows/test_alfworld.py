from __future__ import annotations

import pytest

from trireme.workflows.alfworld import HINT, format_observation, parse_action


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("<think>a</think><action> go to desk 1 </action>", "go to desk 1"),
        ("<action>look</action><action>inventory</action>", "look"),
        ("look", ""),
        ("<action>look", ""),
        ("<action>take a\nfrom b</action>", "take a\nfrom b"),
    ],
)
def test_the_action_is_between_its_tags(reply: str, action: str) -> None:
    assert parse_action(reply) == action


def test_an_action_without_effect_brings_a_hint() -> None:
    assert format_observation("You see a desk 1.") == "Observation: You see a desk 1."
    assert format_observation("Nothing happens.") == f"Observation: Nothing happens.\n{HINT}"
