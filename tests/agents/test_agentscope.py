"""Agents of the package `agentscope`: what they sample is what is trained."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.agents.programs import PRODUCT, tool_call
from tests.agents.steered import exactness, make_model
from tests.agents.test_programs import scripted
from trireme.task import Task

pytest.importorskip("agentscope.tuner", reason="make test-agents installs agentscope")
PROGRAM = Path(__file__).parent / "node_modules" / ".bin" / "mcp-searxng"
FUNCTIONS = "tests.agents.agentscope_functions"
ROW = {"question": "What is 6 times 7?", "answer": "So it is 6 * 7.\n#### 42"}
FORMAT = {"prompt_key": "question", "response_key": "answer"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("agents") / "model")


def task(workflow: str, row: dict[str, Any], **args: Any) -> Task:
    return Task(row, workflow=workflow, format_args=FORMAT, workflow_args=args)


@pytest.mark.parametrize(
    ("name", "functions", "metrics"),
    [
        (
            "agentscope_workflow_adapter_v1",
            {"workflow_func": "solve", "judge_func": "judge"},
            {"asked": 1.0, "length": 9.0},
        ),
        ("agentscope_workflow_adapter", {"workflow_func": "reward_alone"}, {}),
    ],
)
def test_a_function_of_the_tuner_is_a_rollout(
    name: str, functions: dict[str, str], metrics: dict[str, float], model: Path
) -> None:
    paths = {key: f"{FUNCTIONS}:{function}" for key, function in functions.items()}
    played = task(name, {**ROW, "answer": "42"}, **paths)
    outcome, engine = scripted(model, played, [tool_call("multiply", PRODUCT), "It is 42."])
    assert not outcome.failures, outcome.failures[0]
    [experience] = outcome.experiences
    assert experience.reward == 1.0 and "42" in engine.prompts[-1]
    assert {key: experience.metrics[key] for key in metrics} == metrics
    found = exactness(outcome.experiences, engine.sampled, model)
    assert found.calls == 2 and found.drift < 1e-4


@pytest.mark.parametrize(
    "name",
    [
        *("agentscope_react_workflow", "as_react_workflow", "agentscope_react_math_workflow"),
        "agentscopev0_react_math_workflow",
    ],
)
def test_a_react_agent_calculates_and_is_judged(name: str, model: Path) -> None:
    calls = [
        tool_call("python", {"code": "6 * 7"}),
        tool_call("generate_response", {"result": "\\boxed{42}"}),
    ]
    # the agent demands a call, whose beginning is not sampled
    replies: list[str | None] = [call.partition('"name": "')[2] for call in calls]
    replies.append("The result is 42.")
    outcome, engine = scripted(model, task(name, ROW), replies)
    assert not outcome.failures, outcome.failures[0]
    assert "<tool_response>\n42\n</tool_response>" in engine.prompts[1]
    for experience in outcome.experiences:
        assert experience.reward == 1.0 and experience.metrics["accuracy"] == 1.0
        assert experience.info["reward_parts"]["accuracy"] == (1.0, 1.0)
        assert experience.metrics["react_memory_length"] >= 5
    found = exactness(outcome.experiences, engine.sampled, model)
    assert found.calls == 3 and found.drift < 1e-4


class SearXNG(BaseHTTPRequestHandler):
    """What of a SearXNG the MCP server asks: one result for every query."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        """Answer a search in JSON."""
        self.asked.append(self.path)
        result = {"title": "Products", "url": "http://a.test/", "content": "6 times 7 is 42."}
        body = json.dumps({"query": "q", "results": [result], "number_of_results": 1}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def searxng(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The program on the PATH, and a SearXNG on loopback; gives what it was asked."""
    if not (PROGRAM.exists() or shutil.which(PROGRAM.name)):
        pytest.skip("make test-agents installs mcp-searxng")
    monkeypatch.setenv("PATH", f"{PROGRAM.parent}{os.pathsep}{os.environ['PATH']}")
    server = ThreadingHTTPServer(("127.0.0.1", 0), SearXNG)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("SEARXNG_URL", f"http://127.0.0.1:{server.server_port}")
    SearXNG.asked.clear()
    yield SearXNG.asked
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("judge", "reward"), [("true", 1.0), ("False.", 0.0)])
def test_a_search_agent_finds_and_is_judged(
    judge: str, reward: float, model: Path, searxng: list[str]
) -> None:
    calls = [
        tool_call("searxng_web_search", {"query": "6 times 7"}),
        tool_call("generate_response", {"result": "42"}),
    ]
    replies: list[str | None] = [call.partition('"name": "')[2] for call in calls]
    replies.append("It is 42.")
    played = task("agentscope_v1_react_search_workflow", ROW, max_turns=4)
    outcome, engine = scripted(model, played, replies, judge)
    assert not outcome.failures, outcome.failures[0]
    assert any("6+times+7" in path or "6%20times%207" in path for path in searxng)
    assert "6 times 7 is 42." in engine.prompts[1]
    assert {e.reward for e in outcome.experiences} == {reward}
    assert outcome.experiences[0].metrics["max_turns"] == 4.0
    found = exactness(outcome.experiences, engine.sampled, model)
    assert found.calls == 3 and found.drift < 1e-4


def test_a_judge_that_says_neither_is_a_failed_rollout(model: Path, searxng: list[str]) -> None:
    replies: list[str | None] = ['generate_response", "arguments": {"result": "42"}}', "42"]
    outcome, _ = scripted(
        model, task("agentscope_v1_react_search_workflow", ROW), replies, "perhaps"
    )
    [failure] = outcome.failures
    assert "the judge said 'perhaps': expected true or false" in str(failure)


def test_an_agent_that_samples_by_itself_is_wrong_and_trained(model: Path) -> None:
    outcome, engine = scripted(model, task("as_react_workflow", ROW, tools=[], max_iters=2), [])
    assert not outcome.failures, outcome.failures[0]
    assert {experience.reward for experience in outcome.experiences} == {0.0}
    assert exactness(outcome.experiences, engine.sampled, model).calls == len(engine.sampled) > 1


def test_a_function_without_a_reward_is_a_failed_rollout(model: Path) -> None:
    path = f"{FUNCTIONS}:no_reward"
    played = task("agentscope_workflow_adapter_v1", ROW, workflow_func=path)
    outcome, _ = scripted(model, played, ["42"])
    [failure] = outcome.failures
    assert "workflow_func 'no_reward' gave no reward" in str(failure)
