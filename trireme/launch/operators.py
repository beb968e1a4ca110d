"""Operators: makes the operators on experiences, and checks all operators of a stage."""

from __future__ import annotations

from functools import partial

from trireme.algorithms.recipes import Recipe
from trireme.config import Findings, Plan
from trireme.config.stages import StageFacts
from trireme.launch.parts import tried
from trireme.pipeline.operators import Operator, make_operator
from trireme.pipeline.tasks import task_operators
from trireme.registry import OPERATORS, TASK_OPERATORS

OPERATORS_KEY = "data_processor.experience_pipeline.operators"


def make_operators(plan: Plan) -> list[Operator]:
    """Make the operators that process a step's experiences before training."""
    return [
        make_operator(OPERATORS, item.name, item.args, f"{OPERATORS_KEY}[{i}]")
        for i, item in enumerate(plan.config.data_processor.experience_pipeline.operators)
    ]


def check_operators(stage: StageFacts, recipe: Recipe | None) -> Findings:
    """Check the operators on experiences, and those on the tasks' rows, where the mode has them."""
    findings, config = Findings(), stage.config
    data, mode = config.data_processor, config.mode
    experiences = data.experience_pipeline.operators if mode in ("both", "explore", "serve") else ()
    named = {f"{OPERATORS_KEY}[{i}]": item for i, item in enumerate(experiences)}
    sets = [(OPERATORS, named)]
    sets += [(TASK_OPERATORS, task_operators(config))] if mode in ("both", "explore") else []
    for registry, operators in sets:
        for key, item in operators.items():
            made = tried(findings, partial(make_operator, registry, item.name, item.args, key))
            if made and made.changes_reward and recipe and recipe.asks("reward_parts"):
                findings.problem(
                    f"{key}.name",
                    f"is '{item.name}', which changes the reward and not its parts, and "
                    f"{recipe.parts['advantage_fn'].label} compares these one by one: expected the "
                    "same as one more reward function, such as soft_overlong, or advantage_fn grpo",
                )
            elif made and made.changes_reward and recipe and recipe.asks("step_rewards"):
                findings.note(
                    f"{key}.name ({item.name}): without effect on a run whose workflow gives each "
                    f"step a reward (info['step_reward']): {recipe.parts['advantage_fn'].label} "
                    "learns from these"
                )
    return findings
