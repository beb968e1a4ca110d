"""Anthropic's SDK: a loop of streamed messages with a tool."""

import json
import os

from anthropic import Anthropic

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOL = {"name": "multiply", "description": "The product.", "input_schema": SCHEMA}


def main() -> None:
    with open(os.environ["TRIREME_TASK"]) as file:
        messages = [{"role": "user", "content": json.load(file)["prompt"]}]
    client = Anthropic()
    for _ in range(4):
        with client.messages.stream(
            model="any", max_tokens=512, messages=messages, tools=[TOOL]
        ) as stream:
            said = stream.get_final_message()
        messages.append({"role": "assistant", "content": said.content})
        if said.stop_reason != "tool_use":
            break
        results = []
        for use in (block for block in said.content if block.type == "tool_use"):
            product = str(use.input["a"] * use.input["b"])
            results.append({"type": "tool_result", "tool_use_id": use.id, "content": product})
        messages.append({"role": "user", "content": results})
    print("".join(block.text for block in said.content if block.type == "text"))


main()
