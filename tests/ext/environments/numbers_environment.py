"""An environment as users of `verifiers` write them: rows, a tool, two rewards."""

from __future__ import annotations

from typing import Any

import verifiers as vf  # pyright: ignore[reportMissingImports]
from datasets import Dataset


async def multiply(a: int, b: int) -> int:
    """The product of two numbers.

    Args:
        a: one number
        b: another number
    """
    return a * b


async def used_tool(completion: list[Any], **_: Any) -> float:
    return float(any(message["role"] == "tool" for message in completion))


async def brief(completion: list[Any], **_: Any) -> float:
    return float(len(completion) < 9)


async def briefest(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(one) == min(map(len, completions))) for one in completions]


def load_environment(count: int = 4, together: bool = False, groups: bool = False) -> Any:
    if groups:  # the first member judges rollouts together, the second each by itself
        members = [load_environment(count, together=True), load_environment(count)]
        return vf.EnvGroup(envs=members, env_names=["together", "alone"])
    rows = [{"question": f"What is {n} times 7?", "answer": str(7 * n)} for n in range(count)]
    return vf.ToolEnv(
        dataset=Dataset.from_list(rows),
        tools=[multiply],
        rubric=vf.Rubric(funcs=[used_tool, briefest if together else brief], weights=[1.0, 0.5]),
        system_prompt="Use the tool.",
        max_turns=4,
        stop_errors=[TypeError],
    )
