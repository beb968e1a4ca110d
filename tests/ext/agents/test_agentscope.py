"""AgentScope's workflows, as far as they say something without the package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trireme.ext.agents import agentscope
from trireme.task import Task
from trireme.workflows.workflow import resolve

NAMES = (
    "agentscope_workflow_adapter",
    "agentscope_workflow_adapter_v1",
    "agentscope_react_workflow",
    "agentscope_react_math_workflow",
    "as_react_workflow",
    "agentscopev0_react_math_workflow",
    "agentscope_v1_react_search_workflow",
)
SEARCH = NAMES[-1]


async def solve(task: dict[str, Any], model: Any) -> float:
    return 1.0


async def other(row: dict[str, Any], model: Any) -> float:
    return 1.0


def plain(task: dict[str, Any], model: Any) -> float:
    return 1.0


def examine(name: str, *, reward: str | None = None, **args: Any) -> None:
    spec = resolve(name)
    assert spec.examine is not None
    spec.examine(Task({"prompt": "1 + 1?", "response": "2"}, reward_fn=reward, workflow_args=args))


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The version of agentscope; none, wherever the tests run."""
    real, found = metadata.version, list[str]()

    def version(name: str) -> str:
        if name == "agentscope" and not found:
            raise metadata.PackageNotFoundError(name)
        return found[0] if name == "agentscope" else real(name)

    monkeypatch.setattr(metadata, "version", version)
    agentscope._refuse_other_version.cache_clear()
    yield found
    agentscope._refuse_other_version.cache_clear()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("other", ["0.1.6", "2.0.11"])
def test_another_agentscope_is_told_from_the_one_that_is_expected(
    name: str, other: str, installed: list[str]
) -> None:
    installed.append(other)
    args = {"workflow_func": f"{__name__}:solve"} if "adapter" in name else {}
    with pytest.raises(ImportError, match=f"agentscope {other} is installed, and AgentScope 1"):
        examine(name, **args)


@pytest.mark.parametrize("name", NAMES)
def test_what_to_install_is_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "agentscope", None)
    args = {"workflow_func": f"{__name__}:solve"} if "adapter" in name else {}
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'trireme-rl\[agentscope\]'"):
        examine(name, **args)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({}, "workflow_args needs the option 'workflow_func'"),
        ({"workflow_fnc": "a"}, "did you mean 'workflow_func'"),
        ({"workflow_func": f"{__name__}:nowhere"}, "has no 'nowhere'"),
        ({"workflow_func": f"{__name__}:plain"}, r"expected an async function \(task, model\)"),
        ({"workflow_func": f"{__name__}:other"}, r"workflow_func takes \(row: .*expected an async"),
        (
            {"workflow_func": f"{__name__}:solve", "judge_func": f"{__name__}:solve"},
            r"judge_func takes \(task: .*expected an async function \(task, response\)",
        ),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(args: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        examine("agentscope_workflow_adapter_v1", **args)


def test_a_reward_beside_the_functions_own_is_refused() -> None:
    with pytest.raises(ValueError, match="which this workflow does not use"):
        examine(NAMES[1], reward="math_reward", workflow_func=f"{__name__}:solve")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"type": "email_search"}, "type is 'email_search': expected one of gsm8k"),
        ({"max_iters": 0}, "max_iters is 0: expected at least 1"),
        ({"tools": ["calculater"]}, "calculater"),
    ],
)
def test_a_wrong_option_of_the_agent_is_refused(args: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        examine("as_react_workflow", **args)


def test_the_agent_has_fewer_turns_under_its_old_name() -> None:
    turns = [resolve(name).code.settings().max_iters for name in (NAMES[4], NAMES[5])]
    assert turns == [10, 5]


@pytest.mark.parametrize(
    ("args", "reward", "says"),
    [
        ({"search_client_type": "bing"}, None, "type is 'bing': expected one of searxng, tavily"),
        ({"max_turn": 1}, None, "did you mean 'max_turns'"),
        ({}, "math_reward", "the first of explorer.auxiliary_models judges the answer"),
        ({}, None, "needs the program mcp-searxng, which is not on the PATH: npm install -g mcp-s"),
    ],
)
def test_what_a_search_agent_cannot_be_is_refused(
    args: dict[str, Any], reward: str | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "agentscope.mcp", ModuleType("agentscope.mcp"))
    monkeypatch.setitem(sys.modules, "agentscope", ModuleType("agentscope"))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match=says):
        examine(SEARCH, reward=reward, **args)
    assert resolve(SEARCH).code.asks_a_model(Task({"prompt": "?"}))


@pytest.mark.parametrize(
    ("kind", "program", "variable"),
    [("searxng", "mcp-searxng", "SEARXNG_URL"), ("tavily", "tavily-mcp", "TAVILY_API_KEY")],
)
def test_a_search_agents_program_needs_its_variable(
    kind: str, program: str, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("agentscope", "agentscope.mcp"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    (tmp_path / program).write_text("#!/bin/sh\n")
    (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(variable, raising=False)
    says = f"is '{kind}', and the environment variable {variable} is not set, which {program} needs"
    with pytest.raises(ValueError, match=says):
        examine(SEARCH, search_client_type=kind)
    monkeypatch.setenv(variable, "x")
    examine(SEARCH, search_client_type=kind)
