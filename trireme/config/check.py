"""Check: what would fail later (missing files, unknown names) is found before anything slow.

Nothing is loaded and nothing is downloaded: files are looked at, names are looked up.
"""

from __future__ import annotations

from trireme.config.check_data import check_tasksets, check_train_data
from trireme.config.check_model import check_model
from trireme.config.names import Kind, check_name
from trireme.config.problem import Problem
from trireme.config.schema import Config
from trireme.config.stages import Stage, reads_file
from trireme.config.used import StageFacts, evaluates

_GROUP_ALGORITHMS = ("grpo",)
_PART_KINDS: dict[str, Kind] = {
    "sample_strategy": "sample strategy",
    "advantage_fn": "advantage",
    "policy_loss_fn": "policy loss",
    "kl_penalty_fn": "KL",
    "kl_loss_fn": "KL",
    "entropy_loss_fn": "entropy",
}


def check_stage(stage: Stage, problems: list[Problem]) -> StageFacts:
    """Looks at all that a stage names; problems are noted."""
    config, facts = stage.config, StageFacts()
    _check_algorithm(config, problems)
    if config.mode != "train" or evaluates(config):
        check_tasksets(config, facts, problems)
    if reads_file(config):
        check_train_data(config, facts, problems)
    check_model(config, facts, problems, exists=stage.model_from is not None)
    return facts


def _check_algorithm(config: Config, problems: list[Problem]) -> None:
    algorithm = config.algorithm
    name = algorithm.algorithm_type
    check_name("algorithm", name, "algorithm.algorithm_type", config.plugins, problems)
    for key, kind in _PART_KINDS.items():
        part = getattr(algorithm, key)
        if part is not None:
            check_name(kind, part, f"algorithm.{key}", config.plugins, problems)
    if name in _GROUP_ALGORITHMS and algorithm.repeat_times < 2 and config.mode != "train":
        problems.append(
            Problem(
                "algorithm.repeat_times",
                f"is {algorithm.repeat_times}: expected at least 2, since {name} compares the "
                f"rollouts of one task",
            )
        )
    if reads_file(config) and config.mode != "train":
        problems.append(Problem.value("mode", config.mode, f"train, since {name} reads data"))
    if len(algorithm.optimizer.betas) != 2:
        problems.append(
            Problem.value("algorithm.optimizer.betas", algorithm.optimizer.betas, "two numbers")
        )
    if len(config.model.lora_configs or []) > 1:
        problems.append(Problem("model.lora_configs", "has several adapters: expected at most one"))
