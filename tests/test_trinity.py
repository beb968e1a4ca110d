"""The import paths of Trinity lead to the same things."""

from __future__ import annotations

import ast
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import trinity
import trireme
from tests.ext.alfworld.test_workflow import Room
from tests.workflows.test_workflow import call
from trireme.registry import Registry


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
            "trireme.ext.webshop.workflow:WebShopWorkflow",
        ),
        (
            "trinity.common.workflows.envs.alfworld.alfworld_workflow:parse_action",
            "trireme.workflows.episode:parse_action",
        ),
        (
            "trinity.common.workflows.envs.alfworld.alfworld_workflow:format_observation",
            "trireme.ext.alfworld.workflow:format_observation",
        ),
        (
            "trinity.common.workflows.envs.webshop.webshop_workflow:format_observation",
            "trireme.ext.webshop.workflow:format_observation",
        ),
        ("trinity.utils.registry:Registry", "trireme.registry:Registry"),
        ("trinity.utils.log:get_logger", "trireme.log:get_logger"),
    ],
)
def test_a_trinity_path_is_one_of_ours(path: str, ours: str) -> None:
    assert look_up(path) is look_up(ours)


@pytest.mark.parametrize(
    ("module", "lines"),
    [
        (
            "trinity.common.workflows.step_wise_workflow",
            ("class StepWiseAlfworldWorkflow(RewardPropagationWorkflow):", "def step(self, step_"),
        ),
        (
            "trinity.common.workflows.envs.alfworld.alfworld_workflow",
            (
                "class AlfworldWorkflow(MultiTurnWorkflow):",
                "def generate_env_inference_samples(self, env",
                "self.process_messages_to_experience(",
            ),
        ),
        ("trinity.common.workflows", ("default_mapping",)),
    ],
)
def test_what_documents_say_to_see_is_a_file_with_the_example(
    module: str, lines: Sequence[str]
) -> None:
    file = importlib.import_module(module).__file__
    assert file is not None
    text = Path(file).read_text(encoding="utf-8")
    assert all(line in text for line in lines)


def test_the_lines_that_make_the_examples_what_a_yaml_names_lead_to_them() -> None:
    workflows = importlib.import_module("trinity.common.workflows")
    text = Path(str(workflows.__file__)).read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "trinity.common.workflows"}
    exec(text.replace('# "alfworld', '"alfworld').replace('# "step_wise', '"step_wise'), names)
    found = Registry("workflow", names["default_mapping"])
    assert found.names() == ["alfworld_workflow", "step_wise_alfworld_workflow"]
    assert found.get("alfworld_workflow") is workflows.AlfworldWorkflow
    assert found.get("step_wise_alfworld_workflow") is workflows.StepWiseAlfworldWorkflow


LOOK = "<think>a</think><action>look</action>"


@pytest.mark.parametrize("replies", [[LOOK, LOOK], [LOOK, "wait", LOOK], [LOOK, "wait"]])
@pytest.mark.parametrize("name", ["AlfworldWorkflow", "StepWiseAlfworldWorkflow"])
def test_the_example_that_is_written_out_gives_what_the_built_in_one_gives(
    name: str, replies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = look_up(f"trinity.common.workflows:{name}")
    built_in = look_up(f"trireme.ext.alfworld.workflow:{name}")
    assert isinstance(written, type) and isinstance(built_in, type) and written is not built_in
    for module in (sys.modules[written.__module__], sys.modules[built_in.__module__]):
        monkeypatch.setattr(module, "create_environment", lambda *given: Room())
    if name == "AlfworldWorkflow":
        monkeypatch.setattr(built_in, "make_env", lambda self: Room())
    for cls in (written, built_in):
        monkeypatch.setattr(cls, "max_env_steps", len(replies), raising=False)
        monkeypatch.setattr(cls, "max_step_num", len(replies), raising=False)
    ours, theirs = call(written, replies), call(built_in, replies)
    assert len(ours) == (1 if name == "AlfworldWorkflow" else len(replies))
    for one, other in zip(ours, theirs, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.mask.tolist() == other.mask.tolist()
        assert one.reward == other.reward == (1.0 if replies[-1] == LOOK else -0.1)
        common = one.metrics.keys() & other.metrics.keys()
        assert "env_rounds" in common or "actual_env_steps" in common
        assert all(one.metrics[key] == other.metrics[key] for key in common)


def test_every_path_leads_to_something() -> None:
    for module, names in trinity.NAMES.items():
        for name in names:
            assert look_up(f"{module}:{name}") is not None


def imported_of_trinity() -> list[tuple[str, bool]]:
    """`module:name`, and whether it is to be there."""
    out = []
    for line in Path(__file__).with_name("trinity_imports.txt").read_text().splitlines():
        if not line.startswith("#"):
            module, names = line.removeprefix("- ").split(": ")
            out += [(f"{module}:{name}", not line.startswith("- ")) for name in names.split()]
    return out


def test_what_plug_ins_of_trinity_import_is_here_or_said_to_be_elsewhere() -> None:
    imported = imported_of_trinity()
    assert sum(here for _, here in imported) >= 71 and len(imported) >= 114
    for path, here in imported:
        if here:
            assert look_up(path) is not None
        else:
            with pytest.raises(ImportError, match="of Trinity-RFT is not here: it "):
                look_up(path)


def test_whatever_is_said_to_be_elsewhere_is_not_here() -> None:
    for path in trinity.ELSEWHERE:
        with pytest.raises(ImportError, match="of Trinity-RFT is not here: it "):
            look_up(path)
    with pytest.raises(ImportError, match=r"^trinity.trainer of Trinity-RFT is not here: it is "):
        importlib.import_module("trinity.trainer.verl.dp_actor")


def test_a_module_that_nobody_has_is_none(tmp_path: Path) -> None:
    for name in ("trinity.common.workflows.mine", "trinity.algorithm.policy_loss_fn.mine"):
        with pytest.raises(ModuleNotFoundError, match=f"^No module named '{name}'$"):
            importlib.import_module(name)
    with pytest.raises(ImportError, match="cannot import name 'Mine'"):
        exec("from trinity.common.workflows.workflow import Mine")


def look_up(path: str) -> object:
    module, _, name = path.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


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
    assert ast.unparse(block.test) == "TYPE_CHECKING" and not block.orelse
    seen = {
        name.asname or name.name: f"{node.module}:{name.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert seen == {**trireme._NAMES, "*": "trireme.ext:*"}


def test_files_of_users_go_before_the_modules_that_are_no_files(tmp_path: Path) -> None:
    shutil.copytree(Path(trinity.__file__).parent, tmp_path / "trinity")
    envs = tmp_path / "trinity" / "common" / "workflows" / "envs"
    for folder in (envs / "alfworld", envs / "mine"):
        folder.mkdir(parents=True, exist_ok=True)
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


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("trinity.common.workflows", "MultiTurnWorkflow"),
        ("trinity.common.workflows.workflow", "MultiTurnWorkflow"),
        ("trinity.common.workflows", "StepWiseRewardWorkflow"),
        ("trinity.common.workflows.step_wise_workflow", "RewardPropagationWorkflow"),
        ("trinity.common.workflows.step_wise_workflow", "AsyncRewardPropagationWorkflow"),
    ],
)
def test_the_import_paths_of_users_files(module: str, name: str) -> None:
    assert getattr(importlib.import_module(module), name).__name__ == name.removeprefix("Async")
