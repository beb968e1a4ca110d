"""OpenAI's SDK: a loop of chat completions with a tool."""

import json
import os

from openai import OpenAI

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOL = {"type": "function", "function": {"name": "multiply", "parameters": SCHEMA}}


def main() -> None:
    with open(os.environ["TRIREME_TASK"]) as file:
        messages = [{"role": "user", "content": json.load(file)["prompt"]}]
    client = OpenAI()
    for _ in range(4):
        reply = client.chat.completions.create(model="any", messages=messages, tools=[TOOL])
        said = reply.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            break
        for call in said.tool_calls:
            given = json.loads(call.function.arguments)
            result = str(given["a"] * given["b"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(said.content)


main()
