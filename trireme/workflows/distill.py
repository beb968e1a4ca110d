"""Distill: the model replies, and a teacher says how likely it finds each token of the reply.

The teacher is the first of `explorer.auxiliary_models`. Its log-probabilities are the experience's
`teacher_logprobs`, which on_policy_distill and jsd learn from. A reward, where there is one, only
measures.
"""

from __future__ import annotations

from trireme.experience import Experience
from trireme.task import Task
from trireme.workflows.single_turn import MathWorkflow, SimpleWorkflow


class OnPolicyDistillWorkflow(SimpleWorkflow):
    """One prompt, one reply, judged token by token."""

    def reset(self, task: Task) -> None:
        """Take a task."""
        self.measures = bool(task.reward_fn or self.default_reward)
        if self.measures:
            super().reset(task)
        else:
            self.bind(task)

    async def run(self) -> list[Experience]:
        """Ask, measure, and have the teacher score what was said."""
        if not self.auxiliary_model_wrappers:
            raise ValueError(
                "explorer.auxiliary_models is empty: this workflow needs a teacher, the first of "
                "them"
            )
        teacher = self.auxiliary_model_wrappers[0]
        experiences = await (super().run() if self.measures else self.ask())
        for experience in experiences:
            experience.reward = experience.reward or 0.0
            experience.teacher_logprobs = await teacher.logprobs_async(
                experience.tokens.tolist(), experience.temperature or 1.0
            )
        return experiences


class OnPolicyDistillMathWorkflow(OnPolicyDistillWorkflow, MathWorkflow):
    """The same for mathematical questions, whose accuracy is measured."""
