"""Tool calls: three forms of asking, two places for results, and tools that misbehave."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ext.multi_turn.test_scheduler import run, trained
from tests.limits import HANG_S
from tests.model.fake import TOKENIZER, FakeEngine, Say, engine_of, make
from tests.model.templates import CHATML
from tests.model.test_turn import spans
from trireme import RolloutInferRequest, RolloutResponseChoice, Task
from trireme.ext.multi_turn.scheduled import multi_turn_scheduler
from trireme.ext.multi_turn.scheduler import ChatMessage
from trireme.ext.multi_turn.tool_calls import (
    Tool,
    ToolCallScheduler,
    calculator,
    python_tool,
    read_calls,
)
from trireme.model.chat_tokens import ChatTokens
from trireme.model.model import Model

ROW = {"messages": [{"role": "user", "content": "2+2?"}], "solution": "4"}
ASK = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+2"}}\n</tool_call>'


def slow(text: str, seconds: float) -> str:
    """Says it later.

    Args:
        text: What.
        seconds: When.
    """
    time.sleep(seconds)
    return text


async def broken(text: str) -> dict[str, str]:
    """Fails.

    Args:
        text: Why, or exit, or late.
    """
    if text == "exit":
        sys.exit(3)
    if text == "late":
        raise TimeoutError("the database gave no answer in 5 s")
    raise KeyError(text)


def play(model: Model, row: dict[str, Any] | None = None, **args: Any) -> Any:
    options = {"tools": ["calculator", slow, broken], "max_turns": 5, **args}
    task = Task(
        raw_task=row or ROW,
        workflow_args={"scheduler": "tool_call_scheduler", **options},
        reward_fn_args={"funcs": [lambda completions, **_: [1.0] * len(completions)]},
    )
    [experience] = run(model, task)
    return experience


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def results(experience: Any) -> list[str]:
    return [m["content"] for m in experience.messages if m["role"] == "tool"]


def test_a_react_result_is_inserted_in_the_same_turn_and_carries_no_loss() -> None:
    model = make(["Action: calculator\nAction Input: 2+2\n", "Final Answer: 4"])
    experience = play(model)
    assert spans(experience)[1:] == [
        (True, "Action: calculator\nAction Input: 2+2\n"),
        (False, "Observation: 4\n"),
        (True, "Final Answer: 4<|im_end|>"),
    ]
    infos = experience.info["rollout_infos"]
    assert infos == {"tool_calls": 1, "tool_errors": 0, "num_turns": 2}


def test_a_result_that_the_model_made_up_is_cut_off() -> None:
    model = make(["Action: calculator\nAction Input: 2+2\nObservation: 7\nFinal Answer: 7", "4"])
    experience = play(model)
    assert "7" not in TOKENIZER.decode(experience.tokens.tolist())
    assert trained(experience)[-1] == "4<|im_end|>"


def test_a_stop_string_that_was_sampled_stays_what_the_model_said() -> None:
    first = "Action: calculator\nAction Input: 2+2"
    said = Say(first, stop="\nObservation:", behind="\nObservation:")
    experience = play(make([said, "4"]))
    assert spans(experience)[1:] == [
        (True, first + "\nObservation:"),
        (False, " 4\n"),
        (True, "4<|im_end|>"),
    ]


def test_several_react_turns_in_one_reply() -> None:
    model = make(
        [
            "Action: calculator\nAction Input: 2+2\n",
            'Action: calculator\nAction Input: {"expression": "4*4"}\n',
            "Final Answer: 16",
        ]
    )
    experience = play(model)
    assert len(experience.messages) == 2
    assert "Observation: 4\nAction" in experience.messages[1]["content"]
    assert "Observation: 16\nFinal" in experience.messages[1]["content"]


def test_hermes_calls_run_side_by_side_and_answer_in_order() -> None:
    both = threading.Barrier(2, timeout=HANG_S)

    def meets(text: str) -> str:
        """Waits for the other call.

        Args:
            text: What.
        """
        both.wait()
        return text

    two = call("meets", text="a") + "\n" + call("meets", text="b")
    experience = play(make([two + ASK, "ab4"]), tools=["calculator", meets])
    assert results(experience) == ["a", "b", "4"]
    roles = "".join(m["role"][0] for m in experience.messages)
    assert roles == "uattta"
    assert trained(experience) == [two + ASK + "<|im_end|>", "ab4<|im_end|>"]


def test_hermes_results_inside_the_reply() -> None:
    experience = play(make(["I ask. " + ASK, "It is 4."]), style="same_turn")
    assert spans(experience)[1:] == [
        (True, "I ask. " + ASK),
        (False, "\n<tool_response>\n4\n</tool_response>\n"),
        (True, "It is 4.<|im_end|>"),
    ]
    assert len(experience.messages) == 2


def test_what_goes_wrong_in_a_tool_is_told_to_the_model() -> None:
    wrong = [
        call("calcu", expression="1"),
        "<tool_call>{oops}</tool_call>",
        '<tool_call>["calculator"]</tool_call>',
        call("calculator", expressions="1"),
        call("calculator", expression="1/0"),
        call("broken", text="why"),
        call("broken", text="exit"),
        call("broken", text="late"),
        call("slow", text="late", seconds=3),
    ]
    experience = play(make(["".join(wrong), "sorry"]), timeout=1.0)
    starts = [
        "Error: unknown tool 'calcu'. Known: calculator, slow, broken",
        "Error: the call is no JSON: ",
        "Error: the call must be a JSON object with `name`",
        "Error: calculator() got an unexpected keyword argument 'expressions'",
        "Error: division by zero",
        "Error: 'why'",
        "Error: the tool tried to exit (3)",
        "Error: the database gave no answer in 5 s",
        "Error: slow took longer than 1 s",
    ]
    for found, start in zip(results(experience), starts, strict=True):
        assert found.startswith(start)
    assert experience.info["rollout_infos"]["tool_errors"] == len(wrong)


def test_a_text_is_the_name_of_one_tool() -> None:
    model = make([call("calculator", expression="2*3"), "6"])
    assert results(play(model, tools="calculator")) == ["6"]


def test_calls_that_the_engine_has_read() -> None:
    function = {"name": "calculator", "arguments": '{"expression": "2*3"}'}
    message = ChatMessage("assistant", "", [{"id": "c1", "type": "function", "function": function}])
    asked = RolloutResponseChoice(0, message, "stop")
    scheduler = ToolCallScheduler(tools=["calculator"])
    request = RolloutInferRequest([*ROW["messages"], {"role": "assistant", "content": ""}])
    assert not scheduler.check_finished(request, asked, 1)
    asyncio.run(scheduler.step(request, asked, 1))
    assert request.messages[-1] == {
        "role": "tool",
        "name": "calculator",
        "tool_call_id": "c1",
        "content": "6",
    }


MENTIONED = call("calculator", expression="1+1")


@pytest.mark.parametrize("begin", ["", "<think>"])
@pytest.mark.parametrize("react", [False, True])
def test_calls_that_the_thinking_mentions_are_not_run(begin: str, react: bool) -> None:
    mentioned, asks = MENTIONED, ASK
    if react:
        mentioned = "\nAction: calculator\nAction Input: 1+1\n"
        asks = "Action: calculator\nAction Input: 2+2\n"
    thinking = f"{begin}I could {mentioned} with <tool_call> or not.</think>"
    experience = play(make([thinking + asks, f"{thinking}It is 4."]))
    assert experience.info["rollout_infos"]["tool_calls"] == 1
    assert trained(experience)[0].startswith(thinking + asks)
    if not react:
        assert results(experience) == ["4"]
        open_ended = play(make([f"<think>I could {mentioned}"]))
        assert open_ended.info["rollout_infos"]["tool_calls"] == 0


def test_a_call_whose_arguments_contain_an_end_of_thinking_is_run() -> None:
    experience = play(make([call("slow", text="</think>", seconds=0), "ok"]))
    assert results(experience) == ["</think>"]


def test_a_result_inside_the_reply_may_be_part_of_its_thinking() -> None:
    experience = play(make([f"<think>I ask. {ASK}", "It is 4.</think>4"]), style="same_turn")
    assert spans(experience)[1:] == [
        (True, f"<think>I ask. {ASK}"),
        (False, "\n<tool_response>\n4\n</tool_response>\n"),
        (True, "It is 4.</think>4<|im_end|>"),
    ]


def test_calls_in_another_form_are_not_read_in_the_thinking_either() -> None:
    chat = ChatTokens(TOKENIZER, tool_call_parser="qwen3_coder")
    form = "<tool_call><function=calculator><parameter=expression>{}</parameter></function>"
    reply = f"<think>I could {form.format('1+1')} but</think>{form.format('2+2')}</tool_call>"
    engine: Any = FakeEngine([reply, "4"])
    assert results(play(Model(engine, chat, max_model_len=4000))) == ["4"]


def test_the_schemas_reach_the_chat_template() -> None:
    model = make([ASK, "4"], template=CHATML)
    play(model)
    for prompt in engine_of(model).prompts:
        shown = TOKENIZER.decode(prompt)
        assert '"name": "calculator"' in shown and "Says it later." in shown
        assert '"required": ["text", "seconds"]' in shown


def test_a_call_in_the_last_turn_is_not_run() -> None:
    experience = play(make([ASK]), max_turns=1)
    assert experience.info["rollout_infos"] == {"tool_calls": 0, "tool_errors": 0, "num_turns": 1}


def test_text_that_asks_for_nothing_has_no_calls() -> None:
    choice = RolloutResponseChoice(0, ChatMessage("assistant", "No action: 4."), "stop")
    assert read_calls(choice).calls == []


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"tools": []}, "has no tools: give `tools` or `mcp_servers`"),
        ({"style": "both"}, "style is 'both': expected new_turn or same_turn"),
        ({"tools": ["calcul"]}, "unknown tool 'calcul'; did you mean 'calculator'"),
        ({"tools": [lambda x: x]}, "has no JSON schema"),
        ({"tools": [slow, slow]}, "tools has a tool 'slow', and there is one of that name already"),
        ({"mcp_servers": {"a": {"cmd": "x"}}}, "mcp_servers.a has cmd: expected `command`"),
    ],
)
def test_options_that_cannot_be(args: dict[str, Any], sentence: str) -> None:
    task = Task(ROW, workflow_args={"scheduler": "tool_call_scheduler", "tools": [slow], **args})
    with pytest.raises(ValueError, match=sentence.replace("(", r"\(")):
        multi_turn_scheduler.examine(task)


@pytest.mark.parametrize(
    ("expression", "result"),
    [("(2 + 3) * -4", "-20"), ("7 / 2", "3.5"), ("2 ** 10 % 1000 // 3", "8"), (" +1.5", "1.5")],
)
def test_the_calculator(expression: str, result: str) -> None:
    assert calculator(expression) == result


@pytest.mark.parametrize(
    "expression",
    ["__import__('os')", "a", "9**9999", "9**9**9", "True", "1" * 201, "1 if 1 else 2"],
)
def test_the_calculator_refuses(expression: str) -> None:
    with pytest.raises(ValueError):
        calculator(expression)


def test_a_tool_of_a_file_is_known_by_its_path() -> None:
    assert python_tool("trireme.ext.multi_turn.tool_calls:calculator").name == "calculator"


SERVER = """
import sys
from pathlib import Path
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("numbers")

@server.tool()
def double(number: int) -> str:
    "Doubles a number."
    if number < 0:
        raise ToolError("negative")
    return str(2 * number)

Path(sys.argv[1]).write_text("open")
server.run()
Path(sys.argv[1]).write_text("closed")
"""


def served(folder: Path) -> dict[str, Any]:
    (folder / "server.py").write_text(SERVER)
    log = str(folder / "log")
    env = {"PYTHONPATH": ":".join(p for p in sys.path if p)}
    return {"command": sys.executable, "args": [str(folder / "server.py"), log], "env": env}


def test_an_mcp_server_gives_its_tools_and_is_closed(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="mcp is not installed: make test-extras runs this")
    asks = call("double", number=21) + call("double", number=-1)
    model = make([asks, "42"], template=CHATML)
    experience = play(model, mcp_servers={"numbers": served(tmp_path)})
    good, bad = results(experience)
    assert good == "42" and "negative" in bad
    assert "Doubles a number." in TOKENIZER.decode(engine_of(model).prompts[0])
    assert (tmp_path / "log").read_text() == "closed"
    assert experience.info["rollout_infos"]["tool_errors"] == 1


def test_two_mcp_servers_with_a_tool_of_one_name_are_refused_and_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = []

    class Server:
        def __init__(self, name: str, given: Any) -> None:
            self.name = name

        async def open(self, timeout: float) -> list[Tool]:
            return [python_tool(slow)]

        async def close(self) -> None:
            closed.append(self.name)

    monkeypatch.setattr("trireme.ext.multi_turn.tool_calls.McpServer", Server)
    with pytest.raises(ValueError, match=r"mcp_servers\.more has a tool 'slow', and there is one"):
        play(make(["a"]), tools=[], mcp_servers={"one": {}, "more": {}})
    assert closed == ["one", "more"]


def test_an_mcp_server_is_closed_after_an_error_too(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="mcp is not installed: make test-extras runs this")

    def fail(prompt: str) -> str:
        raise RuntimeError("engine broke")

    with pytest.raises(RuntimeError, match="engine broke"):
        play(make(fail), mcp_servers={"numbers": served(tmp_path)})
    assert (tmp_path / "log").read_text() == "closed"


def test_an_mcp_server_that_does_not_start_is_named() -> None:
    pytest.importorskip("mcp", reason="mcp is not installed: make test-extras runs this")
    with pytest.raises(RuntimeError, match="MCP server 'gone' does not work"):
        play(make(["a"]), mcp_servers={"gone": {"command": "no-such-program"}})
