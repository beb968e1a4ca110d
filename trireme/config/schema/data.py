"""Data sections: one data set, its columns, its sampling options, and its order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trireme.config.schema.number import number


@dataclass(frozen=True)
class FormatConfig:
    """Which column holds what."""

    prompt_type: Literal["messages", "plaintext"] = "messages"
    """Whether an SFT or DPO row holds a list of messages or plain text."""
    prompt_key: str = "prompt"
    """Column of the question or task."""
    response_key: str = "response"
    """Column of the right answer (or, for SFT, of the reply)."""
    system_prompt_key: str | None = None
    """Column of a system prompt; goes before `system_prompt`."""
    system_prompt: str | None = None
    """One system prompt for all rows."""
    messages_key: str = "message"
    """Column of a whole conversation."""
    tools_key: str = "tools"
    """Column of the tools that the conversation may call."""
    image_key: str | None = None
    """Column of images."""
    video_key: str | None = None
    """Column of videos."""
    reply_prefix: str | None = None
    """Text that every reply begins with."""
    workflow_key: str = ""
    """Column that names a row's own workflow."""
    reward_fn_key: str = ""
    """Column that names a row's own reward."""
    chosen_key: str = "chosen"
    """Column of the preferred reply (DPO)."""
    rejected_key: str = "rejected"
    """Column of the other reply (DPO)."""
    enable_concatenated_multi_turn: bool = False
    """SFT trains every assistant turn instead of the last one."""
    chat_template: str | None = None
    """A chat template for this data set; not given: the model's."""
    enable_thinking: bool | None = None
    """Passed to chat templates that know it; not given: the model's."""


@dataclass(frozen=True)
class GenerationConfig:
    """How rollouts of a data set sample; what is not given comes from the model section."""

    temperature: float | None = number(None, at_least=0, at_most=100)
    """Not given: `model.temperature`."""
    top_p: float | None = number(None, above=0, at_most=1)
    """Not given: `model.top_p`."""
    top_k: int | None = number(None, at_least=-1)
    """Not given: `model.top_k`."""
    min_p: float = number(0.0, at_least=0, at_most=1)
    """Drop tokens less likely than this share of the likeliest one."""
    logprobs: int | None = number(None, at_least=0, at_most=64)
    """Not given: `model.logprobs`."""
    max_tokens: int | None = number(None, at_least=1)
    """Not given: `model.max_response_tokens`."""
    min_tokens: int | None = number(None, at_least=0)
    """Not given: `model.min_response_tokens`."""
    repetition_penalty: float | None = number(None, at_least=0.01, at_most=100)
    """Not given: `model.repetition_penalty`."""
    n: int = number(1, at_least=1)
    """Replies per call; the number of rollouts is `algorithm.repeat_times`, not this."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a reply."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Token ids that end a reply."""


@dataclass(frozen=True)
class DataSelectorConfig:
    """The order in which a taskset hands out its tasks."""

    selector_type: str = "sequential"
    """sequential, shuffle, random, offline_easy2hard, difficulty_based, or a path, `file:name`."""
    seed: int = 42
    """Seed of the order."""
    feature_keys: list[str] = field(default_factory=list)
    """Columns of numbers that a selector orders rows by."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the selector."""


@dataclass(frozen=True)
class TasksetConfig:
    """Tasks to explore or to evaluate on."""

    name: str = ""
    """Name in metrics and logs; not given: taskset_0, eval_taskset_0 and so on."""
    storage_type: Literal["file", "sql"] = "file"
    """Where the rows lie."""
    path: str = ""
    """A local file or folder, an id on the hub, or reasoning_gym:NAME?OPTIONS (environments.md)."""
    split: str = "train"
    """Split of the data set."""
    subset_name: str | None = None
    """Configuration of the data set."""
    format: FormatConfig = field(default_factory=FormatConfig)
    """Columns."""
    default_workflow_type: str | None = None
    """Workflow of these tasks: a registered name or a path, `file:name`."""
    default_reward_fn_type: str | list[Any] | None = None
    """Reward of these tasks: a name or a path, `file:name`; or a list of them (docs/rewards.md)."""
    rollout_args: GenerationConfig = field(default_factory=GenerationConfig)
    """How rollouts sample."""
    workflow_args: dict[str, Any] = field(default_factory=dict)
    """Given to the workflow as `task.workflow_args`."""
    reward_fn_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the reward."""
    data_selector: DataSelectorConfig = field(default_factory=DataSelectorConfig)
    """Order of the tasks."""
    task_selector: DataSelectorConfig | None = None
    """Older name of `data_selector`; used where it is given."""
    on_error: Literal["fail", "skip"] = "fail"
    """What a malformed row does: end the run before it begins, or be left out and counted."""
    enable_progress_bar: bool = False
    """Show a bar while rows load."""
    repeat_times: int = number(1, at_least=1)
    """Rollouts of each evaluation task; for training `algorithm.repeat_times` holds."""
    max_retry_times: int = number(3, at_least=0)
    """Tries to reach an SQL store."""
    max_retry_interval: float = number(1, at_least=0)
    """Seconds between them."""
