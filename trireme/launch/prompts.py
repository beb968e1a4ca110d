"""Prompts: encodes the first prompts of tasksets, and reports those that do not fit the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from jinja2 import TemplateSyntaxError

from trireme import pictures
from trireme.algorithms.recipes import Recipe
from trireme.config import Findings, Plan, Problem
from trireme.config.engine_kind import EMBEDDED, kind_named
from trireme.config.lookup import ModelFacts
from trireme.config.stages import StageFacts
from trireme.data.tasksets import Mixture, Taskset
from trireme.explorer.runner import TEACHER_PROMPT
from trireme.launch.data import Text, make_text
from trireme.launch.engines import teacher_len
from trireme.launch.parts import tried
from trireme.task import Task, no_effect
from trireme.usercode import fault_of
from trireme.workflows import examine

ROWS = 64
MOST_UNKNOWN = 0.1
"""The share of tokens that are unknown to the vocabulary, above which a note says so."""
SECONDS = 10.0
"""Time limit for encoding a data set's rows beforehand; a row that has begun is finished."""

OTHER_ROLES = {"human": "user", "gpt": "assistant"}
"""ShareGPT's names of roles, with those of chat templates."""
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
    unknown: int = 0
    """Tokens that stand for text which the vocabulary does not cover."""
    unread: tuple[tuple[str, str], ...] = ()
    """The options of `workflow_args` that no workflow reads, each with the nearest one or ""."""
    other_role: tuple[str, str] | None = None
    """A role of ShareGPT's that the chat template does not know, and the row that has it."""
    split_mark: tuple[str, int] | None = None
    """A mark of the chat template that is no token, and the number of tokens that it becomes."""


class Encoded(NamedTuple):
    """The prompts of a stage's tasksets."""

    prompts: tuple[tuple[str, Prompts], ...] = ()
    """By taskset name; empty if there are problems, or if only the workflow knows them."""
    unread: str = ""
    """Why no prompt was encoded."""


def encode_prompts(
    plan: Plan, recipe: Recipe, tasksets: Sequence[Taskset]
) -> tuple[Encoded, Findings]:
    """Encode the first prompts of all tasksets, and check those of a teacher."""
    findings = Findings()
    try:
        text = make_text(plan, plan.model_path)
        encoded = [(taskset.name, first_prompts(text, taskset)) for taskset in tasksets]
    except (ValueError, OSError) as error:  # for example, no tokenizer next to the model
        fault = error if isinstance(error.__cause__, TemplateSyntaxError) else fault_of(error)
        if fault is None:
            return Encoded(unread=str(error)), findings
        findings.problem("", str(fault))
        return Encoded(), findings
    if recipe.needs_teacher:
        limit = teacher_len(plan)
        for taskset in tasksets:
            if not taskset.is_eval:
                tried(findings, partial(check_teacher_prompts, text, taskset, limit))
    prompts = ((name, prompts) for name, prompts in encoded if prompts is not None)
    return Encoded(tuple(prompts)), findings


def first_prompts(text: Text, taskset: Taskset) -> Prompts | None:
    """Encode the prompts of `ROWS` rows, evenly spread; None if only the workflow knows its
    prompts.
    """
    rendered: list[str] = []
    sizes: list[int] = []
    deadline = time.monotonic() + SECONDS
    drops_tools = shows_pictures = False
    other_role: tuple[str, str] | None = None
    unread: dict[str, str] | None = None
    unknown, unknown_id = 0, text.tokenizer.unk_token_id
    for row in range(0, len(taskset), max(len(taskset) // ROWS, 1)):
        read = partial(_read_of_row, text.chat.read, taskset.rows.where(row))
        task = taskset.task(0, 0, row)
        try:
            asked = examine.first_messages(task, read)
        except ValueError as error:
            if fault_of(error) is not None or taskset.rows.where(row) in str(error):
                raise
            raise ValueError(f"taskset {taskset.name}: {error}") from error
        if asked is None:
            return None
        messages, tools = asked
        passed_by = examine.unread_arguments(task)
        unread = {
            key: near
            for key, near in (passed_by if unread is None else unread).items()
            if key in passed_by
        }
        for role in (message["role"] for message in messages if other_role is None):
            if role in OTHER_ROLES and not text.chat.names_role(*OTHER_ROLES):
                other_role = role, taskset.rows.where(row)
        rendered.append(text.chat.render(messages, tools))
        ids = text.chat.ids_of_text(rendered[-1], messages)
        sizes.append(len(ids))
        unknown += ids.count(unknown_id) if isinstance(unknown_id, int) else 0
        drops_tools = drops_tools or (bool(tools) and text.chat.drops_tools)
        shows_pictures = shows_pictures or bool(pictures.pictures_in(messages))
        if len(sizes) == ROWS or time.monotonic() > deadline:
            break
    if not sizes:
        return None
    return Prompts(
        sizes,
        rendered[0],
        drops_tools,
        text.chat.hides_replies,
        shows_pictures,
        unknown,
        tuple((unread or {}).items()),
        other_role,
        text.chat.split_mark,
    )


def _read_of_row(read: Callable[[Any], Any], where: str, source: Any) -> Any:
    """Read a picture. Raises ValueError that names its row."""
    try:
        return read(source)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def check_template(
    stage: StageFacts, tasksets: Iterable[Taskset | Mixture | None], facts: ModelFacts
) -> Findings:
    """Report a workflow that chats with a model that has no chat template."""
    findings, model = Findings(), stage.config.model
    template = model.custom_chat_template or model.chat_template_path
    if facts.has_chat_template is not False or template:
        return findings
    for taskset in tasksets:
        for task in taskset.kinds() if taskset is not None else ():
            asked = tried(findings, partial(examine.first_messages, task))
            if asked is not None:
                findings.problem(
                    "model.model_path",
                    f"({model.model_path}) has no chat template, which {task.workflow} needs: "
                    "expected a chat model, or model.chat_template_path",
                )
                return findings
    return findings


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
    messages, tools = examine.first_messages(task, text.chat.read) or ([], None)
    users = [at for at, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        return len(text.chat.encode(prompt))
    messages[users[-1]] = pictures.with_text(messages[users[-1]], prompt)
    return len(text.chat.prompt(messages, tools).ids)


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
    notes += [no_effect(name, key, near) for key, near in prompts.unread]
    if prompts.hides_replies:
        notes.append(HIDES_REPLIES)
    if prompts.split_mark is not None:
        mark, count = prompts.split_mark
        written = f"{count} tokens" if count > 1 else "the unknown token"
        notes.append(
            f"the chat template writes {mark}, which the tokenizer encodes as {written}: expected "
            "the tokenizer's files of this model (tokenizer.json, tokenizer_config.json), or a "
            "template with tokens that it has, as model.chat_template_path"
        )
    if prompts.unknown > sum(prompts.sizes) * MOST_UNKNOWN:
        notes.append(
            f"{name}: {prompts.unknown} of {sum(prompts.sizes)} tokens of the encoded prompts are "
            "unknown: the model's vocabulary does not cover that text"
        )
    return notes


def prompt_problems(plan: Plan, encoded: Sequence[tuple[str, Prompts]]) -> list[Problem]:
    """Return a problem for each taskset whose prompts are all too long or without a token, have
    other roles than the chat template, or show pictures to an engine or a trainer that takes none.
    """
    seeing = [name for name, prompts in encoded if prompts.shows_pictures]
    blind = [problem for name in seeing[:1] for problem in _blind(plan, name)]
    empty = [
        Problem(
            "model.model_path",
            f"({plan.model_path}) encodes the prompts of {name} as no token: expected its "
            "tokenizer's files next to the weights, such as tokenizer.json",
        )
        for name, prompts in encoded
        if not max(prompts.sizes)
    ]
    long = [
        Problem(
            "",
            f"{too_long(plan, name, prompts)}: expected a model.max_prompt_tokens of at least "
            f"{max(prompts.sizes)}, and a model.max_model_len of at least "
            f"{max(prompts.sizes) + plan.lengths.max_response_tokens}",
        )
        for name, prompts in encoded
        if min(prompts.sizes) > longest_prompt(plan)
    ]
    roles = [
        Problem(
            "",
            f"{where}: a message has the role '{role}', which the chat template does not know: "
            f"expected '{OTHER_ROLES[role]}'",
        )
        for role, where in (prompts.other_role for _, prompts in encoded if prompts.other_role)
    ]
    return [*blind, *empty[:1], *roles, *long]


def _blind(plan: Plan, name: str) -> list[Problem]:
    """Return the problems of a run whose taskset `name` shows pictures."""
    engine = plan.engine
    found = []
    # a server says itself whether it sees
    key = "" if engine.urls else kind_named(engine.kind).sees_with
    section = "explorer.rollout_model"
    if key is None:
        text = f"is {engine.kind}, and {name} shows pictures: expected {EMBEDDED}, which sees"
        found.append(Problem(f"{section}.engine_type", text))
    elif key and not getattr(plan.config.explorer.rollout_model, key):
        text = f"is false, and {name} shows pictures: expected true, so that {engine.kind} loads"
        found.append(Problem(f"{section}.{key}", f"{text} the tower of the model"))
    if (size := plan.config.trainer.ulysses_sequence_parallel_size) > 1:
        found.append(
            Problem(
                "trainer.ulysses_sequence_parallel_size",
                f"is {size}, and {name} shows pictures: expected 1, since sequences with pictures "
                "are not divided among ranks",
            )
        )
    return found
