"""An agent of OpenAI's agents SDK as a workflow: it is given an address, and knows no more of us.

pip install openai-agents
"""

from __future__ import annotations

import logging

from agents import (
    Agent,
    AgentsException,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from trireme import Experience, Model, Task, workflow

set_tracing_disabled(True)  # else traces are sent to OpenAI
logging.getLogger("openai.agents").setLevel(logging.CRITICAL)  # a line for each reply that was cut


@function_tool
def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


@function_tool
def subtract(a: int, b: int) -> int:
    """The difference."""
    return a - b


@function_tool
def multiply(a: int, b: int) -> int:
    """The product."""
    return a * b


@workflow("tool_agent")
async def tool_agent(task: Task, model: Model) -> list[Experience]:
    """1 for the right number behind a tool's call; 0 where the agent gives up, too."""
    # the address is http: to load certificates for every rollout took most of a step's time
    http = DefaultAsyncHttpxClient(verify=False)
    client = AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, http_client=http)
    async with client:
        agent = Agent(
            name="solver",
            instructions="Use a tool.",
            tools=[add, subtract, multiply],
            model=OpenAIResponsesModel(model="any", openai_client=client),
        )
        try:
            said = str((await Runner.run(agent, task.prompt, max_turns=3)).final_output)
        except AgentsException:  # a reply that was cut, a tool that there is not, too many turns
            said = ""
    used = len(model.recorder) > 1
    return model.experiences(reward=float(used and said == f"It is {task.truth}."), tools=used)
