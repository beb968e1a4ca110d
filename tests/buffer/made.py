"""An experience of a conversation with a tool call, as an explorer gives it."""

from __future__ import annotations

from typing import Any

from trireme.experience import EID, Experience

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def experience(step: int, task: int, run: int, reward: float | None, **more: Any) -> Experience:
    tokens = [5, 6, 7, 8, 9, 10]
    made = Experience(
        tokens,
        prompt_length=2,
        logprobs=[-0.1, -0.2, -0.3, -0.4],
        versions=[step - 1] * 4,
        eid=EID(step, task, run),
        reward=reward,
        prompt_text=f"<|user|>What is {task} + {step}?<|end|>",
        response_text=f"It is {task + step}.\nReply {run} of step {step}",
        stop_reason="length" if run == 1 else "stop",
        info={"task_index": {"index": 100 + task, "taskset_id": 0}, "truth": str(task + step)}
        | {"row": {"level": 2}},
        messages=[
            {"role": "user", "content": f"What is {task} + {step}?"},
            {"role": "assistant", "content": "", "tool_calls": [
                {"function": {"name": "add", "arguments": '{"a": 1}'}}]},
            {"role": "tool", "content": "the sum"},
            {"role": "assistant", "content": f"It is {task + step}."},
        ],
        tools=TOOLS,
    )  # fmt: skip
    for name, value in more.items():
        setattr(made, name, value)
    return made
