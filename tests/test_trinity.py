"""The import paths of Trinity lead to the same things."""

from __future__ import annotations

import ast
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import trinity
import trireme


@pytest.mark.parametrize(
    ("path", "ours"),
    [
        ("trinity.common.experience:Experience", "trireme.experience:Experience"),
        ("trinity.common.experience:EID", "trireme.experience:EID"),
        ("trinity.common.workflows:WORKFLOWS", "trireme.registry:WORKFLOWS"),
        ("trinity.common.workflows:Task", "trireme.task:Task"),
        ("trinity.common.workflows.workflow:Workflow", "trireme.workflows.classes:Workflow"),
        ("trinity.common.workflows:MathWorkflow", "trireme.workflows.single_turn:MathWorkflow"),
        (
            "trinity.common.workflows:AsyncSimpleWorkflow",
            "trireme.workflows.single_turn:SimpleWorkflow",
        ),
        ("trinity.buffer.selector:SELECTORS", "trireme.registry:SELECTORS"),
        ("trinity.buffer.selector.selector:BaseSelector", "trireme.data.selectors:BaseSelector"),
        (
            "trinity.common.config:TaskSelectorConfig",
            "trireme.config.schema_rollout:DataSelectorConfig",
        ),
        (
            "trinity.common.constants:SELECTOR_METRIC",
            "trireme.pipeline.operators:SELECTOR_METRIC",
        ),
        ("trinity.common.rewards:REWARD_FUNCTIONS", "trireme.registry:REWARDS"),
        ("trinity.common.rewards.reward_fn:RewardFn", "trireme.rewards.reward:RewardFn"),
        ("trinity.buffer.operators:EXPERIENCE_OPERATORS", "trireme.registry:OPERATORS"),
        (
            "trinity.buffer.operators:ExperienceOperator",
            "trireme.pipeline.operators:ExperienceOperator",
        ),
        ("trinity.common.models.model:ModelWrapper", "trireme.model.blocking:BlockingModel"),
        ("trinity.common.config:load_config", "trireme.config:load_config"),
        (
            "trinity.common.workflows:WebShopWorkflow",
            "trireme.workflows.webshop:WebShopWorkflow",
        ),
        (
            "trinity.common.workflows.envs.alfworld.alfworld_workflow:parse_action",
            "trireme.workflows.episode:parse_action",
        ),
        (
            "trinity.common.workflows.envs.alfworld.alfworld_workflow:format_observation",
            "trireme.workflows.alfworld:format_observation",
        ),
        (
            "trinity.common.workflows.envs.webshop.webshop_workflow:format_observation",
            "trireme.workflows.webshop:format_observation",
        ),
        ("trinity.utils.registry:Registry", "trireme.registry:Registry"),
        ("trinity.utils.log:get_logger", "trireme.log:get_logger"),
    ],
)
def test_a_trinity_path_is_one_of_ours(path: str, ours: str) -> None:
    assert look_up(path) is look_up(ours)


def test_every_path_leads_to_something() -> None:
    for module, names in trinity.NAMES.items():
        for name in names:
            assert look_up(f"{module}:{name}") is not None


def look_up(path: str) -> object:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def test_every_public_name_can_be_used() -> None:
    assert set(trireme.__all__) <= set(dir(trireme))
    for name in trireme.__all__:
        assert getattr(trireme, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        trireme.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("AlfworldWorkflow", "MultiTurnWorkflow"),
        ("WebShopWorkflow", "MultiTurnWorkflow"),
        ("StepWiseAlfworldWorkflow", "RewardPropagationWorkflow"),
        ("MathWorkflow", "SimpleWorkflow"),
        ("MathBoxedWorkflow", "SimpleWorkflow"),
    ],
)
def test_built_in_classes_are_what_the_documents_derive_them_from(name: str, base: str) -> None:
    workflows = importlib.import_module("trinity.common.workflows")
    assert issubclass(getattr(workflows, name), getattr(workflows, base))


def test_type_checkers_see_the_same_public_names() -> None:
    body = ast.parse(Path(trireme.__file__).read_text(encoding="utf-8")).body
    [block] = [node for node in body if isinstance(node, ast.If)]
    seen = {
        name.asname or name.name: f"{node.module}:{name.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert seen == trireme._NAMES


def test_files_of_users_go_before_the_modules_that_are_no_files(tmp_path: Path) -> None:
    shutil.copytree(Path(trinity.__file__).parent, tmp_path / "trinity")
    envs = tmp_path / "trinity" / "common" / "workflows" / "envs"
    for folder in (envs / "alfworld", envs / "mine"):
        folder.mkdir(parents=True)
    (envs / "alfworld" / "alfworld_workflow.py").write_text("AlfworldWorkflow = 'mine'\n")
    (envs / "mine" / "workflow.py").write_text(
        "from ...workflow import WORKFLOWS, MathWorkflow\nfrom ..webshop import WebShopWorkflow\n"
    )
    init = tmp_path / "trinity" / "common" / "workflows" / "__init__.py"
    init.write_text(  # as a seed has it
        '"""Workflow module"""\n'
        "from .workflow import WORKFLOWS, MathWorkflow, SimpleWorkflow\n"
        "from .envs.alfworld.alfworld_workflow import AlfworldWorkflow\n"
    )
    code = (
        "from trinity.common.workflows import AlfworldWorkflow, SimpleWorkflow\n"
        "from trinity.common.workflows.envs.mine.workflow import MathWorkflow\n"
        "from trinity.common.workflows.envs.webshop.webshop_workflow import format_observation\n"
        "assert AlfworldWorkflow == 'mine' and issubclass(MathWorkflow, SimpleWorkflow)\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(trireme.__file__).parents[1]}"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment)
