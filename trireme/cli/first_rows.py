"""First rows: how long the rows of a plan's data are, and what of the first is asked or trained.

For `trireme check`: of each data set some rows are encoded by the model's own tokenizer, where it
lies on this machine, for some seconds at most. What a workflow of one's own asks is not known.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from typing import Any

from trireme.cli.view import bracketed, of_data
from trireme.config import Plan
from trireme.config.located import located
from trireme.launch.parts.tasks import make_eval_tasksets, make_training_taskset
from trireme.launch.parts.text import Text, make_text
from trireme.monitor.figures import in_one_line
from trireme.task import Task
from trireme.workflows.scheduled import ScheduledWorkflow, conversation
from trireme.workflows.single_turn import SimpleWorkflow
from trireme.workflows.workflow import resolve

ROWS = 64
SECONDS = 10.0
"""For each data set; a row that takes long is the last."""
SHOWN = 300
"""Characters of a row."""

Told = tuple[list[tuple[str, str]], list[str]]
"""Topic and text of lines to print, and problems."""


def first_rows(plan: Plan) -> Told:
    """See the module. A plan whose model is made by another stage is not looked at."""
    if located(plan.model_path, "models") is None or plan.mode == "serve":
        return [], []
    if plan.buffer_type == "file":
        return _of_data(plan)
    text = make_text(plan, plan.model_path)
    lines: list[tuple[str, str]] = []
    problems: list[str] = []
    prepares = plan.config.data_processor.task_pipeline is not None  # it would write
    training = None if prepares else make_training_taskset(plan)
    own = getattr(training, "tasksets", [training] if training else [])
    for taskset in (*own, *make_eval_tasksets(plan)):
        step = max(len(taskset) // ROWS, 1)
        tasks = (taskset.task(0, 0, row) for row in range(0, len(taskset), step))
        told, wrong = _of_tasks(plan, text, taskset.name, tasks)
        lines += told
        problems += wrong
    return lines, problems


def _of_tasks(plan: Plan, text: Text, name: str, tasks: Any) -> Told:
    """The prompts of a taskset."""
    prompts: list[str] = []
    sizes: list[int] = []
    deadline = time.monotonic() + SECONDS
    drops_tools = False
    for task in tasks:
        asked = _asked(task)
        if asked is None:
            return [], []
        messages, tools = asked
        prompts.append(text.chat.render(messages, tools))
        sizes.append(len(text.chat.encode(prompts[-1])))
        drops_tools = drops_tools or (bool(tools) and text.chat.drops_tools)
        if len(sizes) == ROWS or time.monotonic() > deadline:
            break
    lines = [("prompts", f"{name}: {_range(sizes)}"), ("first ends", _end(prompts[0]))]
    if drops_tools:
        lines.append(("warning", f"{name}: the chat template writes nothing of the rows' tools"))
    limit = min(plan.max_prompt_tokens, plan.max_model_len - 1)
    long = sum(size > limit for size in sizes)
    said = (
        f"{name}: {long} of {len(sizes)} prompts have more than {limit} tokens "
        "(model.max_prompt_tokens, below model.max_model_len), so that nothing is asked"
    )
    if long == len(sizes):
        return lines, [f"{said}: expected at least {max(sizes)}"]
    return [*lines, *([("warning", f"{said}: the longest has {max(sizes)}")] * bool(long))], []


def _asked(task: Task) -> tuple[list[dict[str, Any]], Any] | None:
    """The messages and tools of a task's first call; None where only its workflow knows."""
    code = resolve(task.workflow).code
    if isinstance(code, ScheduledWorkflow):
        return conversation(task), task.raw_task.get("tools")
    simple = inspect.isclass(code) and issubclass(code, SimpleWorkflow)
    if not simple or task.workflow_args.get("use_base"):
        return None
    make: Any = code
    return make(task=task, model=None).format_messages(), None


def _of_data(plan: Plan) -> Told:
    """The rows of a data set that is trained on."""
    deadline = time.monotonic() + SECONDS
    samples = []
    for sample in of_data(plan, ROWS):
        samples.append(sample)
        if time.monotonic() > deadline:
            break
    sizes = [sample.tokens for sample in samples if sample.parts]
    lost = len(samples) - len(sizes)
    if not sizes:
        return [], [
            f"all of the first {lost} rows leave nothing to train within model.max_model_len "
            f"({plan.max_model_len}): expected a larger one, or shorter rows"
        ]
    shown = in_one_line(bracketed(next(s for s in samples if s.parts)), SHOWN)
    lines = [("rows", _range(sizes)), ("trained", f"[[in brackets]] {shown}")]
    cut = sum(size >= plan.max_model_len for size in sizes)
    if lost or cut:
        text = f"{lost} of the first {len(samples)} rows are left out, as too long, and {cut} cut"
        lines.append(("warning", f"{text} at model.max_model_len ({plan.max_model_len})"))
    return lines, []


def _range(sizes: Sequence[int]) -> str:
    return f"{len(sizes)} encoded, {min(sizes)} to {max(sizes)} tokens"


def _end(prompt: str) -> str:
    return in_one_line("… " * (len(prompt) > 120) + prompt[-120:], 160)
