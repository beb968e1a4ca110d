"""Prompts: encodes the first prompts of a taskset, and reports those that are too long for the
model.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from trireme.config import Plan, Problem
from trireme.config.engine_kind import EMBEDDED
from trireme.data.tasksets import Taskset
from trireme.explorer.runner import TEACHER_PROMPT
from trireme.launch.data import Text
from trireme.log import get_logger
from trireme.model.chat_tokens import as_given, plain_messages
from trireme.pictures import pictures_in
from trireme.task import Task
from trireme.usercode import Refused, UserCode
from trireme.workflows.single_turn import SimpleWorkflow
from trireme.workflows.workflow import resolve

logger = get_logger("launcher")
ROWS = 64
SECONDS = 10.0
"""Time limit for encoding a data set's rows beforehand; a row that has begun is finished."""

HIDES_REPLIES = (
    "the chat template writes no role and no generation prompt between a prompt and its reply, so "
    "that the model cannot tell them apart: expected a template that does, as "
    "model.chat_template_path"
)


class Prompts(NamedTuple):
    """The first call's prompts of some rows of a taskset."""

    sizes: list[int]
    first: str
    drops_tools: bool
    """Whether rows have tools that the chat template leaves out."""
    hides_replies: bool
    """Whether the chat template leaves out replies."""
    shows_pictures: bool = False
    """Whether a prompt shows a picture."""


def first_prompts(text: Text, taskset: Taskset) -> Prompts | None:
    """Encode the prompts of `ROWS` rows, evenly spread; None if only the workflow knows its
    prompts.
    """
    rendered: list[str] = []
    sizes: list[int] = []
    deadline = time.monotonic() + SECONDS
    drops_tools = shows_pictures = False
    for row in range(0, len(taskset), max(len(taskset) // ROWS, 1)):
        asked = first_messages(taskset.task(0, 0, row), text.chat.read)
        if asked is None:
            return None
        messages, tools = asked
        rendered.append(text.chat.render(messages, tools))
        sizes.append(text.chat.tokens_of(rendered[-1], messages))
        drops_tools = drops_tools or (bool(tools) and text.chat.drops_tools)
        shows_pictures = shows_pictures or bool(pictures_in(messages))
        if len(sizes) == ROWS or time.monotonic() > deadline:
            break
    if not sizes:
        return None
    return Prompts(sizes, rendered[0], drops_tools, text.chat.hides_replies, shows_pictures)


def first_messages(
    task: Task,
    read: Callable[[Any], Any] = as_given,
) -> tuple[list[dict[str, Any]], Any] | None:
    """Return the messages and tools of a task's first call; None if only its workflow knows.
    `read` reads pictures; by default they stay as the row has them.

    Raises ValueError if its workflow cannot make any from the row.
    """
    spec = resolve(task.workflow)
    code = spec.code
    if spec.first_prompt is not None:
        return spec.first_prompt(task)
    simple = inspect.isclass(code) and issubclass(code, SimpleWorkflow)
    if not simple or task.workflow_args.get("use_base"):
        return None
    make: Any = code
    name = f"format_messages of workflow '{task.workflow}'"
    try:
        messages = make(task=task, model=None).format_messages()
    except Exception:  # a user's class may need the model: only the run knows its prompts
        logger.debug("what %s asks is not known without a model", code, exc_info=True)
        return None
    try:
        return plain_messages(messages, read), None
    except ValueError as error:
        if _has_own_run(make):  # it may convert the messages before it sends them
            return None
        with UserCode(name, code):
            raise Refused(f"{name} did not return a conversation: {error}") from error


def _has_own_run(workflow: type) -> bool:
    """Return True if a user's class calls the model itself."""
    own = takewhile(lambda cls: not cls.__module__.startswith("trireme."), workflow.__mro__)
    return any({"run", "run_async", "ask"} & set(vars(cls)) for cls in own)


def check_teacher_prompts(text: Text, taskset: Taskset, limit: int | None) -> None:
    """Raise ValueError if one of `ROWS` rows has a teacher prompt that cannot be encoded, or that
    leaves no room for a reply within the teacher's `limit` of tokens.
    """
    if TEACHER_PROMPT not in taskset.rows.columns:
        return
    deadline = time.monotonic() + SECONDS
    for row in range(0, len(taskset), max(len(taskset) // ROWS, 1)):
        task = taskset.task(0, 0, row)
        prompt, where = task.raw_task.get(TEACHER_PROMPT), taskset.rows.where(row)
        if prompt and not isinstance(prompt, str):
            raise ValueError(f"{where}: {TEACHER_PROMPT} is {prompt!r:.60}: expected text")
        size = _teacher_size(text, task, prompt) if prompt and limit else 0
        if limit and size >= limit:
            raise ValueError(
                f"{where}: with its {TEACHER_PROMPT} the teacher reads {size} tokens before the "
                f"reply: expected less than {limit} (explorer.auxiliary_models[0].max_model_len)"
            )
        if time.monotonic() > deadline:
            break


def _teacher_size(text: Text, task: Task, prompt: str) -> int:
    """Count the tokens of the first prompt with the teacher's part in place; of the teacher's part
    alone if only the workflow knows the messages.
    """
    messages, tools = first_messages(task, text.chat.read) or ([], None)
    users = [at for at, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        return len(text.chat.encode(prompt))
    messages[users[-1]] = {**messages[users[-1]], "content": prompt}
    return len(text.chat.encode(text.chat.render(messages, tools)))


def longest_prompt(plan: Plan) -> int:
    """Return the most tokens of a prompt that leaves room for one token of the reply."""
    return min(plan.lengths.max_prompt_tokens, plan.lengths.max_model_len - 1)


def too_long(plan: Plan, name: str, prompts: Prompts) -> str | None:
    """Report how many of a taskset's prompts are too long; None if none is."""
    limit = longest_prompt(plan)
    long = sum(size > limit for size in prompts.sizes)
    if not long:
        return None
    return (
        f"{name}: {long} of {len(prompts.sizes)} prompts have more than {limit} tokens "
        "(model.max_prompt_tokens, below model.max_model_len), so that nothing is asked"
    )


def prompt_notes(plan: Plan, name: str, prompts: Prompts) -> list[str]:
    """Return notes on a taskset's prompts that stop no run."""
    notes = []
    text = too_long(plan, name, prompts)
    if text is not None and min(prompts.sizes) <= longest_prompt(plan):  # otherwise it is a problem
        notes.append(f"{text}: the longest has {max(prompts.sizes)}")
    if prompts.hides_replies:
        notes.append(HIDES_REPLIES)
    return notes


def prompt_problems(plan: Plan, encoded: Sequence[tuple[str, Prompts]]) -> list[Problem]:
    """Return a problem for each taskset whose prompts are all too long, or show pictures to an
    engine or a trainer that takes none.
    """
    seeing = [name for name, prompts in encoded if prompts.shows_pictures]
    blind = [problem for name in seeing[:1] for problem in _blind(plan, name)]
    return blind + [
        Problem(
            "",
            f"{too_long(plan, name, prompts)}: expected a model.max_prompt_tokens of at least "
            f"{max(prompts.sizes)}, and a model.max_model_len above it",
        )
        for name, prompts in encoded
        if min(prompts.sizes) > longest_prompt(plan)
    ]


def _blind(plan: Plan, name: str) -> list[Problem]:
    """Return the problems of a run whose taskset `name` shows pictures."""
    engine = plan.engine
    embedded = engine.kind == EMBEDDED and not engine.hosts and not engine.urls
    found = []
    if not embedded:
        found.append(
            Problem(
                "explorer.rollout_model.engine_type",
                f"{name} shows pictures, and they reach the embedded engine alone: expected "
                f"{EMBEDDED}, in the run's own process",
            )
        )
    if plan.places.trainer_ranks > 1:
        found.append(
            Problem(
                "cluster",
                f"{name} shows pictures, and several ranks train: expected one",
            )
        )
    return found
