"""smolagents: an agent that writes Python, over chat completions."""

import json
import os

from smolagents import CodeAgent, OpenAIServerModel


def main() -> None:
    with open(os.environ["TRIREME_TASK"]) as file:
        question = json.load(file)["prompt"]
    model = OpenAIServerModel(
        "any", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
    )
    agent = CodeAgent([], model, max_steps=3, verbosity_level=0)
    print(agent.run(question))


main()
