"""Check: validates the settings of one stage alone: names, texts, models' folders, and its own
folder.

Nothing is loaded and nothing is downloaded. The options of data, algorithms and workflows are
validated by making these, in launch/make.py.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from datetime import datetime, timedelta
from importlib import metadata
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path

from trireme.config import Findings
from trireme.config.engine_kind import EMBEDDED
from trireme.config.launcher import launchers_named
from trireme.config.lookup import (
    WITH_STATE,
    ModelFacts,
    check_adapter,
    has_sinks,
    located,
    model_config,
    model_facts,
    near_model,
    unfit_target,
)
from trireme.config.schema import Config
from trireme.config.schema_rollout import ExperienceBufferConfig, TasksetConfig
from trireme.config.shape import experts_of
from trireme.config.sizes import Steps
from trireme.config.stages import StageFacts, used_tasksets
from trireme.registry import ENGINES


def check_algorithm(stage: StageFacts) -> Findings:
    """Check the keys of the `algorithm` section that name no part of the algorithm."""
    findings = Findings()
    config, algorithm = stage.config, stage.config.algorithm
    if stage.reads_file and config.mode != "train":
        name = algorithm.algorithm_type
        mode = "colocate" if stage.colocated else config.mode
        findings.problem("mode", f"is {mode!r}: expected train, since {name} reads data")
    optimizers = {"optimizer": algorithm.optimizer}
    if stage.has_critic:
        optimizers["critic.optimizer"] = algorithm.critic.optimizer
    for key, optimizer in optimizers.items():
        if len(optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in optimizer.betas):
            text = f"is {optimizer.betas!r}: expected two numbers of at least 0 and below 1"
            findings.problem(f"algorithm.{key}.betas", text)
    if len(config.model.lora_configs or []) > 1:
        findings.problem("model.lora_configs", "has several adapters: expected at most one")
    replays = config.buffer.trainer_input.experience_buffer.replay_buffer.enable
    if stage.resamples is not None and (replays or config.mode in ("explore", "train", "serve")):
        why = "a replay buffer, whose batches are never short" if replays else f"mode {config.mode}"
        text = f"is {stage.resamples}, and has no effect with {why}: expected none"
        findings.problem("algorithm.advantage_fn_args.max_resample_times", text)
    if algorithm.sync_ref_model and config.model.lora_configs:
        text = "is true, but two adapters (model.lora_configs) have no mean: expected false"
        findings.problem("algorithm.sync_ref_model", text)
    last = config.trainer.total_steps
    if late := [step for step in config.trainer.profile.steps if last and step > last]:
        text = f"has {late[0]}: trainer.total_steps is {last}"
        findings.problem("trainer.profile.steps", text)
    return findings


def check_tasksets(stage: StageFacts) -> Findings:
    """Check the tasksets against each other and the mode, and the texts in each."""
    findings = Findings()
    inputs, mode = stage.config.buffer.explorer_input, stage.config.mode
    key = "buffer.explorer_input"
    if inputs.taskset and inputs.tasksets:
        findings.problem(key, "has both taskset and tasksets: expected one of them")
    used = used_tasksets(stage.config)
    if mode == "bench" and not used:
        findings.problem(f"{key}.eval_tasksets", "is empty: bench has nothing to measure")
    elif mode in ("both", "explore") and not (inputs.taskset or inputs.tasksets):
        findings.problem(f"{key}.taskset", "is not given: expected the tasks to explore")
    named: dict[tuple[bool, str], str] = {}
    for item in used:
        other = named.setdefault((item.is_eval, item.name), item.key)
        if other != item.key:
            text = f"is '{item.name}', which is that of {other} too: expected its own"
            findings.problem(f"{item.key}.name", text)
        if item.is_eval and ("/" in item.name or item.name.isdigit()):
            text = (
                f"is '{item.name}': expected a name without '/' that is not only digits, since "
                "names of metrics and ids of rollouts contain it"
            )
            findings.problem(f"{item.key}.name", text)
        findings.add(check_path(item.key, item.config))
        form = item.config.format
        if not item.workflow and not form.workflow_key:
            text = (
                "is not given, and neither is default_reward_fn_type, which suffices for one "
                "prompt and one reply: expected the workflow for these tasks; "
                "`trireme workflows` lists all"
            )
            findings.problem(f"{item.key}.default_workflow_type", text)
        # tasks are rendered by the model's own template: a taskset's template is ignored
        for name, instead in (("chat_template", "custom_chat_template"), ("enable_thinking",) * 2):
            if getattr(form, name) is not None:
                text = f"is not supported for tasks: set model.{instead}"
                findings.problem(f"{item.key}.format.{name}", text)
        if wrong := [s for s in item.config.rollout_args.stop if not 1 <= len(s) <= 1024]:
            text = f"has {wrong[0]!r:.80}: expected texts of 1 to 1024 characters"
            findings.problem(f"{item.key}.rollout_args.stop", text)
    return findings


def check_path(key: str, data: TasksetConfig | ExperienceBufferConfig) -> Findings:
    """Check that a data set has a path."""
    findings = Findings()
    if not data.path:
        findings.problem(f"{key}.path", "is not given: expected a file, folder or hub id")
    return findings


def check_experts(stage: StageFacts) -> Findings:
    """Check the data sets of experts."""
    findings = Findings()
    buffers = stage.config.buffer.trainer_input.auxiliary_buffers
    for name, data in buffers.items():
        key = f"buffer.trainer_input.auxiliary_buffers.{name}"
        findings.add(check_path(key, data))
        if data.storage_type not in (None, "file"):
            findings.problem(f"{key}.storage_type", f"is {data.storage_type}: expected file")
    if stage.expert_ratio is not None and not buffers:
        findings.problem(
            "buffer.trainer_input.auxiliary_buffers",
            f"is empty: {stage.config.algorithm.algorithm_type} needs an expert's data, by the "
            "name sft_dataset",
        )
    return findings


def _check_critic(stage: StageFacts) -> Findings:
    findings = Findings()
    path = stage.config.model.critic_model_path
    if path:
        try:
            model_facts(path)
        except ValueError as error:
            findings.problem("model.critic_model_path", f"({path}) {error}")
    return findings


def check_model(stage: StageFacts) -> tuple[ModelFacts | None, Findings]:
    """Read the facts in the model's files; None if it is not on this machine."""
    findings = Findings()
    model = stage.config.model
    if stage.asks_api:
        return None, findings
    if not model.model_path:
        findings.problem("model.model_path", "is not given: expected a model's folder or hub id")
        return None, findings
    try:
        facts = model_facts(model.model_path)
    except ValueError as error:
        findings.problem("model.model_path", f"({model.model_path}) {error}")
        return None, findings
    if facts.unknown_layers and stage.config.mode in ("both", "train"):
        findings.problem(
            "model.model_path",
            f"({model.model_path}) has layers that cannot be trained "
            f"({', '.join(facts.unknown_layers)}): expected attention, or one of "
            f"{', '.join(sorted(WITH_STATE))}",
        )
    if facts.quantized and stage.config.mode in ("both", "train"):
        findings.problem(
            "model.model_path",
            f"({model.model_path}) has weights in {facts.quantized} (quantization_config in "
            "config.json), which cannot be trained: expected bfloat16 or float32, such as a copy "
            "that transformers dequantizes and saves (docs/models.md, What is refused)",
        )
    findings.add(_check_critic(stage))
    findings.add(_check_adapter(stage))
    findings.add(_check_towers(stage))
    findings.add(_check_replay(stage))
    findings.add(_check_stop_ids(stage, facts.vocabulary))
    if facts.folder is None and stage.model_from is None:
        findings.note(
            f"model.model_path ({model.model_path}): not on this machine, will be downloaded"
            f"{near_model(model.model_path)}"
        )
    wanted = model.max_model_len or 0
    if facts.max_positions and wanted > facts.max_positions:
        findings.note(
            f"model.max_model_len ({wanted}): longer than the {facts.max_positions} positions the "
            f"model was made for"
        )
    longest = wanted or (model.max_prompt_tokens or 0) + (model.max_response_tokens or 0)
    steady = facts.steady_positions
    if steady and longest > steady:
        why = (
            "a longer sequence changes the model's rotary embeddings (rope_type longrope or "
            "dynamic) for all that are computed with it"
        )
        if stage.config.mode in ("both", "train"):
            text = f"is {longest}: expected at most {steady}, since {why}"
            findings.problem("model.max_model_len", text)
        else:
            findings.note(
                f"model.max_model_len ({longest}): up to {steady} each reply is by its own tokens "
                f"alone; {why}, so that replies beside and past it are not the model's own"
            )
    window, heads = stage.config.trainer.ulysses_sequence_parallel_size, facts.attention_heads
    if heads and heads % window:
        findings.problem(
            "trainer.ulysses_sequence_parallel_size",
            f"is {window}: expected a divisor of the model's {heads} attention heads",
        )
    if window > 1 and facts.has_states:
        findings.problem(
            "trainer.ulysses_sequence_parallel_size",
            f"is {window}: expected 1, since layers of this model have a state, which passes from "
            "token to token",
        )
    template = model.chat_template_path
    if template and not os.path.isfile(template):
        instead = "or the template itself as model.custom_chat_template"
        text = f"is {template!r:.80}: expected a file, {instead}"
        findings.problem("model.chat_template_path", text)
    return facts, findings


def _check_towers(stage: StageFacts) -> Findings:
    """Check that towers which are to be trained are there, and trained whole."""
    findings = Findings()
    model = stage.config.model
    for key in ("freeze_vision_tower", "freeze_projector"):
        if getattr(model, key) or stage.config.mode not in ("both", "train"):
            continue
        config = model_config(model.model_path)
        if config and "vision_config" not in config:
            findings.problem(f"model.{key}", f"is false: {model.model_path} sees no pictures")
        elif model.lora_configs:
            findings.problem(
                f"model.{key}",
                "is false, and model.lora_configs trains an adapter of the language model alone: "
                "expected true, or no adapter",
            )
    return findings


def _check_stop_ids(stage: StageFacts, vocabulary: int | None) -> Findings:
    """Check that the ids that end replies are among the model's."""
    findings = Findings()
    for item in used_tasksets(stage.config):
        ids = item.config.rollout_args.stop_token_ids
        if wrong := [i for i in ids if i < 0 or (vocabulary is not None and i >= vocabulary)]:
            most = "" if vocabulary is None else f" to {vocabulary - 1}, the model's vocabulary"
            text = f"has {wrong[0]}: expected ids from 0{most}"
            findings.problem(f"{item.key}.rollout_args.stop_token_ids", text)
    return findings


def _check_replay(stage: StageFacts) -> Findings:
    """Check that a model whose experts are to be recorded or replayed has some."""
    findings, config = Findings(), stage.config
    facts = model_config(config.model.model_path)
    if facts and not experts_of(facts):
        records = config.explorer.rollout_model.enable_return_routed_experts
        asked = {
            "algorithm.enable_router_replay": config.algorithm.enable_router_replay,
            "explorer.rollout_model.enable_return_routed_experts": records,
        }
        for key in [key for key, is_asked in asked.items() if is_asked]:
            findings.problem(
                key,
                f"is true, and {config.model.model_path} is no mixture of experts: expected false",
            )
    return findings


def check_kernels(stage: StageFacts, device: str, dtype: str, ranks: int) -> Findings:
    """Check what a device, a dtype and several ranks ask of attention and compiler."""
    findings = _check_attention(stage, device, dtype)
    findings.add(_check_compiler(stage, device, ranks))
    return findings


def _check_attention(stage: StageFacts, device: str, dtype: str) -> Findings:
    """Check that the attention kernel works on the device and in the dtype that the stage trains
    with.
    """
    findings = Findings()
    if stage.config.mode not in ("both", "train"):
        return findings
    asked, key = stage.config.trainer.attn_implementation, "trainer.attn_implementation"
    path = stage.config.model.model_path
    if asked in ("varlen", "flex"):
        why = {"varlen": "is a GPU's kernel alone", "flex": "has no gradients on a CPU"}[asked]
        version = [int(part) for part in metadata.version("torch").split(".")[:2]]
        if device == "cpu":
            findings.problem(
                key, f"is {asked}, which {why}, and this run trains on a CPU: take sdpa"
            )
        elif asked == "varlen" and dtype == "float32":
            findings.problem(key, "is varlen, which does not compute in float32: take sdpa or flex")
        elif asked == "varlen" and version < [2, 10]:
            text = f"is varlen: torch {metadata.version('torch')} has none, 2.10 and newer do"
            findings.problem(key, text)
        elif asked == "varlen" and has_sinks(path):
            text = f"is varlen, which cannot compute the attention sinks of {path}"
            findings.problem(key, f"{text}: take sdpa or flex")
    if model_config(path).get("attn_logit_softcapping"):
        findings.problem(
            "model.model_path",
            f"({path}) has attn_logit_softcapping: the torch trainer does not compute attention "
            "whose scores are capped",
        )
    return findings


def _check_compiler(stage: StageFacts, device: str, ranks: int) -> Findings:
    """Check that a stage that trains on `ranks` can compile its blocks, if that is requested."""
    findings = Findings()
    trainer, key = stage.config.trainer, "trainer.use_torch_compile"
    if not trainer.use_torch_compile or stage.config.mode not in ("both", "train"):
        return findings
    if trainer.attn_implementation == "flex":
        findings.problem(key, "is true, but FlexAttention compiles itself: choose another kernel")
    if ranks > 1 and trainer.ulysses_sequence_parallel_size > 1:
        text = "is true, and ranks that share a sequence talk to each other within a block"
        findings.problem(key, f"{text}: expected trainer.ulysses_sequence_parallel_size 1")
    for path in stage.doras:
        expected = "use_dora false" if path is None else f"another adapter than {path}"
        findings.problem(key, f"is true, and peft's DoRA cannot be compiled: expected {expected}")
    name = os.environ.get("CXX", "g++")
    if device == "cpu" and shutil.which(name) is None:
        findings.problem(key, f"is true, and no C++ compiler is here ({name}, or what CXX names)")
    if device == "cuda" and find_spec("triton") is None:
        findings.problem(key, "is true, and Triton, by which torch compiles for GPUs, is not here")
    return findings


_OF_THE_ADAPTER = (
    *("lora_rank", "lora_alpha", "target_modules", "exclude_modules", "use_rslora", "use_dora"),
)


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def _on_attention(targets: str | list[str]) -> bool:
    return not isinstance(targets, str) and {x.split(".")[-1] for x in targets} <= {*_ATTENTION}


_HEADS = ("lm_head", "embed_out")
"""Layers whose whole name is a word."""


def _words_of(targets: str) -> list[str]:
    """Return the names of layers that stand as text where a list is meant; empty for all-linear, an
    expression, and a head.
    """
    words = targets.replace(",", " ").split()
    plain = all(word.isidentifier() for word in words) and targets not in _HEADS
    return words if plain else []


def _check_adapter(stage: StageFacts) -> Findings:
    """Check that the adapter to resume from exists and can be trained."""
    findings = Findings()
    path = stage.config.model.model_path
    mixture = experts_of(model_config(path))
    for number, lora in enumerate(stage.config.model.lora_configs or []):
        key = f"model.lora_configs[{number}]"
        if mixture and lora.path is None and not _on_attention(lora.target_modules):
            findings.problem(
                f"{key}.target_modules",
                f"is {lora.target_modules!r}, and adapters of experts and their router are not "
                f"trained here: expected layers of attention, such as {list(_ATTENTION)}",
            )
        if lora.path is None:
            targets = lora.target_modules
            named = [] if isinstance(targets, str) else targets
            if isinstance(targets, str) and (words := _words_of(targets)):
                findings.problem(
                    f"{key}.target_modules",
                    f"is '{targets}', a regular expression of whole names, which matches no layer: "
                    f"expected a list, [{', '.join(words)}]",
                )
            if unfit := unfit_target(path, named):
                text, others_fit = unfit
                if others_fit:
                    findings.note(f"{key}.target_modules {text}")
                else:
                    findings.problem(f"{key}.target_modules", text)
            continue
        if stage.model_from is not None:
            findings.problem(
                f"{key}.path",
                "is for the first stage: this one begins with the model of an earlier stage, in "
                "which the adapter is merged already. Give this stage lora_configs without path",
            )
        if stage.config.mode in ("explore", "serve", "bench"):
            findings.problem(
                f"{key}.path",
                f"is not supported with mode: {stage.config.mode}, which would sample from "
                "the model without the adapter until the trainer's first checkpoint: use "
                "mode: both, or merge the adapter and start from that model",
            )
        try:
            folder = located(lora.path, "models")
            if folder is None:
                raise ValueError("is not on this machine: expected a folder, or download it first")
            check_adapter(folder)
        except ValueError as error:
            findings.problem(f"{key}.path", f"({lora.path}) {error}")
        also_set = [name for name in _OF_THE_ADAPTER if name in lora.model_fields_set]
        if also_set:
            findings.problem(
                f"{key}.{also_set[0]}",
                f"is given together with path, whose adapter_config.json ({lora.path}) has it: "
                f"leave out {', '.join(also_set)}",
            )
    return findings


def check_auxiliary_models(stage: StageFacts) -> Findings:
    """Check that the models besides the trained one exist, or that their servers are named."""
    findings = Findings()
    for number, model in enumerate(stage.config.explorer.auxiliary_models):
        key = f"explorer.auxiliary_models[{number}]"
        if (model.engine_type in ("external", "remote")) != bool(model.base_urls):
            findings.problem(
                f"{key}.base_urls",
                f"is {model.base_urls}: expected the server's address with engine_type external "
                "(an OpenAI API) or remote (trireme rollout), and with no other",
            )
        if model.reasoning_parser and model.engine_type == "external":
            text = (
                f"({model.reasoning_parser}): an OpenAI API splits its replies itself, leave it out"
            )
            findings.problem(f"{key}.reasoning_parser", text)
        if model.engine_type in ENGINES and model.engine_type != EMBEDDED:
            text = "the embedded torch engine generates in its place"
            findings.note(f"{key}.engine_type ({model.engine_type}): {text}")
        if not model.model_path:
            text = "is not given: expected the folder or hub id of its model and tokenizer"
            findings.problem(f"{key}.model_path", text)
        elif model.engine_type != "external":
            try:
                model_facts(model.model_path)
            except ValueError as error:
                findings.problem(f"{key}.model_path", f"({model.model_path}) {error}")
    if stage.needs_teacher:
        findings.add(_check_teacher(stage))
    return findings


def _check_teacher(stage: StageFacts) -> Findings:
    """Check that the first auxiliary model can score what this stage samples."""
    findings = Findings()
    config, key = stage.config, "explorer.auxiliary_models"
    if config.mode == "serve":
        text = "is serve, whose clients' calls no teacher scores: expected both or explore"
        findings.problem("mode", text)
    if config.mode not in ("both", "explore"):
        return findings
    models, longest = config.explorer.auxiliary_models, config.model.max_model_len or 0
    if not models:
        findings.problem(key, "is empty: the algorithm needs a teacher, the first of them")
    elif models[0].engine_type == "external":
        text = "is external: the OpenAI API scores no given tokens, and a teacher does: expected "
        findings.problem(f"{key}[0].engine_type", f"{text}torch or remote")
    elif (limit := models[0].max_model_len) and limit < longest:
        findings.problem(
            f"{key}[0].max_model_len",
            f"is {limit}: expected at least {longest} (model.max_model_len), since a teacher "
            "scores all that the policy samples",
        )
    return findings


def check_folder(stage: StageFacts, root: Path) -> Findings:
    """Check that the job's folder can be written, that its disk can hold a checkpoint of the model,
    and that a trainer meets its explorer there.
    """
    findings = Findings()
    config = stage.config
    for key in ("checkpoint_root_dir", "project", "group", "name"):
        value = str(getattr(config, key) or "")
        if "\0" in value:
            findings.problem(key, f"is {value!r}: expected the name of a folder, without NUL")
        elif key != "checkpoint_root_dir" and _leaves(value):
            text = f"is {value!r}: expected the name of a folder below checkpoint_root_dir, "
            findings.problem(key, f"{text}without '..' or a '/' at the beginning")
    for number, one in enumerate(config.stages):
        name = one.stage_name
        if name and (_leaves(name) or not Path(name).parts or "\0" in name):
            text = f"is {name!r}: expected the name of a folder below that of the run"
            findings.problem(f"stages[{number}].stage_name", text)
    if findings.problems:
        return findings
    meets = config.mode == "train" and not stage.reads_file
    if meets and not (
        config.continue_from_checkpoint or config.buffer.trainer_input.experience_buffer.path
    ):
        findings.problem(
            "continue_from_checkpoint",
            "is false: expected true in mode train, since the explorer's experiences are in the "
            "job's folder, and false starts another one",
        )
    existing = next(path for path in (root, *root.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        findings.problem(
            "checkpoint_root_dir",
            f"gives the folder {root}, which cannot be written: {existing}: {error.strerror}",
        )
        return findings
    try:
        model_path = stage.config.model.model_path
        size = model_facts(model_path).size if model_path else 0
    except ValueError:
        size = 0
    free = shutil.disk_usage(existing).free
    if free < size:
        findings.problem(
            "checkpoint_root_dir",
            f"gives the folder {root}, on a disk with {_bytes(free)} left: expected room for the "
            f"model's {_bytes(size)}",
        )
    return findings


def _bytes(number: int) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def _leaves(name: str) -> bool:
    """Return whether a name leads out of the folder above it."""
    return Path(name).is_absolute() or ".." in Path(name).parts


def free_name(config: Config) -> str:
    """Return the run's name where no run has it, else the next one that is free: name_2, name_3."""
    root = _named_folder(config)
    places = chain([root], (root.with_name(f"{root.name}_{n}") for n in count(2)))
    free = next(place for place in places if not (place.is_file() or _has_files(place)))
    return config.name.removesuffix(root.name) + free.name


def job_folder(config: Config) -> Path:
    """Return the job's folder: root/project/group/name, or another one if the job starts anew."""
    folder = _named_folder(config)
    anew = not config.continue_from_checkpoint and config.mode != "bench"
    if anew and _has_files(folder):
        began, now = folder, datetime.now()
        while folder.exists():  # two runs may begin in the same second
            folder = began.with_name(f"{began.name}_{now:%Y%m%d%H%M%S}")
            now += timedelta(seconds=1)
    return folder


def _named_folder(config: Config) -> Path:
    parts = [part for part in (config.project, config.group, config.name) if part]
    root = Path(config.checkpoint_root_dir).expanduser()
    return (Path.cwd() / root).joinpath(*parts)


def _has_files(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


UNASKED_SAVE_INTERVAL = 500
"""The interval that a dialect writes without a flag, which no user chose."""


_READ_EARLY = (
    *("OMP_", "MKL_", "OPENBLAS_", "CUDA_", "PYTORCH_", "TORCH_", "HF_", "TRANSFORMERS_"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHON"),
)
"""Prefixes of the variables that Python, torch and Hugging Face's libraries read only once."""


def note_idle(stage: StageFacts, steps: Steps) -> Findings:
    """Note all settings of the stage that have no effect on its run; they are legal."""
    findings = Findings()
    mode, callbacks = stage.config.mode, stage.config.trainer.callbacks
    if mode not in ("explore", "bench", "serve"):
        findings.notes += _idle_in_training(stage, steps)
    elif callbacks:
        names = ", ".join(callbacks)
        findings.note(
            f"trainer.callbacks ({names}): nothing trains in mode {mode}, and none is called"
        )
    early = [name for name in stage.config.explorer.env_vars if name.startswith(_READ_EARLY)]
    if early and mode not in ("train", "serve"):
        findings.note(
            f"explorer.env_vars ({', '.join(early)}): read when a process begins, so that without "
            f"{launchers_named()} only programs that rollouts start have it; for the run itself "
            "set it in the shell"
        )
    if mode in ("both", "explore") and not stage.reads_file:
        findings.notes += _idle_in_exploring(stage)
    return findings


def _idle_in_training(stage: StageFacts, steps: Steps) -> list[str]:
    config, train, found = stage.config, steps.train, list[str]()
    optimizer, critic = config.algorithm.optimizer, config.algorithm.critic
    if stage.reads_file and config.algorithm.enable_router_replay:
        found.append(
            "algorithm.enable_router_replay (true): no engine sampled the rows of a file, and the "
            "trainer's routers choose their experts"
        )
    if config.algorithm.enable_router_replay and config.trainer.use_torch_compile:
        found.append(
            "trainer.use_torch_compile (true): blocks with experts are not compiled, because of "
            "algorithm.enable_router_replay"
        )
    if stage.reads_file:
        key, data = "experience_buffer", config.buffer.trainer_input.experience_buffer
        why = "read for tasks alone"
        found += _idle_format(f"buffer.trainer_input.{key}", data, _OF_TASKS, why)
    if optimizer.lr == 0:
        found.append("algorithm.optimizer.lr (0): no weight of the policy moves")
    if stage.has_critic and critic.optimizer.lr == 0:
        found.append("algorithm.critic.optimizer.lr (0): no weight of the value model moves")
    if stage.has_critic and train is not None and critic.warmup_steps >= train:
        found.append(
            f"algorithm.critic.warmup_steps ({critic.warmup_steps}): the value model alone learns "
            f"in all {train} train steps, and the policy in none"
        )
    waits = critic.warmup_steps if stage.has_critic else 0
    warmup, last = optimizer.lr_warmup_steps, 0  # the policy's optimizer steps
    if train is not None:
        last = max(train - waits, 0) * config.algorithm.num_iterations
    if optimizer.lr and last and warmup > last:
        found.append(
            f"algorithm.optimizer.lr_warmup_steps ({warmup}): after {last} optimizer steps the "
            f"learning rate is {optimizer.lr * last / warmup:.3g}, and not lr ({optimizer.lr:g})"
        )
    interval = config.trainer.save_interval
    asked = interval != UNASKED_SAVE_INTERVAL and not stage.shares_save_interval
    if train is not None and interval > train and asked:
        found.append(
            f"trainer.save_interval ({interval}): of {train} train steps none is saved but the last"
        )
    return found


_OF_DATA = ("prompt_type", "messages_key", "tools_key", "chosen_key", "rejected_key", "label_key")
_OF_DATA += ("enable_concatenated_multi_turn",)
"""Keys of `format` that are read for a data set to learn from."""
_OF_TASKS = ("reply_prefix", "workflow_key", "reward_fn_key")
"""Those that are read for tasks."""


def _idle_format(
    key: str, data: TasksetConfig | ExperienceBufferConfig, names: Sequence[str], why: str
) -> list[str]:
    """Return a note on the keys among `names` that a data set's `format` sets."""
    form, plain = data.format, type(data.format)()
    keys = [name for name in names if getattr(form, name) != getattr(plain, name)]
    values = ", ".join(f"{name}={getattr(form, name)}" for name in keys)
    return [f"{key}.format ({values}): {why}"] if keys else []


def _idle_in_exploring(stage: StageFacts) -> list[str]:
    config, found = stage.config, list[str]()
    for used in used_tasksets(config):
        why = "read for data to learn from; for tasks, only a workflow of your own can"
        found += _idle_format(used.key, used.config, _OF_DATA, why)
    evaluates = any(taskset.is_eval for taskset in used_tasksets(config))
    idle = not evaluates and not stage.another_evaluates
    if "eval_interval" in config.explorer.model_fields_set and idle:
        found.append(
            f"explorer.eval_interval ({config.explorer.eval_interval}): there are no eval_tasksets "
            "in buffer.explorer_input, and nothing is evaluated"
        )
    return found
