"""Schema of rollouts: declares the YAML's keys of the explorer, its engines, data and buffers."""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator, NonNegativeFloat, NonNegativeInt, PositiveFloat

from trireme.config.options import Share
from trireme.config.section import Count, Instead, Mapped, Moved, NoEffect, Refused, Section
from trireme.registry import is_path


def _of_model(name: str) -> Moved:
    """The mark of an engine's key that an auxiliary model has for itself."""
    return Moved(to=f"model.{name}", on="auxiliary")


class FormatConfig(Section):
    """The columns of a data set and their meaning."""

    prompt_type: Literal["messages", "plaintext"] = "messages"
    """Whether an SFT, DPO or KTO row holds a list of messages or plain text."""
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
    """Column of images; not given: `images` or `image`, if there is one."""
    video_key: Annotated[str | None, Refused("is not supported yet: prompts are text only")] = None
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
    label_key: str = "label"
    """Column that says whether the reply is desirable (KTO)."""
    enable_concatenated_multi_turn: bool = False
    """SFT trains every assistant turn instead of the last one."""
    chat_template: str | None = None
    """A chat template for this data set; not given: the model's."""
    enable_thinking: bool | None = None
    """Passed to the chat template, if it has such a switch; not given: the model's."""


class GenerationConfig(Section):
    """How rollouts of a data set sample; what is not given comes from the model section."""

    temperature: Annotated[float | None, Ge(0), Le(100)] = None
    """Not given: `model.temperature`."""
    top_p: Annotated[float | None, Gt(0), Le(1)] = None
    """Not given: `model.top_p`."""
    top_k: Annotated[int | None, Ge(-1)] = None
    """Not given: `model.top_k`."""
    min_p: Share = 0.0
    """Drop tokens less likely than this share of the likeliest one."""
    logprobs: Annotated[int | None, Ge(0), Le(64)] = None
    """Not given: `model.logprobs`."""
    max_tokens: Annotated[int | None, Ge(1)] = None
    """Not given: `model.max_response_tokens`."""
    min_tokens: Annotated[int | None, Ge(0)] = None
    """Not given: `model.min_response_tokens`."""
    repetition_penalty: Annotated[float | None, Ge(0.01), Le(100)] = None
    """Not given: `model.repetition_penalty`."""
    n: Annotated[
        Count, Refused("has no meaning here: algorithm.repeat_times sets the number of rollouts")
    ] = 1
    """Replies per call; the number of rollouts is `algorithm.repeat_times`, not this."""
    stop: list[str] = []
    """Strings that end a reply."""
    stop_token_ids: list[int] = []
    """Token ids that end a reply; `check` refuses those beyond the model's vocabulary."""


class DataSelectorConfig(Section):
    """The order in which a taskset hands out its tasks."""

    selector_type: str = "sequential"
    """sequential, shuffle, random, offline_easy2hard, difficulty_based, or a path, `file:name`."""
    seed: int = 42
    """Seed of the order."""
    feature_keys: list[str] = []
    """Columns of numbers that a selector orders rows by."""
    kwargs: dict[str, Any] = {}
    """Options of the selector."""


class TasksetConfig(Section):
    """Tasks to explore or to evaluate on."""

    name: str = ""
    """Name in metrics and logs; not given: taskset_0, eval_taskset_0 and so on."""
    storage_type: Literal["file", "sql"] = "file"
    """Files, or a table of a database: the one that `subset_name` names, or `name`, or the only."""
    path: str = ""
    """A local file or folder, a folder of task folders, an id on the hub, sqlite:///FILE or another
    database, or reasoning_gym:NAME?OPTIONS and verifiers:NAME?OPTIONS (environments.md)."""
    split: str = "train"
    """Split of the data set."""
    subset_name: str | None = None
    """Configuration of the data set."""
    format: FormatConfig = FormatConfig()
    """Names of the columns."""
    default_workflow_type: str | None = None
    """Workflow of these tasks: a registered name or a path, `file:name`. With a reward and without
    a workflow: simple_workflow, one prompt and one reply."""
    default_reward_fn_type: str | dict[str, Any] | list[Any] | None = None
    """Reward of these tasks: a name or a path, `file:name`; a mapping of its `name` and options; or
    a list of these (docs/rewards.md)."""
    rollout_args: GenerationConfig = GenerationConfig()
    """Sampling parameters of the rollouts."""
    workflow_args: dict[str, Any] = {}
    """Given to the workflow as `task.workflow_args`; those that it does not read are reported."""
    reward_fn_args: dict[str, Any] = {}
    """Keyword arguments of the reward."""
    data_selector: DataSelectorConfig = DataSelectorConfig()
    """Order of the tasks."""
    task_selector: DataSelectorConfig | None = None
    """Older name of `data_selector`; used where it is given."""
    on_error: Literal["fail", "skip"] = "fail"
    """On a malformed row: refuse to start (fail), or leave the row out and count it (skip)."""
    enable_progress_bar: Annotated[bool, NoEffect()] = False
    """Show a bar while rows load."""
    repeat_times: Count = 1
    """Rollouts of each evaluation task; for training `algorithm.repeat_times` holds."""
    max_retry_times: Annotated[NonNegativeInt, NoEffect()] = 3
    """Tries to reach an SQL store."""
    max_retry_interval: Annotated[NonNegativeFloat, NoEffect()] = 1
    """Seconds between them."""


def small(name: Any) -> Any:
    """The name of an engine or a launcher in small letters; a dotted path as it is."""
    return name.lower() if isinstance(name, str) and not is_path(name) else name


class RolloutModelConfig(Section, place="explorer.rollout_model"):
    """The engine that generates."""

    name: Annotated[str | None, NoEffect()] = None
    """Name of the engine; auxiliary models are identified by their order."""
    model_path: Annotated[str | None, _of_model("model_path")] = None
    """Only auxiliary models name their own; the rollout model is `model.model_path`."""
    engine_type: Annotated[
        str | None,
        BeforeValidator(small),
        Refused(
            values={
                "external": "is for explorer.auxiliary_models alone, since an OpenAI API takes "
                "no new weights: expected {engines} or remote (a server of trireme rollout)",
                "tinker": "is not supported yet: expected {engines} or remote",
            },
            on="auxiliary",
        ),
    ] = None
    """torch, an engine of an extension or of a plug-in, or remote. Not given: the best that is
    there; without another one or a GPU: torch, embedded."""
    engine_python: str | None = None
    """Python of an environment that has the engine; not given: this one, or what the engine's
    variable names, such as TRIREME_VLLM_PYTHON."""
    enable_lora: bool | None = None
    """Whether the engine adds a LoRA adapter's products to those of weights without it, so that the
    embedded engine of one process reads the trainer's own base; false: merged weights, a copy. Not
    given: true, but on a CPU the embedded engine merges, and decodes faster."""
    engine_num: Count = 1
    """Engines, each a process of its own; an embedded one is one, and only runners multiply."""
    tensor_parallel_size: Annotated[
        Count, Mapped("one engine generates, on one device", on="engine")
    ] = 1
    """GPUs that share one engine."""
    data_parallel_size: Annotated[Count, Mapped("one engine generates", on="engine")] = 1
    """Copies inside one engine."""
    pipeline_parallel_size: Annotated[Count, Mapped("one engine generates", on="engine")] = 1
    """Pipeline stages of one engine."""
    enable_expert_parallel: Annotated[bool, Mapped("one engine generates", on="engine")] = False
    """Spread experts over GPUs."""
    nnodes: Annotated[
        Count, Refused("is not supported: an engine's GPUs are of one machine, expected 1")
    ] = 1
    """Machines that share one engine."""
    enforce_eager: Annotated[bool, NoEffect(on="engine")] = False
    """Run without CUDA graphs."""
    enable_prefix_caching: Annotated[bool, NoEffect(on="engine")] = True
    """Reuse the keys and values of shared prefixes."""
    enable_chunked_prefill: Annotated[bool, NoEffect(on="engine")] = True
    """Split long prefills into chunks."""
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1), NoEffect(on="engine")] = 0.9
    """Share of a GPU's memory that the engine takes."""
    dtype: Literal["bfloat16", "float16", "float32", "auto"] = "bfloat16"
    """Number format on a GPU; a CPU computes in float32."""
    seed: int | None = None
    """Seed of sampling; not given: the top-level `seed`."""
    enable_history: Annotated[bool, NoEffect()] = False
    """Record every call; calls are always recorded here."""
    enable_openai_api: Annotated[bool, NoEffect(on="auxiliary")] = False
    """Serve the OpenAI API; workflows always have a client of it here."""
    enable_auto_tool_choice: Annotated[
        bool,
        Mapped(
            "a reply's tool calls are read wherever a request has tools, "
            "unless its tool_choice is none"
        ),
    ] = False
    """Let the model decide when it calls a tool."""
    tool_call_parser: str | None = None
    """How tool calls are read from a reply."""
    reasoning_parser: Literal["deepseek_r1", "qwen3"] | None = None
    """Gives clients of the API a reply's thinking as `reasoning_content`, and `content` the rest.
    deepseek_r1: a reply begins with its thinking; qwen3: if it, or its prompt, opens it."""
    chat_template: Annotated[str | None, _of_model("custom_chat_template")] = None
    """A chat template for rollouts; not given: the model's."""
    enable_thinking: Annotated[bool | None, _of_model("enable_thinking")] = None
    """Passed to the chat template, if it has such a switch; not given: the model's."""
    max_model_len: Annotated[int | None, Ge(2), _of_model("max_model_len")] = None
    """Not given: `model.max_model_len`."""
    max_prompt_tokens: Annotated[int | None, Ge(1), _of_model("max_prompt_tokens")] = None
    """Not given: `model.max_prompt_tokens`."""
    max_response_tokens: Annotated[int | None, Ge(1), _of_model("max_response_tokens")] = None
    """Not given: `model.max_response_tokens`."""
    min_response_tokens: Annotated[int | None, Ge(0), Moved(to="model.min_response_tokens")] = None
    """Not given: `model.min_response_tokens`."""
    enable_prompt_truncation: Annotated[bool | None, Moved(to="model.enable_prompt_truncation")] = (
        None
    )
    """Not given: `model.enable_prompt_truncation`."""
    repetition_penalty: Annotated[
        float | None, Ge(0.01), Le(100), Moved(to="model.repetition_penalty")
    ] = None
    """Not given: `model.repetition_penalty`."""
    temperature: Annotated[float | None, Ge(0), Le(100), Moved(to="model.temperature")] = None
    """Not given: `model.temperature`."""
    top_p: Annotated[float | None, Gt(0), Le(1), Moved(to="model.top_p")] = None
    """Not given: `model.top_p`."""
    top_k: Annotated[int | None, Ge(-1), Moved(to="model.top_k")] = None
    """Not given: `model.top_k`."""
    logprobs: Annotated[int | None, Ge(0), Le(64), Moved(to="model.logprobs")] = None
    """Not given: `model.logprobs`."""
    trust_remote_code: Annotated[bool | None, Moved(to="model.trust_remote_code")] = None
    """Not given: `model.trust_remote_code`."""
    rope_scaling: Annotated[dict[str, Any] | None, Moved(to="model.rope_scaling")] = None
    """Not given: `model.rope_scaling`."""
    rope_theta: Annotated[float | None, Gt(0), Moved(to="model.rope_theta")] = None
    """Not given: `model.rope_theta`."""
    enable_return_routed_experts: bool = False
    """Record the experts that the engine chooses, in `Experience.routed_experts`;
    `algorithm.enable_router_replay` includes it, and it alone trains with them. Mode bench records
    none."""
    ignore_eos: bool = False
    """Continue after the end-of-sequence token."""
    enable_multimodal: Annotated[bool, NoEffect(on="engine")] = False
    """Take images in prompts: an engine may load the model's tower only then."""
    enable_log_requests: Annotated[bool, NoEffect()] = False
    """Log every request in the engine's own log."""
    weight_sync_buffer_size: Annotated[int | None, Ge(1), NoEffect()] = None
    """Bytes of a bucket of weights on their way to the engine."""
    extra_engine_args: Annotated[dict[str, Any], NoEffect(on="engine")] = {}
    """Further options of the engine."""
    base_port: Annotated[int | None, Ge(1), Le(65535), NoEffect()] = None
    """First port of engine servers."""
    base_urls: list[str] = []
    """Rollout servers of `engine_type: remote`, started with `trireme rollout`; an auxiliary model
    of `engine_type: external`: the OpenAI API that has it."""
    api_key: str | None = None
    """Key of a remote engine, and of `mode: serve`."""


class OverRolloutConfig(Section):
    """Go on without the slowest tasks of a step."""

    ratio: Share = 0.0
    """Share of tasks that a step does not wait for."""
    wait_after_min: NonNegativeFloat = 30.0
    """Seconds that the remaining tasks still have."""
    return_partial_tasks: bool = False
    """Keep the finished rollouts of unfinished tasks."""


class DynamicTimeoutConfig(Section):
    """A time-out that follows how long tasks take."""

    enable: bool = False
    """Whether this is on."""
    ratio: PositiveFloat = 3.0
    """Limit as a multiple of a task's mean time."""
    warmup_min_steps: NonNegativeInt = 1
    """Steps before this limit applies."""


class ExplorerConfig(Section, place="explorer"):
    """The explorer: the engines that try tasks, how many tasks at once, and how long."""

    name: str = "explorer"
    """Name of the part, its log and its state file."""
    runner_per_model: Count | None = None
    """Runners of each engine, each of which tries one task at a time (a task that only waits for
    rewards may leave its runner: see `Workflow.one_call`); not given: 8, on GPUs as many as the
    tasks of a step, and as have 512 rollouts at once."""
    max_timeout: PositiveFloat = 1800
    """Time limit of an attempt at a task, in seconds; in `mode: serve` of an unrewarded session."""
    max_retry_times: NonNegativeInt = 2
    """Retries of a failed rollout; an error in the code itself is not retried."""
    max_failures: Annotated[float, Gt(0), Le(1)] = 1.0
    """Share of a step's tasks that may fail before the run stops; 1: it stops when all fail."""
    env_vars: Annotated[
        dict[str, str],
        Mapped("set while it explores, for the whole process, which all runners share"),
    ] = {}
    """Environment of the runners, and of the programs that they start."""
    concurrent_mode: Literal["sequential", "asynchronous", "multi-threading"] = "sequential"
    """How a runner executes the repeats of a task."""
    max_repeat_times_per_runner: Annotated[int | None, Ge(1)] = None
    """Split a task's repeats into parts of at most this many; not given: one runner does all."""
    eval_interval: Annotated[
        Count,
        Instead(
            "to evaluate nothing, leave out buffer.explorer_input.eval_tasksets; to evaluate at "
            "the start and the end only, take more than the run's steps"
        ),
    ] = 100
    """Explore steps between evaluations; moved down to a multiple of the sync interval."""
    eval_on_startup: bool = True
    """Evaluate before the first step."""
    bench_on_latest_checkpoint: bool = False
    """`bench` measures the newest checkpoint only, not the base model and all."""
    runner_state_report_interval: NonNegativeFloat = 0
    """Seconds between tables of runner states in the log; 0 is never."""
    rollout_model: RolloutModelConfig = RolloutModelConfig()
    """The engine."""
    auxiliary_models: list[RolloutModelConfig] = []
    """Further models that workflows and rewards may ask: judges, teachers (docs/rewards.md)."""
    over_rollout: OverRolloutConfig = OverRolloutConfig()
    """Continue a step without its slowest tasks."""
    dynamic_timeout: DynamicTimeoutConfig = DynamicTimeoutConfig()
    """A time limit that follows the mean time of tasks."""
    proxy_port: Annotated[int, Ge(0), Le(65535)] = 8010
    """Port of `mode: serve`; 0: any that is free."""
    listen_address: str = "0.0.0.0"
    """Address of `mode: serve`; loopback where there is no `rollout_model.api_key`."""
    service_status_check_interval: PositiveFloat = 60
    """Seconds between checks for new weights in `mode: serve`."""
    max_inflight_batches: Annotated[int | None, Ge(1), NoEffect()] = None
    """Batches that are tried at once; here `sync_interval` and `sync_offset` say how many."""
    runner_prepare_concurrency: Annotated[int | None, Ge(1), NoEffect()] = None
    """Runners that get ready at once."""
    runner_prepare_max_retries: Annotated[int | None, Ge(0), NoEffect()] = None
    """Further tries to make a runner."""
    min_running_model_num: Annotated[NonNegativeInt, NoEffect()] = 1
    """Engines that stay up while others take new weights in `mode: serve`."""
    db_url: Annotated[str | None, NoEffect()] = None
    """Where `mode: serve` records."""


class ExplorerInputConfig(Section):
    """The tasks that the explorer tries."""

    taskset: TasksetConfig | None = None
    """The tasks of training; either this or `tasksets`."""
    tasksets: list[TasksetConfig] = []
    """Several sets of tasks, mixed."""
    eval_tasksets: list[TasksetConfig] = []
    """Held-out tasks for evaluation."""
    default_workflow_type: str | None = None
    """Workflow of tasksets that name none; without one those with a reward get simple_workflow."""
    default_eval_workflow_type: str | None = None
    """Workflow of evaluation tasksets that name none."""
    default_reward_fn_type: str | dict[str, Any] | list[Any] | None = None
    """Reward of tasksets that name none: one, or a list; see `taskset.default_reward_fn_type`."""


class ReplayBufferConfig(Section):
    """Priority replay: newest experiences first, used again after a rest."""

    enable: bool = False
    """Whether this is on."""
    priority_fn: Literal["linear_decay", "decay_limit_randomization"] = "linear_decay"
    """Function of weight version and use count that gives the priority."""
    reuse_cooldown_time: Annotated[float | None, Gt(0)] = None
    """Seconds after which a used experience may come back; not given: never."""
    priority_fn_args: dict[str, Any] = {"decay": 2.0}
    """Its options: decay; for decay_limit_randomization also use_count_limit and sigma."""


class ExperienceBufferConfig(Section):
    """The store of the trainer's experiences."""

    name: str = "experience_buffer"
    """Name of the store, and of its file where `path` is not given."""
    storage_type: str | None = None
    """queue, sql, file, or the name of another store. Not given: queue; for sft, dpo, kto and cpt
    with a `path`: file."""
    path: str | None = None
    """Data set (file), store (sql), or where a copy of each experience goes (queue)."""
    split: str = "train"
    """Split of a data set (file)."""
    subset_name: str | None = None
    """Configuration of a data set (file)."""
    format: FormatConfig = FormatConfig()
    """Names of a data set's columns (file); inferred by default."""
    total_epochs: Annotated[Count | None, NoEffect()] = None
    """Passes over a data set (file); `buffer` says how long a run is, and experts' data repeats."""
    schema_type: Annotated[str | None, NoEffect()] = None
    """What a row is; the algorithm says so here."""
    data_selector: Annotated[
        DataSelectorConfig, Mapped("a data set's rows are shuffled by the run's seed")
    ] = DataSelectorConfig()
    """Order of a data set's rows (file)."""
    capacity: Count = 10000
    """Explore steps that a queue holds before the explorer waits."""
    max_read_timeout: PositiveFloat = 1800
    """Seconds without a new experience after which the trainer fails."""
    lease_time: PositiveFloat = 60
    """Seconds of silence after which a reader's experiences return to the store (sql)."""
    replay_buffer: ReplayBufferConfig = ReplayBufferConfig()
    """Priority replay (queue, sql)."""
    on_error: Literal["fail", "skip"] = "fail"
    """On a malformed row (file) refuse to start, on a damaged one (sql) stop (fail); or leave the
    row out and count it (skip)."""
    enable_progress_bar: bool = False
    """Show a bar while rows load."""
    max_retry_times: NonNegativeInt = 3
    """Further tries to reach an SQL store when a run begins; later it is waited for, as long as
    `max_read_timeout`."""
    max_retry_interval: NonNegativeFloat = 1
    """Seconds between two tries."""


class TrainerInputConfig(Section):
    """The data that the trainer learns from."""

    experience_buffer: ExperienceBufferConfig = ExperienceBufferConfig()
    """The main store."""
    auxiliary_buffers: dict[str, ExperienceBufferConfig] = {}
    """Further stores by name, for algorithms that mix data."""


class BufferConfig(Section, place="buffer"):
    """Batch sizes, duration, and data."""

    batch_size: Count = 1
    """Tasks of an explore step."""
    train_batch_size: NonNegativeInt = 0
    """Experiences of a train step; 0: batch_size times `algorithm.repeat_times`."""
    total_epochs: Count = 1
    """Epochs: passes over the tasks."""
    total_steps: Annotated[int | None, Ge(1), Instead("without it total_epochs ends the run")] = (
        None
    )
    """Explore steps in place of `total_epochs`; train steps where there are no tasks to explore."""
    explorer_input: ExplorerInputConfig = ExplorerInputConfig()
    """Tasks."""
    trainer_input: TrainerInputConfig = TrainerInputConfig()
    """Experiences."""


class OperatorConfig(Section):
    """One step between explorer and buffer."""

    name: str = ""
    """Registered name."""
    args: dict[str, Any] = {}
    """Its options."""


class ExperiencePipelineConfig(Section):
    """The steps between the explorer and the buffer."""

    operators: list[OperatorConfig] = []
    """Filters and reward shaping, in order; yours by name or path, `file:name`."""
    inputs: Annotated[
        list[str] | dict[str, Any], Refused("is not read here: operators get what rollouts leave")
    ] = []
    """Other data to read."""
    output: Annotated[
        dict[str, Any] | None, Refused("is not read here: experiences go to trainer_input")
    ] = None
    """Another place to write to."""
    save_input: bool = True
    """Keep a copy of the explorer's experiences."""
    input_save_path: str | None = None
    """Database of the copy; not given: `explorer_output.db` in the job's buffer folder. One outside
    that folder belongs to one job: a second is refused."""
    copy_limit_mb: NonNegativeFloat = 1000
    """How large each copy of experiences to look at may become (this one, and a queue's); what the
    trainer has yet to learn from is never touched. 0: no limit."""
    copy_policy: Literal["newest", "sampled"] = "newest"
    """What a copy at its limit keeps: the newest, or an even sample of groups of all steps."""


class TaskPipelineConfig(Section):
    """The steps that the rows of the training tasksets go through before the run."""

    operators: list[OperatorConfig] = []
    """Functions of rows, in order: by name or path, `file:name`; with `service.data_juicer`, any
    other name is an operator of Data-Juicer's."""
    num_process: Annotated[int | None, Ge(1)] = None
    """Processes of such operators that work side by side; not given: 4."""
    config_path: Annotated[
        str | None, Refused("is not read here: name it as config_path of the operator data_juicer")
    ] = None
    """A Data-Juicer recipe."""
    top_k: Annotated[
        int | None, Refused("is not read here: an operator returns the rows that stay")
    ] = None
    """Rows that stay, by their scores."""
    inputs: list[str] = []
    """At most one data set, whose rows are read in place of those of the taskset's path."""
    output: Annotated[
        dict[str, Any] | None, Refused("is not read: the remaining rows are in the job folder")
    ] = None
    """Another place to write to."""
    target_fields: Annotated[
        list[str], Mapped("operators get whole rows, and choose the fields themselves")
    ] = []
    """Columns to look at."""
    priority_weights: Annotated[
        dict[str, float] | None, Refused("is not supported yet: scoring is an operator's work")
    ] = None
    """Weights of scores that sort the rows."""


class DataProcessorConfig(Section, place="data_processor"):
    """Processing of tasks before, and of experiences during the run."""

    experience_pipeline: ExperiencePipelineConfig = ExperiencePipelineConfig()
    """Operators on experiences."""
    task_pipeline: TaskPipelineConfig | None = None
    """Operators on the rows of tasks, once before the run."""
