"""Functions as users of AgentScope's tuner write them."""

from __future__ import annotations

from typing import Any

from agentscope.agent import ReActAgent  # pyright: ignore[reportMissingImports]
from agentscope.formatter import OpenAIChatFormatter  # pyright: ignore[reportMissingImports]
from agentscope.message import Msg, TextBlock  # pyright: ignore[reportMissingImports]
from agentscope.model import OpenAIChatModel  # pyright: ignore[reportMissingImports]
from agentscope.tool import Toolkit, ToolResponse  # pyright: ignore[reportMissingImports]
from agentscope.tuner import JudgeOutput, WorkflowOutput  # pyright: ignore[reportMissingImports]


def multiply(a: int, b: int) -> Any:
    """The product of two numbers.

    Args:
        a (int): one number
        b (int): another number
    """
    return ToolResponse([TextBlock(type="text", text=str(a * b))])


async def said(task: dict[str, Any], model: OpenAIChatModel) -> str:
    toolkit = Toolkit()
    toolkit.register_tool_function(multiply)
    agent = ReActAgent(
        name="solver",
        sys_prompt="Use the tool.",
        model=model,
        formatter=OpenAIChatFormatter(),
        toolkit=toolkit,
        max_iters=4,
    )
    reply = await agent.reply(Msg("user", task["question"], role="user"))
    return reply.get_text_content() or ""


async def solve(task: dict[str, Any], model: OpenAIChatModel) -> WorkflowOutput:
    return WorkflowOutput(response=await said(task, model), metrics={"asked": 1.0})


async def judge(task: dict[str, Any], response: str, logger: Any) -> JudgeOutput:
    assert logger is not None
    right = float(task["answer"] in response)
    return JudgeOutput(reward=right, metrics={"length": float(len(response))})


async def reward_alone(task: dict[str, Any], model: OpenAIChatModel) -> float:
    return float(task["answer"] in await said(task, model))


async def no_reward(task: dict[str, Any], model: OpenAIChatModel) -> WorkflowOutput:
    return WorkflowOutput(response=await said(task, model))
