"""AgentScope's workflows, as far as they say something without the package."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from trireme.task import Task
from trireme.workflows.workflow import resolve

NAMES = (
    "agentscope_workflow_adapter",
    "agentscope_workflow_adapter_v1",
    "agentscope_react_workflow",
    "agentscope_react_math_workflow",
    "as_react_workflow",
)


async def solve(task: dict[str, Any], model: Any) -> float:
    return 1.0


async def other(row: dict[str, Any], model: Any) -> float:
    return 1.0


def plain(task: dict[str, Any], model: Any) -> float:
    return 1.0


def examine(name: str, *, reward: str | None = None, **args: Any) -> None:
    spec = resolve(name)
    assert spec.examine is not None
    spec.examine(Task({"prompt": "1 + 1?"}, reward_fn=reward, workflow_args=args))


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
    with pytest.raises(ValueError, match="which this workflow does not ask"):
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
