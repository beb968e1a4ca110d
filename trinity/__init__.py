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
    "BaseSimpleWorkflow": "trireme.workflows.single_turn:SimpleWorkflow",
    "AsyncMathWorkflow": "trireme.workflows.single_turn:MathWorkflow",
    "AsyncMathBoxedWorkflow": "trireme.workflows.single_turn:MathBoxedWorkflow",
    "AsyncMultiTurnWorkflow": "trireme.workflows.episode:MultiTurnWorkflow",
}
_STEP_WISE = {
    "StepWiseRewardWorkflow": "trireme.workflows.step_wise",
    "RewardPropagationWorkflow": "trireme.workflows.step_wise",
    "AsyncStepWiseRewardWorkflow": "trireme.workflows.step_wise:StepWiseRewardWorkflow",
    "AsyncRewardPropagationWorkflow": "trireme.workflows.step_wise:RewardPropagationWorkflow",
}
_ALFWORLD = {  # of files of this folder
    "AlfworldWorkflow": "trinity.common.workflows.envs.alfworld.alfworld_workflow",
    "StepWiseAlfworldWorkflow": "trinity.common.workflows.step_wise_workflow",
}
_RAFT = "trireme.ext.alfworld.raft"
_AGENTSCOPE = "trireme.ext.agents.agentscope"
_REACT = {"AgentScopeReActWorkflow": _AGENTSCOPE}
_WEBSHOP = {"WebShopWorkflow": "trireme.ext.webshop.workflow"}

_CLASSES = "trireme.ext.trinity.classes"
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
    *("RunningStatus", "StorageType", "SyncMethod", "SyncStyle", "OpType", "PromptType"),
    *("EXPLORER_NAME", "TRAINER_NAME"),
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
_JUDGING = "trireme.ext.judges.workflows"
_GYM = {"FrozenLakeWorkflow": "trireme.ext.environments.workflow"}
_SELECTOR = {"BaseSelector": "trireme.data.selectors", "SELECTORS": "trireme.registry"}
_SECTIONS = (
    *("FormatConfig", "GenerationConfig", "DataSelectorConfig", "TasksetConfig", "BufferConfig"),
    *("ReplayBufferConfig", "OverRolloutConfig", "DynamicTimeoutConfig", "OperatorConfig"),
    *("ExperienceBufferConfig", "ExperiencePipelineConfig", "TaskPipelineConfig"),
    *("DataProcessorConfig", "ExplorerConfig"),
)
_OTHER_SECTIONS = (
    *("AlgorithmConfig", "OptimizerConfig", "ModelConfig", "ExternalModelConfig", "ClusterConfig"),
    *("SynchronizerConfig", "TrainerConfig", "MonitorConfig", "LogConfig", "ServiceConfig"),
    "StageConfig",
)
_FORMS = "trireme.ext.trinity.rewards"
_OPERATOR = {
    "EXPERIENCE_OPERATORS": "trireme.registry:OPERATORS",
    "ExperienceOperator": "trireme.pipeline.operators",
    "ExperienceOperatorV1": "trireme.pipeline.operators:ExperienceOperator",
}

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
    "trinity.buffer.buffer_reader": _READER,
    "trinity.buffer.operators": _OPERATOR,
    "trinity.buffer.operators.experience_operator": _OPERATOR,
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
        **dict.fromkeys(_OTHER_SECTIONS, "trireme.config.schema"),
        "InferenceModelConfig": "trireme.config.schema_rollout:RolloutModelConfig",
        "ExplorerInput": "trireme.config.schema_rollout:ExplorerInputConfig",
        "TrainerInput": "trireme.config.schema_rollout:TrainerInputConfig",
        "LoRAConfig": "trireme.config.schema:LoraConfig",
        "DataJuicerServiceConfig": "trireme.config.schema:DataJuicerConfig",
        "TaskSelectorConfig": "trireme.config.schema_rollout:DataSelectorConfig",
    },
    "trinity.common.experience": dict.fromkeys(
        ("EID", "Experience", "group_by"), "trireme.experience"
    ),
    "trinity.common.models": _MODEL,
    "trinity.common.models.model": _MODEL,
    "trinity.common.rewards": _REWARDS,
    "trinity.common.rewards.accuracy_reward": {"AccuracyReward": _FORMS},
    "trinity.common.rewards.countdown_reward": {"CountDownRewardFn": _FORMS},
    "trinity.common.rewards.dapo_reward": {"MathDAPORewardFn": _FORMS},
    "trinity.common.rewards.format_reward": {"FormatReward": _FORMS},
    "trinity.common.rewards.math_reward": dict.fromkeys(
        ("MathRewardFn", "MathBoxedRewardFn"), _FORMS
    ),
    "trinity.common.rewards.eval_utils": {
        "simple_answer_parser": f"{_ANSWERS}:final_answer",
        **dict.fromkeys(
            (
                *("compute_score_v0", "evaluate_equation", "extract_solution", "is_equiv"),
                *("last_boxed_only_string", "remove_boxed", "validate_equation"),
            ),
            _FORMS,
        ),
        "find_boxed_answer": f"{_ANSWERS}:boxed",
        "remove_right_units": f"{_ANSWERS}:without_unit",
        "validate_think_pattern": f"{_ANSWERS}:thinks",
    },
    "trinity.common.rewards.naive_dapo_score": {
        "grade_answer": f"{_ANSWERS}:graded",
        "match_answer": f"{_ANSWERS}:boxed_or_all",
        "compute_score": _FORMS,
    },
    "trinity.common.rewards.qwen25_eval": {
        "extract_answer": f"{_ANSWERS}:final_answer",
        "fix_fracs": f"{_ANSWERS}:whole_fractions",
        "math_equal": f"{_ANSWERS}:same",
        "strip_string": f"{_ANSWERS}:plain",
        "verify_math_answer": _FORMS,
    },
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
    "trinity.common.workflows.envs.alfworld.RAFT_alfworld_workflow": {
        "RAFTAlfworldWorkflow": f"{_RAFT}:RaftAlfworldWorkflow"
    },
    "trinity.common.workflows.envs.alfworld.RAFT_reflect_alfworld_workflow": {
        "RAFTReflectAlfworldWorkflow": f"{_RAFT}:RaftReflectAlfworldWorkflow"
    },
    "trinity.common.workflows.envs.email_searcher": {},
    "trinity.common.workflows.envs.email_searcher.workflow": {
        "EmailSearchWorkflow": "trireme.ext.small_worlds.email_search"
    },
    "trinity.common.workflows.envs.frozen_lake": {},
    "trinity.common.workflows.envs.frozen_lake.workflow": _GYM,
    "trinity.common.workflows.envs.intercode_sql": {},
    "trinity.common.workflows.envs.intercode_sql.intercode_sql_workflow": {
        "InterCodeSQLWorkflow": "trireme.ext.small_worlds.intercode:InterCodeSqlWorkflow",
        "INTERCODE_SQL_SYSTEM_PROMPT": "trireme.ext.small_worlds.intercode:SYSTEM_PROMPT",
    },
    "trinity.common.workflows.envs.sciworld": {},
    "trinity.common.workflows.envs.sudoku": {},
    "trinity.common.workflows.envs.sudoku.sudoku_workflow": {
        "SudokuWorkflow": "trireme.ext.environments.workflow"
    },
    "trinity.common.workflows.envs.sciworld.sciworld_workflow": {
        "SciWorldWorkflow": "trireme.ext.small_worlds.sciworld",
        "SCIWORLD_SYSTEM_PROMPT": "trireme.ext.small_worlds.sciworld:SYSTEM_PROMPT",
    },
    "trinity.common.workflows.envs.webshop": _WEBSHOP,
    "trinity.common.workflows.envs.webshop.webshop_workflow": {
        **_WEBSHOP,
        "WebShop_SYSTEM_PROMPT": "trireme.ext.webshop.workflow:SYSTEM_PROMPT",
        "format_observation": "trireme.ext.webshop.workflow",
        "parse_action": "trireme.workflows.episode",
    },
    "trinity.common.workflows.eval_workflow": _named(_SINGLE, MathEvalWorkflow="MathEvalWorkflow"),
    "trinity.common.workflows.math_rm_workflow": _named(_JUDGING, MathRMWorkflow="MathRmWorkflow"),
    "trinity.common.workflows.math_ruler_workflow": _named(
        _JUDGING, MathRULERWorkflow="MathRulerWorkflow"
    ),
    "trinity.common.workflows.math_trainable_ruler_workflow": _named(
        _JUDGING, MathTrainableRULERWorkflow="MathTrainableRulerWorkflow"
    ),
    "trinity.common.workflows.on_policy_distill_workflow": _named(
        _SINGLE,
        OnPolicyDistillWorkflow="OnPolicyDistillWorkflow",
        OnPolicyDistillMathWorkflow="OnPolicyDistillMathWorkflow",
    ),
    "trinity.common.workflows.rubric_judge_workflow": _named(
        _JUDGING,
        RubricJudgeWorkflow="RubricJudgeWorkflow",
        RubricJudgeWorkflowWithAPI="RubricJudgeWorkflow",
    ),
    "trinity.common.workflows.workflow": _WORKFLOW,
    "trinity.utils": {},
    "trinity.utils.annotations": dict.fromkeys(("Deprecated", "Experimental"), "trinity.common"),
    "trinity.utils.metrics": {"aggregate_metrics": f"{_CLASSES}:gather_metrics"},
    "trinity.utils.monitor": {
        "gather_metrics": _CLASSES,
    },
    "trinity.utils.log": {"get_logger": "trireme.log"},
    "trinity.utils.timer": {"Timer": f"{_CLASSES}:timed"},
    "trinity.utils.registry": {"Registry": "trireme.registry"},
}
"""Module -> its names -> where each lies: a module of ours, or `module:other_name`."""


_BY_NAME = "is built in by the name that the YAML gives, as a function: see"
_OF_LOSS = f"{_BY_NAME} algorithm.policy_loss_fn, and trireme.algorithms.policy_loss"
_OF_ADVANTAGE = f"{_BY_NAME} algorithm.advantage_fn, and trireme.algorithms.advantage"
_OF_SAMPLE = f"{_BY_NAME} algorithm.sample_strategy, and trireme.algorithms.sample"
_OF_SELECTOR = f"{_BY_NAME} data_selector, and trireme.data.selectors"
_OF_TRACKER = "is a function or class of yours under @tracker: see docs/trackers.md"
_OF_OPERATOR = (
    f"{_BY_NAME} data_processor.experience_pipeline.operators, and trireme.pipeline.operators"
)
_MAKES_OPERATORS = "makes what data_processor.experience_pipeline names, as every run does"
_OF_STORE = "stores data, and here a taskset or buffer of the YAML says where that lies"
_OF_TRAINER = (
    "is part of a trainer that rests on verl: losses, advantages and entropies of your own are "
    "registered (docs/algorithms.md), and verl's options are read from trainer.trainer_config"
)
_OF_IMAGES = "is for images, and prompts are text only here: SimpleWorkflow is that for text"
_OF_ENV = "is a helper of one environment, whose workflow is built in: see docs/environments.md"
_OF_AGENT = "is the agent of one workflow, which is built in: see docs/agent_programs.md"
_OF_RUN = "is how a run works inside: from Python it is trireme.train, else the command trireme"
_OF_RM = "asks the package rm-gallery, which is not used here: see the rewards judge and rubric"
_WITHOUT_LIMIT = "has no counterpart: use final_answer and same of trireme.rewards.answers"
_OF_PLUGINS = "is the key plugins of the YAML, or TRINITY_PLUGIN_DIRS"


def _each(package: str, names: str, text: str) -> dict[str, str]:
    """Modules of a package; or, where a colon stands behind it, names of a module."""
    return {
        f"{package.rstrip(':')}{':' if package[-1] == ':' else '.'}{name}": text
        for name in names.split()
    }


ELSEWHERE: dict[str, str] = {
    **_each(
        "trinity.algorithm.advantage_fn",
        "asymre_advantage clipb_advantage clipv_advantage gigpo_advantage grpo_advantage "
        "jsd_advantage multi_step_grpo_advantage on_policy_distill_advantage opmd_advantage "
        "ppo_advantage rec_advantage reinforce_advantage reinforce_plus_plus_advantage "
        "remax_advantage rloo_advantage",
        _OF_ADVANTAGE,
    ),
    **_each(
        "trinity.algorithm.algorithm:",
        "SFTAlgorithm CPTAlgorithm PPOAlgorithm GRPOAlgorithm DAPOAlgorithm "
        "ReinforcePlusPlusAlgorithm RLOOAlgorithm OPMDAlgorithm AsymREAlgorithm DPOAlgorithm "
        "TOPRAlgorithm CISPOAlgorithm GSPOAlgorithm SAPOAlgorithm MIXAlgorithm MIXCHORDAlgorithm "
        "RAFTAlgorithm sPPOAlgorithm RECAlgorithm MultiStepGRPOAlgorithm OnPolicyDistillAlgorithm "
        "JSDAlgorithm GRPOverlAlgorithm GiGPOAlgorithm",
        "is built in by the name that the YAML gives, as a row of a table: see "
        "algorithm.algorithm_type, and trireme.algorithms.table",
    ),
    **_each(
        "trinity.algorithm.entropy_loss_fn.entropy_loss_fn:",
        "DefaultEntropyLossFn MixEntropyLossFn DummyEntropyLossFn",
        f"{_BY_NAME} algorithm.entropy_loss_fn, and trireme.algorithms.kl",
    ),
    **_each(
        "trinity.algorithm.kl_fn.kl_fn:",
        "DummyKLFn K1Fn K2Fn K3Fn LowVarKLFn AbsFn CorrectedK3Fn",
        f"{_BY_NAME} algorithm.kl_loss_fn, and trireme.algorithms.kl",
    ),
    **_each(
        "trinity.algorithm.policy_loss_fn",
        "chord_policy_loss cispo_policy_loss dpo_loss gspo_policy_loss "
        "importance_sampling_policy_loss mix_policy_loss opmd_policy_loss ppo_policy_loss "
        "rec_policy_loss sapo_policy_loss sft_loss sppo_loss_fn topr_policy_loss",
        _OF_LOSS,
    ),
    "trinity.algorithm.key_mapper": "names a loss's arguments: here its signature does",
    "trinity.algorithm.sample_strategy.mix_sample_strategy": _OF_SAMPLE,
    **_each(
        "trinity.algorithm.sample_strategy.sample_strategy:",
        "StalenessControlSampleStrategy WarmupSampleStrategy",
        _OF_SAMPLE,
    ),
    "trinity.algorithm.utils:masked_whiten": (
        "is for verl's tensors: see whiten of trireme.algorithms.token_advantage"
    ),
    **_each(
        "trinity.buffer",
        "buffer_writer reader schema storage task_scheduler utils writer",
        _OF_STORE,
    ),
    **_each(
        "trinity.buffer.operators",
        "data_juicer_operator filters filters.reward_filter mappers mappers.pass_rate_calculator "
        "mappers.reward_shaping_mapper",
        _OF_OPERATOR,
    ),
    "trinity.buffer.operators:create_operators": _MAKES_OPERATORS,
    "trinity.buffer.operators.experience_operator:create_operators": _MAKES_OPERATORS,
    "trinity.buffer.pipelines": "is what data_processor of the YAML asks for: see docs/pipeline.md",
    **_each("trinity.buffer:", "BufferWriter get_buffer_writer", _OF_STORE),
    "trinity.buffer.buffer:get_buffer_writer": _OF_STORE,
    "trinity.buffer.selector.difficulty_estimator": _OF_SELECTOR,
    **_each(
        "trinity.buffer.selector.selector:",
        "SequentialSelector ShuffleSelector RandomSelector OfflineEasy2HardSelector "
        "DifficultyBasedSelector",
        _OF_SELECTOR,
    ),
    "trinity.buffer.viewer": "is the command trireme view",
    "trinity.cli": "is the command trireme, of which trinity is a second name",
    "trinity.common.config_validator": "is the command trireme check",
    "trinity.common.config:StorageConfig": (
        "is TasksetConfig for tasks, and ExperienceBufferConfig for what is trained"
    ),
    "trinity.common.config:TinkerConfig": "is for a remote trainer, which is not supported",
    **_each("trinity.common", "dataclass_utils experience_visualizer", _OF_RUN),
    "trinity.common.experience:CustomField": (
        "is not read: what a loss needs beside the usual is an argument that its signature names "
        "(docs/algorithms.md)"
    ),
    **_each(
        "trinity.common.models",
        "allocator experience_extraction sglang_model sglang_patch tinker_model vllm_extension "
        "vllm_model vllm_patch vllm_worker external_model",
        "is part of the engines: see docs/engines.md",
    ),
    "trinity.common.models.mm_utils": _OF_IMAGES,
    "trinity.common.models.utils": (
        "reads checkpoints of verl, as trireme convert does for FSDP and Megatron"
    ),
    "trinity.common.patch": "changes models for verl, and the models that train here need none",
    **_each("trinity.common.rewards", "agents_reward human_reward", "is empty there, too"),
    "trinity.common.rewards.eval_utils:parse_with_timeout": _WITHOUT_LIMIT,
    "trinity.common.rewards.eval_utils:verify_with_timeout": _WITHOUT_LIMIT,
    **_each("trinity.common.rewards", "rm_gallery_reward utils", _OF_RM),
    "trinity.common.rewards.tool_reward": "is empty there, too: see the reward tool_call_reward",
    "trinity.common.schema": _OF_STORE,
    **_each("trinity.common.workflows.agentscope.react", "react_agent templates", _OF_AGENT),
    **_each(
        "trinity.common.workflows.envs",
        "alfworld.RAFT_utils email_searcher.prepare_data email_searcher.utils frozen_lake.utils "
        "sudoku.sudoku_generator sudoku.sudoku_judge",
        _OF_ENV,
    ),
    "trinity.common.workflows.envs.email_searcher.react_agent": _OF_AGENT,
    "trinity.common.workflows.simple_mm_workflow": _OF_IMAGES,
    "trinity.explorer": _OF_RUN,
    "trinity.explorer.proxy": "is mode serve and its HTTP API: see docs/agents.md",
    "trinity.manager": _OF_RUN,
    "trinity.perf": "is the command trireme bench: see docs/performance.md",
    "trinity.plugins": _OF_PLUGINS,
    "trinity.service": "is a server of Data-Juicer, whose operators are here: see docs/pipeline.md",
    "trinity.trainer": _OF_TRAINER,
    "trinity.utils.distributed": _OF_RUN,
    "trinity.utils.dlc_utils": "starts Ray, as a run does itself where cluster asks for it",
    "trinity.utils.lora_utils": "is model.lora_configs of the YAML",
    **_each(
        "trinity.utils.monitor:",
        "MONITOR Monitor TensorboardMonitor WandbMonitor MlflowMonitor SwanlabMonitor",
        _OF_TRACKER,
    ),
    "trinity.utils.plugin_loader": _OF_PLUGINS,
    "trinity.utils.stream_saver": _OF_RUN,
}
"""Names of Trinity-RFT that lead to nothing here: a module with all below it, or `module:name`,
and what an error says of it.
"""


def _refuse(path: str, name: str) -> None:
    """Raise ImportError, saying what to use, for a module or `module:name` that is not here."""
    place = path
    while place:
        if (text := ELSEWHERE.get(place)) is not None:
            told = path.replace(":", ".")
            raise ModuleNotFoundError(f"{told} of Trinity-RFT is not here: it {text}", name=name)
        if ":" in path:
            return
        place = place.rpartition(".")[0]


def _lazy(module: str) -> Any:
    """The `__getattr__` of a module: its names are imported when they are used."""
    ours = lazy_names(module, NAMES[module])

    def get(name: str) -> Any:
        if name not in NAMES[module]:
            _refuse(f"{module}:{name}", module)
        return ours(name)

    return get


class _Modules(MetaPathFinder, Loader):
    """Finds the modules of `NAMES` that are no files, and makes them; refuses those of others."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """None for what is not ours, or is a file."""
        place = Path(__file__).parent.joinpath(*name.split(".")[1:])
        if name.partition(".")[0] != __name__ or name == __name__:
            return None
        if place.with_suffix(".py").exists() or any(place.glob("__init__.py")):
            return None
        if name not in NAMES:
            _refuse(name, name)
            return None
        spec = ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = [str(place)]  # users may put files of theirs there
        return spec

    def exec_module(self, module: ModuleType) -> None:
        """Its names are imported when they are used."""
        vars(module)["__getattr__"] = _lazy(module.__name__)


sys.meta_path.insert(0, _Modules())  # a folder without __init__.py must not be found before
