"""Explorer section: how many runners try tasks at once, for how long, and on which engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trireme.config.schema.number import number


@dataclass(frozen=True)
class RolloutModelConfig:
    """The engine that generates."""

    model_path: str | None = None
    """Only auxiliary models name their own; the rollout model is `model.model_path`."""
    engine_type: Literal["torch", "vllm", "sglang", "remote", "external", "tinker"] | None = None
    """Not given: the best that is there; without vLLM or a GPU: torch, embedded."""
    engine_python: str | None = None
    """Python of an environment that has vLLM; not given: this one, or TRIREME_VLLM_PYTHON's."""
    engine_num: int = number(1, at_least=1)
    """Engines, each a process of its own; an embedded one is one, and only runners multiply."""
    tensor_parallel_size: int = number(1, at_least=1)
    """GPUs that share one engine."""
    data_parallel_size: int = number(1, at_least=1)
    """Copies inside one engine."""
    pipeline_parallel_size: int = number(1, at_least=1)
    """Pipeline stages of one engine."""
    enable_expert_parallel: bool = False
    """Spread experts over GPUs."""
    enforce_eager: bool = False
    """No CUDA graphs."""
    enable_prefix_caching: bool = True
    """Keep the keys and values of what prompts share."""
    enable_chunked_prefill: bool = True
    """Cut long prefills."""
    gpu_memory_utilization: float = number(0.9, above=0, at_most=1)
    """Share of a GPU's memory for the engine."""
    dtype: Literal["bfloat16", "float16", "float32", "auto"] = "bfloat16"
    """Number format on a GPU; a CPU computes in float32."""
    seed: int | None = None
    """Seed of sampling; not given: the top-level `seed`."""
    enable_history: bool = False
    """Record every call; calls are always recorded here."""
    enable_openai_api: bool = False
    """Serve the OpenAI API; workflows always have a client of it here."""
    enable_auto_tool_choice: bool = False
    """Let the model decide when it calls a tool."""
    tool_call_parser: str | None = None
    """How tool calls are read from a reply."""
    reasoning_parser: str | None = None
    """How thinking is split from a reply."""
    chat_template: str | None = None
    """A chat template for rollouts; not given: the model's."""
    enable_thinking: bool | None = None
    """Passed to chat templates that know it; not given: the model's."""
    max_model_len: int | None = number(None, at_least=2)
    """Not given: `model.max_model_len`."""
    max_prompt_tokens: int | None = number(None, at_least=1)
    """Not given: `model.max_prompt_tokens`."""
    max_response_tokens: int | None = number(None, at_least=1)
    """Not given: `model.max_response_tokens`."""
    min_response_tokens: int | None = number(None, at_least=0)
    """Not given: `model.min_response_tokens`."""
    ignore_eos: bool = False
    """Go on past the end-of-sequence token."""
    use_v1: bool = True
    """Version of vLLM's core."""
    extra_engine_args: dict[str, Any] = field(default_factory=dict)
    """Further options of the engine."""
    base_port: int | None = number(None, at_least=1, at_most=65535)
    """First port of engine servers."""
    base_urls: list[str] = field(default_factory=list)
    """Rollout servers of `engine_type: remote`, started with `trireme rollout`; an auxiliary model
    of `engine_type: external`: the OpenAI API that has it."""
    api_key: str | None = None
    """Key of a remote engine, and of `mode: serve`."""


@dataclass(frozen=True)
class OverRolloutConfig:
    """Go on without the slowest tasks of a step."""

    ratio: float = number(0.0, at_least=0, at_most=1)
    """Share of tasks that need not be waited for."""
    wait_after_min: float = number(30.0, at_least=0)
    """Seconds that the rest still gets."""
    return_partial_tasks: bool = False
    """Keep what unfinished tasks have."""


@dataclass(frozen=True)
class DynamicTimeoutConfig:
    """A time-out that follows how long tasks take."""

    enable: bool = False
    """Turns it on."""
    ratio: float = number(3.0, above=0)
    """Times the mean time of a task."""
    warmup_min_steps: int = number(1, at_least=0)
    """Steps before it holds."""


@dataclass(frozen=True)
class ExplorerConfig:
    """Who tries tasks, how many at once, and how long."""

    name: str = "explorer"
    """Name of the part, its log and its state file."""
    runner_per_model: int = number(8, at_least=1)
    """Runners of each engine; runners are engine_num times this."""
    max_timeout: float = number(1800, above=0)
    """Seconds of one attempt at a task; in `mode: serve` of a session that gets no reward."""
    max_retry_times: int = number(2, at_least=0)
    """Further attempts after a failed one; an error of the code itself is not tried again."""
    max_failures: float = number(1.0, above=0, at_most=1)
    """The run stops when this share of a step's tasks fails for good; 1: only when all do."""
    env_vars: dict[str, str] = field(default_factory=dict)
    """Environment of the runners."""
    concurrent_mode: Literal["sequential", "asynchronous", "multi-threading"] = "sequential"
    """How a runner executes the repeats of a task."""
    max_repeat_times_per_runner: int | None = number(None, at_least=1)
    """Split a task's repeats into parts of at most this many; not given: one runner does all."""
    eval_interval: int = number(100, at_least=1)
    """Explore steps between evaluations; moved down to a multiple of the sync interval."""
    eval_on_startup: bool = True
    """Evaluate before the first step."""
    bench_on_latest_checkpoint: bool = False
    """`bench` measures the newest checkpoint only, not the base model and all."""
    runner_state_report_interval: float = number(0, at_least=0)
    """Seconds between tables of runner states in the log; 0 is never."""
    rollout_model: RolloutModelConfig = field(default_factory=RolloutModelConfig)
    """The engine."""
    auxiliary_models: list[RolloutModelConfig] = field(default_factory=list)
    """Further models that workflows and rewards may ask: judges, teachers (docs/rewards.md)."""
    over_rollout: OverRolloutConfig = field(default_factory=OverRolloutConfig)
    """Go on without the slowest."""
    dynamic_timeout: DynamicTimeoutConfig = field(default_factory=DynamicTimeoutConfig)
    """Time-out that follows the tasks."""
    proxy_port: int = number(8010, at_least=0, at_most=65535)
    """Port of `mode: serve`; 0: any that is free."""
    listen_address: str = "0.0.0.0"
    """Address of `mode: serve`; loopback where there is no `rollout_model.api_key`."""
    service_status_check_interval: float = number(60, above=0)
    """Seconds between looks for new weights in `mode: serve`."""
    min_running_model_num: int = number(1, at_least=0)
    """Engines that stay up while others take new weights in `mode: serve`."""
    db_url: str | None = None
    """Where `mode: serve` records."""
