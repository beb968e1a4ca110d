"""Schema: declares the YAML's keys, each with type, default and range: model, algorithm, trainer.

The sections of tasks, explorer and buffer are in `schema_rollout`.
"""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator, NonNegativeFloat, NonNegativeInt, PositiveFloat, PrivateAttr

from trireme.config.options import Share
from trireme.config.schema_rollout import BufferConfig, DataProcessorConfig, ExplorerConfig, small
from trireme.config.section import Count, Instead, Mapped, Moved, NoEffect, Refused, Section

Mode = Literal["both", "explore", "train", "bench", "serve", "colocate"]


class OptimizerConfig(Section):
    """How weights move at a train step."""

    lr: NonNegativeFloat = 1e-6
    """Peak learning rate."""
    lr_warmup_steps: Annotated[int, Ge(-1)] = -1
    """Optimizer steps of linear warm-up (train steps, unless `algorithm.num_iterations` is more
    than 1); -1 takes `lr_warmup_steps_ratio` instead."""
    lr_warmup_steps_ratio: Share = 0.0
    """Warm-up as a share of all train steps."""
    min_lr_ratio: Annotated[float | None, Ge(0), Le(1)] = 0.01
    """Learning rate at the end of a cosine or linear schedule, as a share of `lr`."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    """Schedule after the warm-up."""
    warmup_style: Annotated[
        Literal["constant", "cosine", "linear"] | None,
        Moved(to=".lr_scheduler_type"),
    ] = None
    """Older name of `lr_scheduler_type`."""
    optimizer_type: Literal["adam", "adamw", "sgd"] = "adam"
    """The optimizer; adam and adamw are both AdamW."""
    betas: list[float] = [0.9, 0.999]
    """Decay rates of Adam's two moments."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""
    clip_grad: Annotated[PositiveFloat, Moved(to="trainer.grad_clip")] = 1.0
    """Older place of `trainer.grad_clip`."""


class CriticConfig(Section):
    """The value model of algorithms that have one; it starts from `model.critic_model_path`."""

    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    """The value model's learning rate (1e-5 by default), schedule and optimizer."""
    cliprange_value: PositiveFloat = 0.5
    """Clip range of the value loss."""
    warmup_steps: NonNegativeInt = 0
    """First train steps, in which only the value model is trained."""


class AlgorithmConfig(Section, place="algorithm"):
    """The algorithm, by name, and the parts of it that the user replaces."""

    algorithm_type: str = "ppo"
    """A name that `trireme algorithms` lists, or the path of a user's own, `file:name`."""
    repeat_times: Count = 1
    """Rollouts of each task: the group that group-relative advantages compare. Not given: the
    algorithm's `group_size`, which is 1 for most."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Learning rate, schedule, optimizer."""
    critic: CriticConfig = CriticConfig()
    """The value model of `ppo`."""
    sample_strategy: str | None = None
    """How a train batch is drawn from the buffer; not given: the algorithm's own."""
    sample_strategy_args: dict[str, Any] | None = None
    """Options of `sample_strategy`, merged onto its defaults."""
    advantage_fn: str | None = None
    """Advantage function; not given: the algorithm's own."""
    advantage_fn_args: dict[str, Any] | None = None
    """Options of the advantage function."""
    policy_loss_fn: str | None = None
    """Policy loss; not given: the algorithm's own."""
    policy_loss_fn_args: dict[str, Any] | None = None
    """Options of the policy loss."""
    kl_penalty_fn: Annotated[str | None, Instead("'none' leaves it out")] = None
    """KL subtracted from rewards: of tokens, or with sample_strategy explore_step of rollouts."""
    kl_penalty_fn_args: dict[str, Any] | None = None
    """Options of the KL penalty."""
    kl_loss_fn: Annotated[str | None, Instead("'none' leaves it out")] = None
    """KL to the reference, added to the loss: none, k1, k2, k3, low_var_kl, abs, corrected_k3."""
    kl_loss_fn_args: dict[str, Any] | None = None
    """Its options; `kl_coef: 0` loads no reference model, `adaptive: true` follows target_kl."""
    teacher_kl_fn: str | None = None
    """KL to a teacher, the first of explorer.auxiliary_models, added to the loss: as kl_loss_fn."""
    teacher_kl_fn_args: dict[str, Any] | None = None
    """Options of the KL to the teacher, `kl_coef` (1.0) among them."""
    entropy_loss_fn: Annotated[str | None, Instead("'none' leaves it out")] = None
    """Entropy bonus; not given: the algorithm's own."""
    entropy_loss_fn_args: dict[str, Any] | None = None
    """Options of the entropy bonus, `entropy_coef` among them."""
    sync_ref_model: bool = False
    """Whether the reference model follows the policy (TR-DPO, arXiv:2404.09656); not with LoRA."""
    ref_model_sync_steps: Annotated[
        Count, Instead("sync_ref_model: false leaves the reference as it is")
    ] = 512
    """Optimizer steps after which it does, with `sync_ref_model`."""
    ref_model_mixup_alpha: Annotated[float, Gt(0), Le(1)] = 0.6
    """Share of the policy's weights in the new reference; the rest is the old one's."""
    loss_agg_mode: (
        Literal[
            "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
        ]
        | None
    ) = None
    """How token losses are averaged; not given: the algorithm's own."""
    num_iterations: Count = 1
    """Optimizer steps on each train batch, the critic's too. The old log-probabilities stay those
    from before the first; a batch is saved with all of its steps or none."""
    bypass_old_logprobs: bool = True
    """Take the sampler's log-probabilities as the old ones instead of computing them again."""
    rollout_correction: dict[str, Any] = {}
    """Correction between engine and trainer: rollout_is, rollout_rs, their thresholds."""
    enable_router_replay: bool = False
    """Train a mixture of experts with the experts that the engine chose for each token; their
    weights are computed anew. `check` refuses it with an engine that does not report them."""


class LoraConfig(Section):
    """One low-rank adapter: only it is trained, and the base weights stay."""

    name: Annotated[str | None, NoEffect()] = None
    """Name of the adapter."""
    path: str | None = None
    """A folder of peft's with an adapter to resume from, and its settings; not given: a new one."""
    base_model_name: Annotated[str | None, NoEffect()] = None
    """Name of the model it belongs to, written into its configuration."""
    lora_rank: Count = 32
    """Rank of the update."""
    lora_alpha: Count = 32
    """The update is scaled by alpha / rank."""
    use_rslora: bool = False
    """Scale it by alpha / sqrt(rank) instead, which suits high ranks."""
    use_dora: bool = False
    """Also train the length of each output's weights, besides their direction (DoRA)."""
    lora_dtype: Annotated[str, NoEffect()] = "auto"
    """Number format of the adapter, which is trained in float32."""
    target_modules: str | list[str] = "all-linear"
    """Linear layers with an adapter: all-linear, or names."""
    exclude_modules: str | list[str] | None = None
    """Layers among these without one: names, or a regular expression of whole names."""


class ExternalModelConfig(Section):
    """A model behind an OpenAI API. It gets conversations; no files of a model are needed."""

    enable: bool = False
    """Measure it in place of `model_path`."""
    model_name: str | None = None
    """What requests call it; not given: `model.model_path`."""
    base_url_env: str = "OPENAI_BASE_URL"
    """The variable that holds the API's address."""
    api_key_env: str = "OPENAI_API_KEY"
    """The variable that holds its key."""


class ModelConfig(Section, place="model"):
    """The model that is trained, and what it may read and write."""

    model_path: str = ""
    """A folder in the Hugging Face layout, or an id on the hub."""
    critic_model_path: str | None = None
    """Initial weights of the value model; not given: `model_path`."""
    trust_remote_code: Annotated[
        bool, Refused("is refused: code that comes with a model runs unchecked")
    ] = False
    """Whether Python code that comes with the model may run."""
    custom_chat_template: str | None = None
    """A Jinja chat template to use in place of the model's."""
    chat_template_path: str | None = None
    """A file with such a template; `custom_chat_template` takes precedence."""
    temperature: Annotated[float, Ge(0), Le(100)] = 1.0
    """Default of every taskset's `rollout_args.temperature`; 0 is greedy."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Default of every taskset's `rollout_args.top_p`."""
    top_k: Annotated[int, Ge(-1)] = -1
    """Default of every taskset's `rollout_args.top_k`; -1 is off."""
    logprobs: Annotated[int, Ge(0), Le(64)] = 0
    """How many likeliest alternatives are reported for each sampled token."""
    max_model_len: Annotated[int | None, Ge(2)] = None
    """Longest sequence, prompt and response together."""
    max_prompt_tokens: Annotated[int | None, Ge(1)] = None
    """Longest prompt; not given: what the response leaves of `max_model_len`."""
    max_response_tokens: Annotated[int | None, Ge(1)] = None
    """Longest response; not given: what the prompt leaves of `max_model_len`."""
    min_response_tokens: NonNegativeInt = 0
    """No reply ends before this many tokens."""
    enable_prompt_truncation: bool = True
    """Truncate too long prompts, and leave them untrained, instead of failing their rollouts."""
    repetition_penalty: Annotated[float, Ge(0.01), Le(100)] = 1.0
    """Divides the logits of tokens that have occurred before."""
    enable_thinking: bool | None = None
    """Passed to the chat template, if it has such a switch."""
    lora_configs: list[LoraConfig] | None = None
    """At most one adapter."""
    fully_sharded_loras: Annotated[bool, NoEffect()] = False
    """Shard adapters over the engine's GPUs."""
    max_cpu_loras: Annotated[int | None, NoEffect()] = None
    """Adapters that the engine keeps in the CPU's memory."""
    freeze_vision_tower: bool = True
    """Leave the tower of a model that sees pictures as it is."""
    freeze_projector: bool = True
    """Leave what turns the tower's features into the language model's as it is: mergers,
    projectors."""
    rope_scaling: Annotated[
        dict[str, Any] | None, Refused("is not supported yet: set it in the model's config.json")
    ] = None
    """Replaces the model's own rotary scaling."""
    rope_theta: Annotated[
        float | None, Gt(0), Refused("is not supported yet: set it in the model's config.json")
    ] = None
    """Replaces the model's own rotary base."""
    external_model: ExternalModelConfig = ExternalModelConfig()
    """A model behind someone else's API, which `mode: bench` measures."""


class ClusterConfig(Section, place="cluster"):
    """Placement. Engines take `engine_num * tensor_parallel_size * pipeline_parallel_size *
    data_parallel_size` places, auxiliary models on GPUs one, the trainer the rest."""

    launcher: Annotated[str, BeforeValidator(small)] = "auto"
    """local: one process; or the name of a launcher, which starts several. auto: a launcher where
    several GPUs are here and asked for, or one of its keys names a cluster."""
    node_num: NonNegativeInt = 0
    """Number of machines; 0 is 1."""
    gpu_per_node: NonNegativeInt = 0
    """GPUs of each machine, or CPU processes where it has none; 0: what is there or needed."""
    heartbeat_timeout: PositiveFloat = 60.0
    """Seconds without an answer after which a part that a launcher started counts as dead."""
    engine_restarts: NonNegativeInt = 3
    """How often each engine that dies is started again; then the run ends."""
    stop_timeout: PositiveFloat = 25.0
    """Seconds that a run asked to stop (SIGTERM, SIGHUP, Ctrl-C) gets to save a checkpoint and end;
    Slurm and Kubernetes kill after 30 s."""
    start_timeout: PositiveFloat = 600.0
    """Seconds in which the places and parts of a launcher's run must be ready."""


class SynchronizerConfig(Section, place="synchronizer"):
    """How explorer and trainer keep one beat."""

    sync_method: Literal["nccl", "online", "checkpoint", "offline", "memory"] = "nccl"
    """How weights reach the engine: over the GPUs' network (nccl), by files, or in memory."""
    sync_style: Literal[
        "fixed",
        "explorer_driven",
        "dynamic_by_explorer",
        "trainer_driven",
        "dynamic_by_trainer",
        "fully_async",
    ] = "fixed"
    """Who decides when: both, by counting steps (fixed), the explorer, or the trainer."""
    sync_interval: Count = 1
    """Steps between synchronisations."""
    sync_offset: NonNegativeInt = 0
    """Steps that the explorer runs ahead of the trainer."""
    sync_timeout: PositiveFloat = 3600
    """Seconds that one side waits for the other, or for an engine that is sent weights, before the
    run fails."""
    wait_for_checkpoint: Annotated[bool, NoEffect()] = False
    """Wait for the first checkpoint."""
    group_name: Annotated[str, NoEffect()] = ""
    """Name of the process group that carries weights."""
    explorer_sync_interval: Annotated[int | None, Ge(1), Moved(to=".sync_interval")] = None
    """The explorer's interval; both sides have one here."""
    trainer_sync_interval: Annotated[int | None, Ge(1), Moved(to=".sync_interval")] = None
    """The trainer's interval; both sides have one here."""


class ProfileConfig(Section):
    """The settings of torch's profiler."""

    steps: list[Count] = []
    """Train steps, each of which leaves a trace of every rank in the job's `profile` folder, and on
    a GPU a snapshot of its memory."""


class TrainerConfig(Section, place="trainer"):
    """The train loop and its backend."""

    name: str = "trainer"
    """Name of the part, its log and its state file."""
    save_interval: Annotated[NonNegativeInt, Instead("0 saves at the end only")] = 0
    """Train steps between checkpoints; 0 saves at the end only."""
    save_hf_checkpoint: Literal["always", "never", "last"] = "last"
    """Which checkpoints also hold the model in the Hugging Face layout, in the dtype of its
    config.json; float32 in a file with stages, where the next stage starts from it."""
    save_behind: bool = False
    """Write checkpoints while training continues, from a copy in the CPU's memory: 12 bytes a
    weight with Adam, 4 with LoRA, over the ranks. The last one is always written at once."""
    max_checkpoints_to_keep: Annotated[int | None, Ge(0), Instead("0 keeps all")] = None
    """Checkpoints that keep their weights, the newest ones; not given, or 0: all."""
    save_strategy: Annotated[
        Literal["single_thread", "single_process", "single_node", "unrestricted"],
        Mapped("one process writes, one checkpoint at a time"),
    ] = "unrestricted"
    """Who may write at once."""
    total_steps: Annotated[
        int | None, Ge(1), Instead("without it the data ends the run, see buffer.total_epochs")
    ] = None
    """Train steps after which the run ends; not given: when the data ends."""
    callbacks: list[str] = []
    """Classes that are called at the training's events, by name or path (docs/trackers.md)."""
    callbacks_timeout: PositiveFloat = 1800
    """Seconds that all callbacks of one event may take; the run stops then."""
    enable_preview: Annotated[bool, NoEffect()] = True
    """Show sample replies in the monitor."""
    grad_clip: Annotated[PositiveFloat, Instead("1e9 clips nothing")] = 1.0
    """Largest norm of the gradient; longer ones are clipped."""
    use_dynamic_bsz: Annotated[
        bool, Mapped("batches are always cut by tokens, with the same result")
    ] = True
    """Cut batches into micro-batches by tokens instead of rows."""
    max_token_len_per_gpu: Annotated[int | None, Ge(1)] = None
    """Tokens of a micro-batch; not given: twice `max_model_len`, and at least 1,024; on a GPU
    32,768 or 16,384, if these are more and the memory plan has room for them."""
    ulysses_sequence_parallel_size: Annotated[
        Count, Mapped("one process trains, on whole sequences", on="spread")
    ] = 1
    """Ranks that share one sequence; a divisor of the attention heads and of the ranks."""
    fsdp_size: Annotated[
        int, Ge(-1), Mapped("one process trains, so nothing is sharded", on="spread")
    ] = -1
    """Ranks that hold the model in shards together, best those of one machine; the others hold it
    again, and only gradients travel between them. A divisor of the ranks; -1: all."""
    fix_actor_microbatch_loss_scale: Annotated[bool, NoEffect()] = False
    """Normalise losses over the whole batch; always so here."""
    enable_gradient_checkpointing: bool | None = None
    """Compute activations again in the backward pass: less memory, more time; not given:
    where they would not fit into the memory of a GPU, or on a CPU of the machine."""
    attn_implementation: Literal["auto", "sdpa", "varlen", "flex"] = "auto"
    """What computes attention: torch's SDPA everywhere, or in bfloat16 on a GPU its variable-length
    flash attention (varlen; auto, where a trial shows that it works) or FlexAttention (flex)."""
    use_torch_compile: bool = False
    """Compile each block of the model by torch, one graph for all, as it is first called: the first
    step takes a minute longer."""
    offload: Annotated[bool, Mapped("one process trains, so nothing is sharded", on="spread")] = (
        False
    )
    """Keep shards and optimizer in the CPU's memory, where the optimizer then works: slower."""
    park_optimizer: bool = False
    """In mode colocate the optimizer's state moves to the CPU's memory while engines generate."""
    param_offload: Annotated[bool, Moved(to="trainer.offload")] = False
    """Keep weights in the CPU's memory."""
    optimizer_offload: Annotated[bool, Moved(to="trainer.offload")] = False
    """Keep the optimizer in the CPU's memory."""
    grad_offload: Annotated[bool, Moved(to="trainer.offload")] = False
    """Keep gradients in the CPU's memory."""
    offload_policy: Annotated[bool, Moved(to="trainer.offload")] = False
    """FSDP2's own way to keep all of these there."""
    critic_warmup: Annotated[NonNegativeInt, Moved(to="algorithm.critic.warmup_steps")] = 0
    """First train steps, in which only the value model is trained."""
    use_remove_padding: Annotated[bool, NoEffect()] = True
    """Train without padding; always so here."""
    balance_batch: Annotated[bool, NoEffect()] = True
    """Give ranks equal numbers of tokens; always so here."""
    collective_timeout: Annotated[
        PositiveFloat, Mapped("one process trains, and waits for no other", on="spread")
    ] = 1800
    """Seconds that trainer ranks may wait for one another; dead ones are seen sooner."""
    profile: ProfileConfig = ProfileConfig()
    """Single train steps under torch's profiler."""
    peak_tflops: PositiveFloat | None = None
    """TFLOP/s that a trainer's device could do, for `perf/mfu`; not given: by its name."""


class MonitorConfig(Section, place="monitor"):
    """The places that metrics are sent to."""

    monitor_type: str | list[str] = "tensorboard"
    """One or several of tensorboard, wandb, mlflow, swanlab, trackio, a function's path; none."""
    monitor_args: dict[str, Any] | None = None
    """Options of the tracker; of several, each one's under its name."""
    detailed_stats: Annotated[bool, NoEffect()] = False
    """Log maximum, minimum and spread of evaluation metrics in addition to their mean."""


class LogConfig(Section, place="log"):
    """The contents of the log files."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = "INFO"
    """Lowest level that is logged."""
    group_by_node: Annotated[bool, NoEffect()] = False
    """One folder a machine."""


class DataJuicerConfig(Section):
    """The Data-Juicer service."""

    server_url: str | None = None
    """Address of a running service."""
    auto_start: bool = False
    """Start the service."""
    port: Annotated[int | None, Ge(1), Le(65535)] = None
    """Port of the service to start."""


class ServiceConfig(Section, place="service"):
    """External services of the run."""

    data_juicer: Annotated[
        DataJuicerConfig,
        Mapped("the operator data_juicer starts a process of its own (TRIREME_DATA_JUICER_PYTHON)"),
    ] = DataJuicerConfig()
    """Data-Juicer."""


class StageConfig(Section):
    """One stage: what it names is laid over the global sections, key by key."""

    stage_name: str = ""
    """Name of the stage; its files are in a folder of that name in the job's."""
    mode: Mode | None = None
    """Not given: the global one."""
    algorithm: AlgorithmConfig | None = None
    """A new `algorithm_type` inherits no `*_fn` and no `*_args`."""
    model: ModelConfig | None = None
    """A `model_path` here replaces the model of the stage before."""
    buffer: BufferConfig | None = None
    """Data with a new `path` inherits neither storage type, format nor replay."""
    data_processor: DataProcessorConfig | None = None
    """Merged onto the global section."""
    explorer: ExplorerConfig | None = None
    """Merged onto the global section."""
    synchronizer: SynchronizerConfig | None = None
    """Merged onto the global section."""
    trainer: TrainerConfig | None = None
    """Merged onto the global section."""


class Config(Section, place=""):
    """The whole file. What is computed from it is in `Plan`; nothing changes it after loading."""

    project: str = "trireme"
    """Name of the folder below `checkpoint_root_dir`; not given: that of the YAML's folder."""
    group: str = ""
    """Folder between project and name, if any."""
    name: str = "run"
    """Name of the run's own folder, `checkpoint_root_dir/project/name`; not given: the YAML's."""
    mode: Mode = "both"
    """Explore and train together, or one of them; measure checkpoints; explore by an OpenAI API."""
    seed: Annotated[int, Ge(0), Le(2**63 - 1)] = 42
    """Seed of everything that is random."""
    deterministic: bool | None = None
    """Equal seeds give equal bytes; not given: where explorer and trainer run in lock-step."""
    plugins: list[str] = []
    """Python files or folders of them, loaded first, that register the user's own parts."""
    checkpoint_root_dir: str = "./checkpoints"
    """Root of all jobs' folders; relative to the working directory."""
    continue_from_checkpoint: bool = True
    """Resume the run of this folder; false starts a new one, with the time in its name."""
    ignore_validator_suggestions: bool = False
    """Start although the memory of a GPU, or on a CPU the machine's, looks too small: the estimate
    is then a note."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """The algorithm and its optimizer."""
    model: ModelConfig = ModelConfig()
    """The model that is trained."""
    cluster: ClusterConfig = ClusterConfig()
    """Machines, GPUs and processes."""
    buffer: BufferConfig = BufferConfig()
    """Tasks, experiences and batch sizes."""
    data_processor: DataProcessorConfig = DataProcessorConfig()
    """Operators on tasks and experiences."""
    explorer: ExplorerConfig = ExplorerConfig()
    """Rollouts and evaluations."""
    synchronizer: SynchronizerConfig = SynchronizerConfig()
    """When new weights reach the explorer."""
    trainer: TrainerConfig = TrainerConfig()
    """Training and checkpoints."""
    monitor: MonitorConfig = MonitorConfig()
    """Trackers of metrics."""
    log: LogConfig = LogConfig()
    """Log files."""
    service: ServiceConfig = ServiceConfig()
    """External services of the run."""
    _notes: tuple[str, ...] = PrivateAttr(())  # of the file as a whole: see load.py
    stages: list[StageConfig] = []
    """Stages that run one after the other; not given: the file itself is the only one."""
