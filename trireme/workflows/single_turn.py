"""Single turn: the built-in workflows of one prompt, one reply and one reward.

Subclasses change `format_messages`, `default_reward`, `default_system_prompt` or `reward_fn`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, ClassVar, NoReturn

from trireme.aio import also_blocking
from trireme.experience import Experience
from trireme.extensions import former_names
from trireme.log import get_logger
from trireme.model.blocking import BlockingModel
from trireme.model.chat_tokens import conversation_of, plain_messages
from trireme.registry import REWARDS
from trireme.rewards.grouped import Judges, is_grouped, judge_of, reward_group
from trireme.rewards.reward import examine_columns, option_names, resolve, score
from trireme.task import Task
from trireme.usercode import Refused, UserCode
from trireme.workflows.classes import Workflow

logger = get_logger("launcher")
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
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "tool"), "tool"),
}
TOOLS_ASKED = """
Each line is a tool that you may call:
<tools>
{tools}
</tools>
Think first, between <think> and </think>. Then give all calls in one JSON list between <tool_call>
and </tool_call>, as in
<think>Ann has to be told, and milk is needed.</think>
<tool_call>[{{"name": "send", "arguments": {{"to": "Ann", "text": "back at six"}}}}, \
{{"name": "buy", "arguments": {{"item": "milk", "count": 2}}}}]</tool_call>
Arguments have the types that the tool names."""


class SimpleWorkflow(Workflow):
    """One prompt, one reply, judged by the task's reward."""

    one_experience = True
    one_call = True
    reward_parts = True
    default_reward: ClassVar[str | None] = None
    judges: ClassVar[Judges] = Judges()
    default_system_prompt: str | None = None

    def __init__(
        self, *, task: Task, model: BlockingModel, auxiliary_models: Any | None = None
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.reset(task)

    def reset(self, task: Task) -> None:
        """Switch to a task; everything that depends on it is set here."""
        if task is not self.task:  # which `__init__` has bound
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
        """The options of the reward: `reward_fn_args` of the YAML."""
        return dict(self.task.reward_fn_args)

    def format_messages(self) -> list[dict[str, Any]]:
        """Return the conversation to reply to: system prompt, task, and the reply's prefix if there
        is one.

        A task in chat format keeps its messages; its own system message replaces ours.
        """
        messages = conversation_of(self.task, self.task_desc, self.system_prompt)
        if self.reply_prefix:
            messages.append({"role": "assistant", "content": self.reply_prefix})
        return messages

    @classmethod
    def first_prompt(
        cls, task: Task, read: Callable[[Any], Any]
    ) -> tuple[list[dict[str, Any]], None] | None:
        """Return the messages of a task's only call, and no tools; None if they are not known
        without a model. `read` reads their pictures. Raises ValueError if they are not a
        conversation.
        """
        if task.workflow_args.get("use_base"):
            return None
        workflow: Any = cls
        try:
            messages = workflow(task=task, model=None).format_messages()
        except Exception as error:
            # a user's class may need the model: only the run knows its prompts
            if isinstance(error, ValueError) and cls.__module__.startswith("trireme."):
                raise
            logger.debug("what %s asks is not known without a model", cls, exc_info=True)
            return None
        try:
            return plain_messages(messages, read), None
        except ValueError as error:
            own = takewhile(lambda one: not one.__module__.startswith("trireme."), cls.__mro__)
            if any({"run", "run_async", "ask"} & set(vars(one)) for one in own):
                return None  # it may convert the messages before it sends them
            name = f"format_messages of workflow '{task.workflow}'"
            with UserCode(name, cls):
                raise Refused(f"{name} did not return a conversation: {error}") from error

    async def ask(self) -> list[Experience]:
        """Return the model's reply, as an experience without its reward."""
        return await self.model.chat_async(self.format_messages())

    def reward_arguments(self) -> dict[str, Any]:
        """Return the arguments of a reward of the class form, passed by name if it takes them."""
        return {"truth": self.truth}

    @also_blocking
    async def run(self) -> list[Experience]:
        """Ask, and judge the replies."""
        experiences = await self.ask()
        for experience in experiences:
            if experience.truncate_status == "prompt_truncated" or self.reward_fn is None:
                continue  # the reply is empty, or it is judged with its group
            answer = (self.reply_prefix or "") + (experience.response_text or "")
            sampled = experience.tokens.numpy()[experience.prompt_length :].tolist()
            models, notes = self.auxiliary_model_wrappers, experience.metrics
            named, reward = self.reward_arguments(), self.reward_fn
            parts = await score(
                self.task, answer, reward, sampled, models, notes=notes, named=named
            )
            experience.reward = sum(parts.values())
            experience.metrics.update(parts)
            experience.info["reward_parts"] = {name: (part, 1.0) for name, part in parts.items()}
        return experiences

    @classmethod
    def examine(cls, task: Task) -> None:
        """Raise ValueError for a missing prompt or reward, or a judge that does not answer."""
        reward = task.reward_fn or cls.default_reward
        if cls.format_messages is SimpleWorkflow.format_messages:
            conversation_of(task, task.prompt, None)
        if is_grouped(reward, task.reward_fn_args):
            judge_of(reward, task.reward_fn_args).examine(task)
        elif not hasattr(cls, "reward_fn"):
            made = resolve(reward, task.reward_fn_args)
            if made is not None:
                examine_columns(task, made)
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
        """Set the rewards of all rollouts of a task, if they are set together."""
        if is_grouped(task.reward_fn or cls.default_reward, task.reward_fn_args):
            judge = cls.judges.of(task, cls.default_reward)
            await reward_group(judge, task, experiences, models)


class MathWorkflow(SimpleWorkflow):
    """A mathematical question, reasoned in <think> and answered in <answer>."""

    default_reward = "math_reward"

    def reset(self, task: Task) -> None:
        """Switch to a task."""
        if task.reward_fn in (None, "math_reward", self.default_reward):
            self.default_system_prompt = THINK_ANSWER
        super().reset(task)


class MathBoxedWorkflow(SimpleWorkflow):
    """A mathematical question, answered in \\boxed{}.

    `workflow_args`: `with_think` asks for a <think> block; `format_score_coef` is what its lack
    costs; `use_base` gives a base model plain text in place of a conversation.
    """

    one_experience = True
    one_call = True
    default_reward = "math_boxed_reward"

    def reset(self, task: Task) -> None:
        """Switch to a task."""
        self.use_base = bool(task.workflow_args.get("use_base", False))
        self.with_think = bool(task.workflow_args.get("with_think", False))
        self.default_system_prompt = THINK_BOXED if self.with_think else BOXED
        super().reset(task)

    def reward_options(self) -> dict[str, Any]:
        """Return `reward_fn_args`, and those of `workflow_args` that the reward takes too."""
        options = super().reward_options()
        name = self.reward_name
        known = option_names(REWARDS.get(name)) if isinstance(name, str) else []
        for key in ("with_think", "format_score_coef"):
            if key in self.workflow_args and key in known:
                options.setdefault(key, self.workflow_args[key])
        return options

    def reward_arguments(self) -> dict[str, Any]:
        """Return the arguments of SimpleWorkflow, and those from `workflow_args`."""
        coefficient = self.workflow_args.get("format_score_coef", 0.1)
        named = {"with_think": self.with_think, "format_score_coef": coefficient}
        return super().reward_arguments() | named

    async def ask(self) -> list[Experience]:
        """Return the reply to the conversation, or its continuation as plain text."""
        if not self.use_base:
            return await super().ask()
        asked = _as_lines(conversation_of(self.task, self.task_desc, None))
        prompt = f"{asked}\n{self.system_prompt}\nAssistant:{self.reply_prefix or ''}"
        return await self.model.generate_async(prompt)

    @classmethod
    def examine(cls, task: Task) -> None:
        """Raise ValueError as SimpleWorkflow does, and for pictures in plain text."""
        super().examine(task)
        if task.workflow_args.get("use_base"):
            _as_lines(conversation_of(task, task.prompt, None))


def _as_lines(turns: Sequence[dict[str, Any]]) -> str:
    """Return a conversation as plain text. Raises ValueError if it shows a picture."""
    if not all(isinstance(turn["content"], str) for turn in turns):
        raise ValueError(
            "workflow_args.use_base: the row shows a picture, and a base model gets plain text: "
            "expected a chat model, without use_base"
        )
    return "\n".join(f"{turn['role'].capitalize()}: {turn['content']}" for turn in turns)


class MathEvalWorkflow(MathBoxedWorkflow):
    """A mathematical question for evaluation alone: sampled at temperature 0.6 and top_p 0.8, it
    gives the metric `accuracy` and no reward.
    """

    one_call = True

    async def ask(self) -> list[Experience]:
        """Return the reply, sampled in the same way in every run."""
        return await self.model.chat_async(self.format_messages(), temperature=0.6, top_p=0.8)

    @also_blocking
    async def run(self) -> list[Experience]:
        """Ask, and compute the accuracy."""
        experiences = await super().run()
        for experience in experiences:
            experience.reward = None
            experience.metrics.pop("format_score", None)
        return experiences


class OnPolicyDistillWorkflow(SimpleWorkflow):
    """One prompt, one reply, judged token by token: by a teacher, the first of
    `explorer.auxiliary_models`, from which on_policy_distill and jsd learn. A reward, where there
    is one, only measures.
    """

    def reset(self, task: Task) -> None:
        """Switch to a task."""
        self.measures = bool(task.reward_fn or self.default_reward)
        if self.measures:
            super().reset(task)
        else:
            self.bind(task)

    @also_blocking
    async def run(self) -> list[Experience]:
        """Ask, and compute the reward; the runner has the teacher score the reply."""
        experiences = await (super().run() if self.measures else self.ask())
        for experience in experiences:
            experience.reward = experience.reward or 0.0
        return experiences

    @classmethod
    def asks_a_model(cls, task: Task) -> bool:
        """True if the task must have a teacher: if it is trained."""
        return not task.is_eval


class OnPolicyDistillMathWorkflow(OnPolicyDistillWorkflow, MathWorkflow):
    """The same for mathematical questions, whose accuracy is measured."""


class ToolCallWorkflow(SimpleWorkflow):
    """A conversation with tools, whose next reply is to hold the right calls, and no more.

    The calls are not executed: `tool_call_reward` compares them with those of the row. A row has
    the tools' schemas (`tools`, a JSON list), a system prompt (`raw_system`), the conversation so
    far (`conversations`, each with `from` and `value`) and the right calls (`answer`, a JSON list
    of `name` and `arguments`), as ToolACE's rows are prepared for Tool-N1 (arXiv:2505.00024).
    """

    default_reward = "tool_call_reward"
    reads_prompt = False

    def format_messages(self) -> list[dict[str, Any]]:
        """Return the system prompt with the tools, and the conversation so far."""
        return _dialogue_of(self.task)

    @classmethod
    def examine(cls, task: Task) -> None:
        """Raise ValueError for a row without its columns, and for a wrong reward."""
        _dialogue_of(task)
        super().examine(task)


def _dialogue_of(task: Task) -> list[dict[str, Any]]:
    """Return a row's conversation. Raises ValueError for missing columns."""
    row = task.raw_task
    turns, tools = row.get("conversations"), row.get("tools")
    if not isinstance(turns, list) or not turns:
        raise ValueError(
            f"the row's column 'conversations' is {turns!r:.60}: expected a list of entries with "
            "'from' and 'value'"
        )
    schemas = task.json_column("tools")
    if not isinstance(schemas, list):
        raise ValueError(f"the row's column 'tools' is {tools!r:.60}: expected a JSON list")
    lines = (json.dumps({"type": "function", "function": schema}) for schema in schemas)
    system = str(row.get("raw_system") or "") + TOOLS_ASKED.format(tools="\n".join(lines))
    return [{"role": "system", "content": system}, *map(_turn, turns)]


def _turn(entry: Any) -> dict[str, Any]:
    speaker = entry.get("from") if isinstance(entry, dict) else None
    if speaker not in _ROLES:
        raise ValueError(
            f"the row's column 'conversations' holds {entry!r:.60}: expected 'from' to be one of "
            f"{', '.join(_ROLES)}"
        )
    value = entry.get("value")
    return {
        "role": _ROLES[speaker],
        "content": value if isinstance(value, str) else json.dumps(value),
    }


__getattr__ = former_names(__name__)
