"""Reasoning gym workflow: one question, one answer, worth what its own data set says.

`workflow_args.run_answers` lets a data set run the model's answers as Python code.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping

from trireme.envs.reasoning_gym import problems
from trireme.task import Task
from trireme.workflows.single_turn import THINK_ANSWER, SimpleWorkflow

_log = logging.getLogger(__name__)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGymWorkflow(SimpleWorkflow):
    """The answer is what stands in the last <answer>; without one there is none.

    Many data sets give a part for a text that holds the answer somewhere, and a whole reply does.
    """

    default_system_prompt = THINK_ANSWER

    @classmethod
    def needs(cls, task: Task) -> Mapping[str, str]:
        """See Workflow."""
        return {"reasoning_gym": "reasoning-gym"}

    def reset(self, task: Task) -> None:
        """Take a task. Raises ValueError where its data set would run answers and may not."""
        super().reset(task)
        path = task.raw_task.get("generated_by")
        if path is None:
            raise ValueError(
                "reasoning_gym_workflow needs a taskset of reasoning-gym: set its path to "
                "reasoning_gym:leg_counting?size=500&seed=1, for example"
            )
        self._problems = problems(path)
        if self._problems.runs_answers and not task.workflow_args.get("run_answers"):
            raise ValueError(
                f"{path} scores an answer by running it as Python code: choose another data set, "
                "or set workflow_args.run_answers: true where what a model writes may be run"
            )

    async def reward_fn(self, task: Task, answer: str) -> dict[str, float]:
        """What the data set gives the answer; 0 where it cannot read it."""
        found = _ANSWER.findall(answer)
        said = found[-1].strip() if found else ""
        try:
            return {"score": await asyncio.to_thread(self._problems.score, said, task.raw_task)}
        except Exception:  # foreign code: some raise for an answer that is out of shape
            _log.debug("no score for %r", said, exc_info=True)
            return {"score": 0.0}
