"""The import paths of Trinity lead to the same things."""

from __future__ import annotations

import importlib

import pytest

import trireme


@pytest.mark.parametrize(
    ("path", "ours"),
    [
        ("trinity.common.experience:Experience", "trireme.experience:Experience"),
        ("trinity.common.experience:EID", "trireme.experience:EID"),
        ("trinity.common.workflows:WORKFLOWS", "trireme.workflows.workflow:WORKFLOWS"),
        ("trinity.common.workflows:Task", "trireme.task:Task"),
        ("trinity.common.workflows.workflow:Workflow", "trireme.workflows.workflow:Workflow"),
        ("trinity.common.workflows:MathWorkflow", "trireme.workflows.single_turn:MathWorkflow"),
        (
            "trinity.common.workflows:AsyncSimpleWorkflow",
            "trireme.workflows.single_turn:SimpleWorkflow",
        ),
        ("trinity.common.rewards:REWARD_FUNCTIONS", "trireme.rewards.reward:REWARDS"),
        ("trinity.common.rewards.reward_fn:RewardFn", "trireme.rewards.reward:RewardFn"),
        ("trinity.buffer.operators:EXPERIENCE_OPERATORS", "trireme.pipeline.names:OPERATORS"),
        (
            "trinity.buffer.operators:ExperienceOperator",
            "trireme.pipeline.operator:ExperienceOperator",
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
