"""LangGraph's agent of a model and tools, over chat completions."""

import json
import os

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


def multiply(a: int, b: int) -> int:
    """The product of two numbers."""
    return a * b


def main() -> None:
    with open(os.environ["TRIREME_TASK"]) as file:
        question = json.load(file)["prompt"]
    agent = create_react_agent(ChatOpenAI(model="any"), [multiply])
    ended = agent.invoke({"messages": [("user", question)]}, {"recursion_limit": 9})
    print(ended["messages"][-1].content)


main()
