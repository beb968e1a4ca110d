"""A plug-in whose workflow gives odd texts in every field that it may fill."""

from __future__ import annotations

from typing import Any

from tests.odd import ALL, ODD
from trireme import Experience, Model, Task, reward, workflow
from trireme.log import get_logger

_CALLS = iter(range(10**9))


@reward("odd_parts")
def odd_parts(task: Task, answer: str) -> dict[str, float]:
    """Parts whose names no tracker takes."""
    value = (sum(map(ord, answer)) % 17) / 16
    return {name: value / len(ODD) for name in ODD.values() if len(name) < 100}


@workflow("odd_texts")
async def odd_texts(task: Task, model: Model) -> list[Experience]:
    """Asks with an odd text, and leaves others in whatever an experience carries."""
    number = next(_CALLS)
    get_logger().warning("a line with %s", ALL)
    if number == 3:
        raise ValueError(f"no page: {ALL}")
    reply = await model.chat([
        {"role": "system", "content": ALL},
        {"role": "user", "content": f"{task.prompt} {ALL}"},
    ])  # fmt: skip
    parts = odd_parts(task, reply.text)
    experiences: list[Experience] = model.experiences(reward=sum(parts.values()))
    call: dict[str, Any] = {"type": "function", "function": {"name": ALL, "arguments": ALL}}
    for e in experiences:
        e.metrics |= parts
        e.info |= {**ODD, **{text: name for name, text in ODD.items()}, "truth": ALL}
        e.messages = [*(e.messages or []), {"role": "tool", "content": ALL, "tool_calls": [call]}]
        e.tools = [{"type": "function", "function": {"name": ALL, "description": ALL}}]
        e.prompt_text, e.response_text = f"{e.prompt_text}{ALL}", f"{e.response_text}{ALL}"
        e.stop_reason = ALL
    return experiences


@workflow("odd_end")
async def odd_end(task: Task, model: Model) -> list[Experience]:
    """Ends a run with an error that cannot be made anew of its `args`."""
    raise OddError("page", ALL)


class OddError(Exception):
    """An error as users have them."""

    def __init__(self, page: str, reason: str) -> None:
        super().__init__(f"{page}: {reason}")
