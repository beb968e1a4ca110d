"""OpenAI's agents SDK, which speaks the Responses API."""

import json
import os

from agents import Agent, Runner, function_tool, set_tracing_disabled


@function_tool
def multiply(a: int, b: int) -> int:
    """The product of two numbers."""
    return a * b


def main() -> None:
    set_tracing_disabled(True)  # otherwise traces are sent to OpenAI
    with open(os.environ["TRIREME_TASK"]) as file:
        question = json.load(file)["prompt"]
    agent = Agent(name="solver", instructions="Use the tool.", tools=[multiply], model="any")
    print(Runner.run_sync(agent, question, max_turns=4).final_output)


main()
