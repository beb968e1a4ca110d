"""Trinity: Trireme under the import paths that users' files already have.

Most of these modules are no files: they are made when they are imported, and their names are
imported when they are used. A file that lies where one of them would be goes before it.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from trireme.registry import lazy_names

_REWARDS = {"REWARD_FUNCTIONS": "trireme.registry:REWARDS", "RewardFn": "trireme.rewards.reward"}
_MODEL = {"ModelWrapper": "trireme.model.blocking:BlockingModel"}
_WORKFLOW = {
    "Task": "trireme.task",
    "WORKFLOWS": "trireme.registry",
    "Workflow": "trireme.workflows.classes",
    "SimpleWorkflow": "trireme.workflows.single_turn",
    "MathWorkflow": "trireme.workflows.single_turn",
    "MathBoxedWorkflow": "trireme.workflows.single_turn",
    "MultiTurnWorkflow": "trireme.workflows.episode",
    "AsyncSimpleWorkflow": "trireme.workflows.single_turn:SimpleWorkflow",
    "AsyncMathWorkflow": "trireme.workflows.single_turn:MathWorkflow",
    "AsyncMathBoxedWorkflow": "trireme.workflows.single_turn:MathBoxedWorkflow",
    "AsyncMultiTurnWorkflow": "trireme.workflows.episode:MultiTurnWorkflow",
}
_STEP_WISE = {
    "StepWiseRewardWorkflow": "trireme.workflows.step_wise",
    "RewardPropagationWorkflow": "trireme.workflows.step_wise",
    "AsyncStepWiseRewardWorkflow": "trireme.workflows.step_wise:StepWiseRewardWorkflow",
    "AsyncRewardPropagationWorkflow": "trireme.workflows.step_wise:RewardPropagationWorkflow",
    "StepWiseAlfworldWorkflow": "trireme.workflows.alfworld",
}
_ALFWORLD = {
    "AlfworldWorkflow": "trireme.workflows.alfworld",
    "StepWiseAlfworldWorkflow": "trireme.workflows.alfworld",
}
_RAFT = "trireme.workflows.raft"
_AGENTSCOPE = "trireme.workflows.agentscope"
_REACT = {"AgentScopeReActWorkflow": _AGENTSCOPE}
_WEBSHOP = {"WebShopWorkflow": "trireme.workflows.webshop"}

_CLASSES = "trireme.algorithms.classes"
_LOSS = {"PolicyLossFn": _CLASSES, "POLICY_LOSS_FN": "trireme.registry:POLICY_LOSSES"}
_ADVANTAGE = {
    "AdvantageFn": _CLASSES,
    "GroupAdvantage": _CLASSES,
    "ADVANTAGE_FN": "trireme.registry:ADVANTAGES",
}
_KL = {"KLFn": _CLASSES, "KL_FN": "trireme.registry:KLS"}
_ENTROPY = {"EntropyLossFn": _CLASSES, "ENTROPY_LOSS_FN": "trireme.registry:ENTROPIES"}
_SAMPLE = {"SampleStrategy": _CLASSES, "SAMPLE_STRATEGY": "trireme.registry:SAMPLES"}
_READER = {"get_buffer_reader": f"{_CLASSES}:reader_of", "BufferReader": f"{_CLASSES}:Storage"}
_ALGORITHM = {"AlgorithmType": _CLASSES, "ALGORITHM_TYPE": "trireme.registry:ALGORITHMS"}
_MATHS = {
    name: _WORKFLOW[name]
    for name in ("Task", "MathBoxedWorkflow", "AsyncMathBoxedWorkflow", "SimpleWorkflow")
}
_CONSTANTS = (
    *("RunningStatus", "StorageType", "SyncMethod", "SyncStyle"),
    *("CHECKPOINT_ROOT_DIR_ENV_VAR", "MODEL_PATH_ENV_VAR", "TASKSET_PATH_ENV_VAR"),
    *("BUFFER_PATH_ENV_VAR", "PLUGIN_DIRS_ENV_VAR", "LOG_DIR_ENV_VAR", "LOG_LEVEL_ENV_VAR"),
)


def _named(module: str, **names: str) -> dict[str, str]:
    """Their name -> ours, and the same with `Async` in front, all of one module."""
    return {
        f"{twin}{theirs}": f"{module}:{ours}"
        for theirs, ours in names.items()
        for twin in ("", "Async")
    }


_SINGLE, _ANSWERS = "trireme.workflows.single_turn", "trireme.rewards.answers"
_GYM = {"FrozenLakeWorkflow": "trireme.workflows.gym"}
_SELECTOR = {"BaseSelector": "trireme.data.selectors", "SELECTORS": "trireme.registry"}
_SECTIONS = ("FormatConfig", "GenerationConfig", "DataSelectorConfig", "TasksetConfig")

NAMES: dict[str, dict[str, str]] = {
    "trinity.algorithm": {
        **_LOSS,
        **_ADVANTAGE,
        **_KL,
        **_ALGORITHM,
        **_ENTROPY,
        **_SAMPLE,
    },
    "trinity.algorithm.advantage_fn": _ADVANTAGE,
    "trinity.algorithm.advantage_fn.advantage_fn": _ADVANTAGE,
    "trinity.algorithm.algorithm": _ALGORITHM,
    "trinity.algorithm.entropy_loss_fn": _ENTROPY,
    "trinity.algorithm.entropy_loss_fn.entropy_loss_fn": _ENTROPY,
    "trinity.algorithm.kl_fn": _KL,
    "trinity.algorithm.kl_fn.kl_fn": _KL,
    "trinity.algorithm.policy_loss_fn": _LOSS,
    "trinity.algorithm.policy_loss_fn.policy_loss_fn": _LOSS,
    "trinity.algorithm.sample_strategy": _SAMPLE,
    "trinity.algorithm.sample_strategy.sample_strategy": {
        **_SAMPLE,
        "DefaultSampleStrategy": _CLASSES,
    },
    "trinity.algorithm.sample_strategy.utils": {
        "representative_sample": "trireme.algorithms.sample"
    },
    "trinity.algorithm.utils": dict.fromkeys(
        ("aggregate_loss", "masked_mean", "masked_sum", "prefix_metrics"), _CLASSES
    ),
    "trinity.buffer": _READER,
    "trinity.buffer.buffer": _READER,
    "trinity.buffer.operators": {
        "EXPERIENCE_OPERATORS": "trireme.registry:OPERATORS",
        "ExperienceOperator": "trireme.pipeline.operators",
        "ExperienceOperatorV1": "trireme.pipeline.operators:ExperienceOperator",
    },
    "trinity.common": {},
    "trinity.common.constants": {
        **dict.fromkeys(_CONSTANTS, "trinity.common"),
        "SELECTOR_METRIC": "trireme.pipeline.operators",
    },
    "trinity.buffer.selector": _SELECTOR,
    "trinity.buffer.selector.selector": _SELECTOR,
    "trinity.common.config": {
        **dict.fromkeys(("Config", "load_config"), "trireme.config"),
        **dict.fromkeys(_SECTIONS, "trireme.config.schema_rollout"),
        "BufferConfig": "trireme.config.schema_rollout",
        "TaskSelectorConfig": "trireme.config.schema_rollout:DataSelectorConfig",
    },
    "trinity.common.experience": dict.fromkeys(
        ("EID", "Experience", "group_by"), "trireme.experience"
    ),
    "trinity.common.models": _MODEL,
    "trinity.common.models.model": _MODEL,
    "trinity.common.rewards": _REWARDS,
    "trinity.common.rewards.eval_utils": {
        "find_boxed_answer": f"{_ANSWERS}:boxed",
        "remove_right_units": f"{_ANSWERS}:without_unit",
        "validate_think_pattern": f"{_ANSWERS}:thinks",
    },
    "trinity.common.rewards.naive_dapo_score": {
        "grade_answer": f"{_ANSWERS}:graded",
        "match_answer": f"{_ANSWERS}:boxed_or_all",
    },
    "trinity.common.rewards.qwen25_eval": {"fix_fracs": f"{_ANSWERS}:whole_fractions"},
    "trinity.common.rewards.reward_fn": _REWARDS,
    "trinity.common.workflows": _WORKFLOW | _STEP_WISE | _ALFWORLD | _WEBSHOP | _REACT,
    "trinity.common.workflows.agentscope": {},
    "trinity.common.workflows.agentscope.react": {},
    "trinity.common.workflows.agentscope.react.react_workflow": _REACT,
    "trinity.common.workflows.agentscope_workflow": {
        name: f"{_AGENTSCOPE}:AgentScopeWorkflow"
        for name in ("AgentScopeWorkflowAdapter", "AgentScopeWorkflowAdapterV1")
    },
    "trinity.common.workflows.customized_math_workflows": _MATHS,
    "trinity.common.workflows.customized_toolcall_workflows": {
        "ToolCallWorkflow": "trireme.workflows.single_turn"
    },
    "trinity.common.workflows.envs": {},
    "trinity.common.workflows.envs.agentscope": {},
    "trinity.common.workflows.envs.agentscope.agentscopev0_react_workflow": {
        "AgentScopeV0ReactMathWorkflow": f"{_AGENTSCOPE}:AgentScopeOldReActWorkflow"
    },
    "trinity.common.workflows.envs.agentscope.agentscopev1_react_workflow": {
        "AgentScopeReactMathWorkflow": f"{_AGENTSCOPE}:AgentScopeReActWorkflow"
    },
    "trinity.common.workflows.envs.agentscope.agentscopev1_search_workflow": {
        "AgentScopeV1ReactSearchWorkflow": f"{_AGENTSCOPE}:AgentScopeSearchWorkflow"
    },
    "trinity.common.workflows.envs.alfworld": _ALFWORLD,
    "trinity.common.workflows.envs.alfworld.alfworld_workflow": {
        **_ALFWORLD,
        "AlfWORLD_SYSTEM_PROMPT": "trireme.workflows.alfworld:SYSTEM_PROMPT",
        "create_environment": "trireme.workflows.alfworld",
        "format_observation": "trireme.workflows.alfworld",
        "parse_action": "trireme.workflows.episode",
    },
    "trinity.common.workflows.envs.alfworld.RAFT_alfworld_workflow": {
        "RAFTAlfworldWorkflow": f"{_RAFT}:RaftAlfworldWorkflow"
    },
    "trinity.common.workflows.envs.alfworld.RAFT_reflect_alfworld_workflow": {
        "RAFTReflectAlfworldWorkflow": f"{_RAFT}:RaftReflectAlfworldWorkflow"
    },
    "trinity.common.workflows.envs.email_searcher": {},
    "trinity.common.workflows.envs.email_searcher.workflow": {
        "EmailSearchWorkflow": "trireme.workflows.email_search"
    },
    "trinity.common.workflows.envs.frozen_lake": {},
    "trinity.common.workflows.envs.frozen_lake.workflow": _GYM,
    "trinity.common.workflows.envs.intercode_sql": {},
    "trinity.common.workflows.envs.intercode_sql.intercode_sql_workflow": {
        "InterCodeSQLWorkflow": "trireme.workflows.intercode:InterCodeSqlWorkflow"
    },
    "trinity.common.workflows.envs.sciworld": {},
    "trinity.common.workflows.envs.sudoku": {},
    "trinity.common.workflows.envs.sudoku.sudoku_workflow": {
        "SudokuWorkflow": "trireme.workflows.gym"
    },
    "trinity.common.workflows.envs.sciworld.sciworld_workflow": {
        "SciWorldWorkflow": "trireme.workflows.sciworld"
    },
    "trinity.common.workflows.envs.webshop": _WEBSHOP,
    "trinity.common.workflows.envs.webshop.webshop_workflow": {
        **_WEBSHOP,
        "format_observation": "trireme.workflows.webshop",
        "parse_action": "trireme.workflows.episode",
    },
    "trinity.common.workflows.eval_workflow": _named(_SINGLE, MathEvalWorkflow="MathEvalWorkflow"),
    "trinity.common.workflows.math_rm_workflow": _named(_SINGLE, MathRMWorkflow="MathRmWorkflow"),
    "trinity.common.workflows.math_ruler_workflow": _named(
        _SINGLE, MathRULERWorkflow="MathRulerWorkflow"
    ),
    "trinity.common.workflows.math_trainable_ruler_workflow": _named(
        _SINGLE, MathTrainableRULERWorkflow="MathTrainableRulerWorkflow"
    ),
    "trinity.common.workflows.on_policy_distill_workflow": _named(
        _SINGLE,
        OnPolicyDistillWorkflow="OnPolicyDistillWorkflow",
        OnPolicyDistillMathWorkflow="OnPolicyDistillMathWorkflow",
    ),
    "trinity.common.workflows.rubric_judge_workflow": _named(
        _SINGLE,
        RubricJudgeWorkflow="RubricJudgeWorkflow",
        RubricJudgeWorkflowWithAPI="RubricJudgeWorkflow",
    ),
    "trinity.common.workflows.step_wise_workflow": _STEP_WISE,
    "trinity.common.workflows.workflow": _WORKFLOW,
    "trinity.utils": {},
    "trinity.utils.log": {"get_logger": "trireme.log"},
    "trinity.utils.timer": {"Timer": f"{_CLASSES}:timed"},
    "trinity.utils.registry": {"Registry": "trireme.registry"},
}
"""Module -> its names -> where each lies: a module of ours, or `module:other_name`."""


class _Modules(MetaPathFinder, Loader):
    """Finds the modules of `NAMES` that are no files, and makes them."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """None for what is not ours, or is a file."""
        place = Path(__file__).parent.joinpath(*name.split(".")[1:])
        if name not in NAMES or place.with_suffix(".py").exists() or any(place.glob("__init__.py")):
            return None
        spec = ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = [str(place)]  # users may put files of theirs there
        return spec

    def exec_module(self, module: ModuleType) -> None:
        """Its names are imported when they are used."""
        vars(module)["__getattr__"] = lazy_names(module.__name__, NAMES[module.__name__])


sys.meta_path.insert(0, _Modules())  # a folder without __init__.py must not be found before
