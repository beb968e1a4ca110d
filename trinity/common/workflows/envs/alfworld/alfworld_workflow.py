"""ALFWorld as one conversation: an environment's workflow, written out to be copied.

A workflow of yours has a file as this one, next to it or in your own folder. It is registered by
`@WORKFLOWS.register_module("my_workflow")` and an import in `__init__.py` of
`trinity/common/workflows`, or by a line of the `default_mapping` there; `default_workflow_type`
also takes its dotted path.

To change ALFWorld's here, and not in a copy, take the `#` off its line in that `default_mapping`:
without it the YAML's `alfworld_workflow` is the built-in one (`trireme/ext/alfworld/workflow.py`),
which gives the same experiences and has more options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trinity.common.workflows.step_wise_workflow import StepWiseAlfworldWorkflow
from trireme.experience import Experience
from trireme.ext.alfworld import workflow as alfworld
from trireme.ext.alfworld.workflow import SYSTEM_PROMPT as AlfWORLD_SYSTEM_PROMPT
from trireme.ext.alfworld.workflow import create_environment, format_observation
from trireme.task import Task
from trireme.workflows.episode import MultiTurnWorkflow, parse_action

__all__ = [
    "AlfWORLD_SYSTEM_PROMPT",
    "AlfworldWorkflow",
    "StepWiseAlfworldWorkflow",
    "create_environment",
    "format_observation",
    "parse_action",
]


class AlfworldWorkflow(MultiTurnWorkflow):
    """A household task as one conversation. One that is not done in time has reward -0.1."""

    @classmethod
    def needs(cls, task: Task) -> Mapping[str, str]:
        """The packages of the game."""
        return alfworld.AlfworldWorkflow.needs(task)

    def generate_env_inference_samples(self, env: Any, rollout_num: int) -> list[Experience]:
        """Play the game `rollout_num` times; each is one experience."""
        experience_list = []
        for _ in range(rollout_num):
            observation, _info = env.reset()
            final_reward, rounds, done = -0.1, 0, False
            prompt = self.system_prompt or AlfWORLD_SYSTEM_PROMPT
            memory: list[dict[str, Any]] = [{"role": "system", "content": prompt}]
            for rounds in range(self.max_env_steps):  # noqa: B007 (read below)
                memory.append({"role": "user", "content": format_observation(observation)})
                response = self.get_model_response(memory)[0]
                if response.truncate_status == "prompt_truncated":
                    break  # the conversation no longer fits into the model
                memory.append({"role": "assistant", "content": response.response_text or ""})
                action = parse_action(response.response_text or "")
                observation, reward, done, _info = env.step(action)
                if done:
                    final_reward = reward
                    break
            experience_list.append(
                self.process_messages_to_experience(
                    memory, final_reward, {"env_rounds": rounds, "env_done": 1 if done else 0}
                )
            )
        return experience_list

    def make_env(self) -> Any:
        """The game of the task, whose file is its description."""
        return create_environment(str(self.task_desc))

    def run(self) -> list[Experience]:
        """The rollouts of one call: `repeat_times` is 1 unless the class sets `can_repeat`."""
        env = self.make_env()
        try:
            return self.generate_env_inference_samples(env, self.repeat_times)
        finally:
            env.close()
