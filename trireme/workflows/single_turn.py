"""Single turn: one prompt, one reply, one reward.

Subclasses change `format_messages`, `default_reward`, `default_system_prompt` or `reward_fn`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

from trireme.experience import Experience
from trireme.model.blocking import BlockingModel
from trireme.model.message import conversation_of
from trireme.rewards.grouped import Judges, is_grouped, judge_of, reward_group
from trireme.rewards.names import REWARDS
from trireme.rewards.reward import option_names, resolve, score
from trireme.task import Task
from trireme.workflows.classes import Workflow

THINK_ANSWER = (
    "Work the problem out before you reply. Put your reasoning between <think> and </think>, and "
    "after it nothing but the final result between <answer> and </answer>, each tag on a line of "
    "its own:\n<think>\nyour reasoning\n</think>\n<answer>\nthe result\n</answer>"
)
BOXED = "Reason step by step. Give the final result within \\boxed{}."
THINK_BOXED = (
    "First reason step by step between <think> and </think>. Then reply to the user, with the "
    "final result within \\boxed{}."
)


class SimpleWorkflow(Workflow):
    """One prompt, one reply, judged by the task's reward."""

    default_reward: ClassVar[str | None] = None
    judges: ClassVar[Judges] = Judges()
    default_system_prompt: str | None = None

    def __init__(
        self, *, task: Task, model: BlockingModel, auxiliary_models: Any | None = None
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.reset(task)

    def reset(self, task: Task) -> None:
        """Take a task; whatever depends on it is set here."""
        super().reset(task)
        if self.system_prompt is None:
            self.system_prompt = self.default_system_prompt
        if not hasattr(type(self), "reward_fn"):  # a subclass may have a method of this name
            self.reward_fn: Any = None
            if not is_grouped(self.reward_name, task.reward_fn_args):
                self.reward_fn = resolve(self.reward_name, self.reward_options())

    @property
    def reward_name(self) -> Any:
        """The task's reward, else the workflow's own."""
        return self.task.reward_fn or self.default_reward or self._no_reward()

    def reward_options(self) -> dict[str, Any]:
        """Options of the reward: `reward_fn_args` of the YAML."""
        return dict(self.task.reward_fn_args)

    def format_messages(self) -> list[dict[str, Any]]:
        """The conversation to reply to: system prompt, task, and the reply's beginning if given.

        A task in chat format keeps its messages; a system message of its own goes before ours.
        """
        messages = conversation_of(self.task, self.task_desc, self.system_prompt)
        if self.reply_prefix:
            messages.append({"role": "assistant", "content": self.reply_prefix})
        return messages

    async def ask(self) -> list[Experience]:
        """The model's reply, as an experience without its reward."""
        return await self.model.chat_async(self.format_messages())

    async def run(self) -> list[Experience]:
        """Ask, and judge what comes."""
        experiences = await self.ask()
        for experience in experiences:
            if experience.truncate_status == "prompt_truncated" or self.reward_fn is None:
                continue  # nothing was said, or it is judged with its group
            answer = (self.reply_prefix or "") + (experience.response_text or "")
            sampled = experience.tokens[experience.prompt_length :].tolist()
            parts = await score(
                self.task, answer, self.reward_fn, sampled, self.auxiliary_model_wrappers
            )
            experience.reward = sum(parts.values())
            experience.metrics.update(parts)
        return experiences

    @classmethod
    def examine(cls, task: Task) -> None:
        """Raise ValueError for a prompt or reward that there is not, or a judge that is silent."""
        reward = task.reward_fn or cls.default_reward
        if cls.format_messages is SimpleWorkflow.format_messages:
            conversation_of(task, task.prompt, None)
        if is_grouped(reward, task.reward_fn_args):
            judge_of(reward, task.reward_fn_args).examine(task)
        elif not hasattr(cls, "reward_fn"):
            resolve(reward, task.reward_fn_args)
            if not reward and cls.reset is SimpleWorkflow.reset:
                cls._no_reward()

    @classmethod
    def _no_reward(cls) -> NoReturn:
        raise ValueError(
            f"{cls.__name__} needs a reward: set default_reward_fn_type of its taskset "
            f"(known: {', '.join(REWARDS.names())})"
        )

    @classmethod
    async def judge(
        cls, task: Task, experiences: Sequence[Experience], models: Sequence[Any]
    ) -> None:
        """Give all rollouts of a task their rewards, where they are given together."""
        if is_grouped(task.reward_fn or cls.default_reward, task.reward_fn_args):
            found = cls.judges.of(task, cls.default_reward)
            await reward_group(found, task, experiences, models)


class MathWorkflow(SimpleWorkflow):
    """A mathematical question, reasoned in <think> and answered in <answer>."""

    default_reward = "math_reward"

    def reset(self, task: Task) -> None:
        """Take a task."""
        if task.reward_fn in (None, "math_reward", self.default_reward):
            self.default_system_prompt = THINK_ANSWER
        super().reset(task)


class MathBoxedWorkflow(SimpleWorkflow):
    """A mathematical question, answered in \\boxed{}.

    `workflow_args`: `with_think` asks for a <think> block; `format_score_coef` is what its lack
    costs; `use_base` gives a base model plain text in place of a conversation.
    """

    default_reward = "math_boxed_reward"

    def reset(self, task: Task) -> None:
        """Take a task."""
        self.use_base = bool(task.workflow_args.get("use_base", False))
        self.with_think = bool(task.workflow_args.get("with_think", False))
        self.default_system_prompt = THINK_BOXED if self.with_think else BOXED
        super().reset(task)

    def reward_options(self) -> dict[str, Any]:
        """`reward_fn_args`, and of `workflow_args` what the reward takes too."""
        options = super().reward_options()
        name = self.reward_name
        known = option_names(REWARDS.get(name)) if isinstance(name, str) else []
        for key in ("with_think", "format_score_coef"):
            if key in self.workflow_args and key in known:
                options.setdefault(key, self.workflow_args[key])
        return options

    async def ask(self) -> list[Experience]:
        """The reply to the conversation, or what follows it as plain text."""
        if not self.use_base:
            return await super().ask()
        turns = conversation_of(self.task, self.task_desc, None)
        asked = "\n".join(f"{turn['role'].capitalize()}: {turn['content']}" for turn in turns)
        prompt = f"{asked}\n{self.system_prompt}\nAssistant:{self.reply_prefix or ''}"
        return await self.model.generate_async(prompt)


class MathEvalWorkflow(MathBoxedWorkflow):
    """A mathematical question for evaluation alone: sampled at temperature 0.6 and top_p 0.8, it
    gives the metric `accuracy` and no reward.
    """

    async def ask(self) -> list[Experience]:
        """The reply, sampled the same way in every run."""
        return await self.model.chat_async(self.format_messages(), temperature=0.6, top_p=0.8)

    async def run(self) -> list[Experience]:
        """Ask, and measure."""
        experiences = await super().run()
        for experience in experiences:
            experience.reward = None
            experience.metrics.pop("format_score", None)
        return experiences


class MathRmWorkflow(MathWorkflow):
    """A mathematical question whose replies a model judges, one by one."""

    default_reward = "judge"


class MathRulerWorkflow(MathWorkflow):
    """A mathematical question whose replies a model compares; the metric `gold_reward` is what
    `math_reward` would have given.
    """

    default_reward = "ruler"

    async def run(self) -> list[Experience]:
        """Ask, and note what the replies are worth by the right answer."""
        experiences = await super().run()
        gold = resolve("math_reward")
        assert gold is not None
        for experience in experiences:
            if self.truth is not None:
                parts = await score(self.task, experience.response_text or "", gold)
                experience.metrics["gold_reward"] = sum(parts.values())
        return experiences


class RubricJudgeWorkflow(SimpleWorkflow):
    """One prompt, one reply, rated by a model that is given the row's criteria."""

    default_reward = "rubric"
