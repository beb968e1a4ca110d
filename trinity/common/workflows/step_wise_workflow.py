"""Step-wise workflows: every step of an episode is an experience of its own.

Both bases play the same loop (`trireme/workflows/step_wise.py`): `open` once, `step` until it
returns False or `max_step_num` steps are done, `close` once. `StepWiseRewardWorkflow` asks
`reward(exps, step_num)` after each step; `RewardPropagationWorkflow` asks `reward(exps)` when the
episode has ended, and gives that to all of its steps.

`StepWiseAlfworldWorkflow` shows what a workflow of yours gives. To change it here, and not in a
copy, take the `#` off its line in `default_mapping` of `__init__.py`: without that line the YAML's
`step_wise_alfworld_workflow` is the built-in one (`trireme/ext/alfworld/workflow.py`), which gives
the same experiences and has more options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trireme.experience import Experience
from trireme.ext.alfworld.workflow import (
    SYSTEM_PROMPT,
    AlfworldWorkflow,
    create_environment,
    format_observation,
)
from trireme.task import Task
from trireme.workflows.episode import parse_action
from trireme.workflows.step_wise import RewardPropagationWorkflow, StepWiseRewardWorkflow

AsyncStepWiseRewardWorkflow = StepWiseRewardWorkflow
AsyncRewardPropagationWorkflow = RewardPropagationWorkflow


class StepWiseAlfworldWorkflow(RewardPropagationWorkflow):
    """A household task, step by step. One that is not done in time has reward -0.1."""

    @classmethod
    def needs(cls, task: Task) -> Mapping[str, str]:
        """The packages of the game."""
        return AlfworldWorkflow.needs(task)

    def open(self) -> None:
        """Begin the game of the task, whose file is its description."""
        self.env = create_environment(str(self.task_desc))
        self.observation, _ = self.env.reset()
        prompt = self.system_prompt or SYSTEM_PROMPT
        self.memory: list[dict[str, Any]] = [{"role": "system", "content": prompt}]
        self.done, self.final_reward = False, -0.1

    def step(self, step_num: int) -> bool:
        """One action; False ends the episode."""
        self.memory.append({"role": "user", "content": format_observation(self.observation)})
        responses = self.model.chat(self.memory)
        if responses[0].truncate_status == "prompt_truncated":
            return False  # the conversation no longer fits into the model
        response_text = responses[0].response_text or ""
        self.memory.append({"role": "assistant", "content": response_text})

        self.observation, reward, self.done, _ = self.env.step(parse_action(response_text))
        if self.done:
            self.final_reward = reward
        return not self.done

    def reward(self, exps: list[Experience]) -> float:
        """The reward of every step of the episode."""
        return self.final_reward

    def close(self) -> None:
        """Give the game back, however the episode ended."""
        if hasattr(self, "env"):
            self.env.close()
