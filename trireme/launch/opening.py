"""Opening: checks a plan's parts before anything slow starts, then opens the run's monitors.

All that is wrong with the parts that a plan names is found by making what is light: no model is
loaded and nothing is written. Then a run holds a resume against the start before it, and monitors
and the watchdog begin where the checkpoint does.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from trireme.algorithms.recipes import get_recipe
from trireme.config import ConfigError, Plan, Problem
from trireme.config.lookup import located
from trireme.data.tasksets import Mixture, Taskset
from trireme.explorer.explorer import explorer_state
from trireme.launch.auxiliary import examine_auxiliary
from trireme.launch.changes import changes, refuse_meaningless
from trireme.launch.data import (
    Text,
    examine_taskset,
    make_eval_tasksets,
    make_file_buffer,
    make_operators,
    make_text,
    make_training_taskset,
)
from trireme.launch.starts import add_start, read_starts, same_part, this_start
from trireme.log import get_logger
from trireme.monitor.causes import Facts
from trireme.monitor.monitor import Monitors, open_monitor
from trireme.monitor.watchdog import Alarm
from trireme.task import Task
from trireme.usercode import fault_of
from trireme.workflows.scheduled import ScheduledWorkflow, conversation
from trireme.workflows.single_turn import SimpleWorkflow
from trireme.workflows.workflow import resolve

if TYPE_CHECKING:
    from trireme.launch.session import Session

logger = get_logger("launcher")

T = TypeVar("T")
ROWS = 64
SECONDS = 10.0
"""For the rows of a data set that are encoded beforehand; one that takes long is the last."""


class Prompts(NamedTuple):
    """The first call's prompts of some rows of a taskset."""

    sizes: list[int]
    first: str
    drops_tools: bool
    """Whether rows have tools of which the chat template writes nothing."""


class Parts(NamedTuple):
    """What making a plan's light parts has told."""

    problems: list[str]
    """One sentence for each part that cannot be made, or whose options or rows are wrong."""
    prompts: Sequence[tuple[str, Prompts]] = ()
    """With the taskset's name; none where there are problems, or only workflows know them."""
    unread: str = ""
    """Why no prompt was encoded."""


def made_parts(plan: Plan, *, data: bool = True) -> Parts:
    """Make what is light. `data`: also the rows that a trainer reads by itself, which are encoded
    for that.
    """
    problems: list[str] = []

    def tried(make: Callable[[], T]) -> T | None:
        try:
            return make()
        except Exception as error:
            fault = fault_of(error)
            if fault is None and not isinstance(error, ValueError | ImportError | OSError):
                raise
            problems.append(str(fault or error))
            return None

    recipe = tried(lambda: get_recipe(plan.config.algorithm))
    tried(lambda: make_operators(plan))
    tried(lambda: examine_auxiliary(plan))
    tasksets: list[Taskset | Mixture | None] = []
    if plan.config.data_processor.task_pipeline is None:  # it would write
        tasksets.append(tried(lambda: make_training_taskset(plan)))
    tasksets += tried(lambda: make_eval_tasksets(plan)) or ()
    greedy = recipe is not None and recipe.greedy_run
    for taskset in filter(None, tasksets):
        tried(lambda found=taskset: examine_taskset(found, greedy_run=greedy))
    if data and plan.buffer_type == "file" and recipe is not None:
        rows = plan.config.buffer.trainer_input.experience_buffer
        tried(
            lambda: make_file_buffer(
                plan, rows, make_text(plan, plan.model_path), (), schema=recipe.schema
            )
        )
    each = [one for t in tasksets if t for one in getattr(t, "tasksets", [t])]
    if problems or not each or located(plan.model_path, "models") is None or plan.mode == "serve":
        return Parts(problems)
    try:
        text = make_text(plan, plan.model_path)
        prompts = [(taskset.name, first_prompts(text, taskset)) for taskset in each]
    except (ValueError, OSError) as error:  # no tokenizer beside the model, say
        return Parts([], unread=str(error))
    return Parts([], [(name, found) for name, found in prompts if found is not None])


def first_prompts(text: Text, taskset: Taskset) -> Prompts | None:
    """Those of `ROWS` rows, evenly spread; None where only the workflow knows what it asks."""
    rendered: list[str] = []
    sizes: list[int] = []
    deadline = time.monotonic() + SECONDS
    drops_tools = False
    for row in range(0, len(taskset), max(len(taskset) // ROWS, 1)):
        asked = _asked(taskset.task(0, 0, row))
        if asked is None:
            return None
        messages, tools = asked
        rendered.append(text.chat.render(messages, tools))
        sizes.append(len(text.chat.encode(rendered[-1])))
        drops_tools = drops_tools or (bool(tools) and text.chat.drops_tools)
        if len(sizes) == ROWS or time.monotonic() > deadline:
            break
    return Prompts(sizes, rendered[0], drops_tools) if sizes else None


def longest_prompt(plan: Plan) -> int:
    """Tokens that a prompt may have, with room for one of the reply."""
    return min(plan.max_prompt_tokens, plan.max_model_len - 1)


def too_long(plan: Plan, name: str, prompts: Prompts) -> str | None:
    """How many of a taskset's prompts are longer than a prompt may be; None where none is."""
    limit = longest_prompt(plan)
    long = sum(size > limit for size in prompts.sizes)
    if not long:
        return None
    return (
        f"{name}: {long} of {len(prompts.sizes)} prompts have more than {limit} tokens "
        "(model.max_prompt_tokens, below model.max_model_len), so that nothing is asked"
    )


def _asked(task: Task) -> tuple[list[dict[str, Any]], Any] | None:
    """The messages and tools of a task's first call; None where only its workflow knows."""
    code = resolve(task.workflow).code
    if isinstance(code, ScheduledWorkflow):
        return conversation(task), task.raw_task.get("tools")
    simple = inspect.isclass(code) and issubclass(code, SimpleWorkflow)
    if not simple or task.workflow_args.get("use_base"):
        return None
    make: Any = code
    try:
        return make(task=task, model=None).format_messages(), None
    except Exception:  # a user's class may need the model: only the run can say what it asks
        logger.debug("what %s asks is not known without a model", code, exc_info=True)
        return None


def prompt_problems(plan: Plan, prompts: Sequence[tuple[str, Prompts]]) -> list[str]:
    """A sentence for each taskset of which nothing is asked: all of its prompts are too long."""
    return [
        f"{too_long(plan, name, found)}: expected at least {max(found.sizes)}"
        for name, found in prompts
        if min(found.sizes) > longest_prompt(plan)
    ]


def open_run(session: Session) -> tuple[Monitors, Alarm]:
    """The run's monitors and its watchdog. Raises ConfigError for a run that cannot be."""
    plan, folder = session.plan, session.folder
    for note in plan.notes:
        logger.info(note)
    _examine(session)
    start = this_start(plan, session.model_path, session.recipe, session.resumed)
    explored = _explored(session)
    lines = _since_last_start(session, explored, start)
    kind = plan.config.monitor.monitor_type
    monitor = open_monitor(folder.monitor, kind, _steps_that_count(session))
    goes_on = session.resumed is not None or explored is not None
    facts = Facts.of(plan, session.recipe)
    alone = "explorer" if plan.mode == "explore" else None
    if plan.mode == "train" and not session.reads_file:
        alone = "trainer"
    alarm = Alarm(facts, folder.monitor, goes_on=goes_on, alone=alone)
    add_start(folder, start)
    for line in lines:
        logger.info(line)
        session.console.note(line)
    return monitor, alarm


def _examine(session: Session) -> None:
    """Raise ConfigError for parts and options that cannot be, before a model is loaded."""
    try:
        greedy = session.recipe.greedy_run
        _ = session.operators
        examine_auxiliary(session.plan)
        for taskset in (session.taskset, *session.eval_tasksets):
            if taskset is not None:
                examine_taskset(taskset, greedy_run=greedy)
        if session.reads_file:  # a malformed row is named now
            _ = session.buffer
    except (ValueError, ImportError) as error:
        raise ConfigError([Problem("", str(error))]) from error


def _explored(session: Session) -> dict[str, Any] | None:
    """Where the explorer stood when the run last ended; None: it begins."""
    plan, resumed = session.plan, session.resumed
    if plan.mode == "explore":
        own = session.folder.state_of(plan.config.explorer.name)
        return explorer_state(own) if own.exists() else None
    return resumed.run_state.get("explorer") if resumed else None


def _since_last_start(
    session: Session, explored: dict[str, Any] | None, start: dict[str, Any]
) -> list[str]:
    """What a resume goes on from, and what has changed; nothing where a run begins.

    Raises ConfigError for a resume that cannot be.
    """
    folder, resumed = session.folder, session.resumed
    if resumed is None and explored is None:
        return []
    earlier = [old for old in read_starts(folder) if same_part(old, start)]
    old = earlier[-1] if earlier else None
    lines = []
    if resumed is not None:
        refuse_meaningless(
            session.plan, session.model_path, folder, resumed.step, session.recipe, old, start
        )
        lines = [f"going on from {folder.step_dir(resumed.step)}"]
    if old is None:
        return [*lines, "what has changed since its last start is not known: no run/ tells it"]
    state = explored or {"step": resumed.step if resumed else 0, "taskset": {}}
    train = resumed.step if resumed else state["step"]
    row = state["taskset"].get("current_index")
    found = changes(old, start, train=train + 1, explore=state["step"] + 1, row=row)
    if not found:
        return [*lines, "nothing has changed since its last start"]
    return [*lines, f"changed since its last start ({old['time']}):", *(f"  {f}" for f in found)]


def _steps_that_count(session: Session) -> dict[str, int]:
    """Of each part whose steps come anew from here on, the last that does not."""
    resumed, mode = session.resumed, session.plan.mode
    step = resumed.step if resumed else 0
    if mode == "train" and not session.recipe.from_data:
        return {"trainer": step}
    if mode not in ("both", "train"):
        return {}
    state = resumed.run_state if resumed else {}
    explored = state.get("explorer", {"step": step})["step"]
    return {"trainer": step, "explorer": explored, "eval": explored}
