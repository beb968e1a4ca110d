"""Trial: runs tasks outside a run: one of them token by token, or whole evaluation tasksets.

Nothing is trained and nothing is stored. The replies come from a model's own engine, an external
API, or a list of replies, which needs no weights.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from trireme.aio import running_loop
from trireme.algorithms.recipes import get_recipe
from trireme.config import Plan
from trireme.config.engine_kind import EMBEDDED, kind_named
from trireme.config.launcher import launcher_named
from trireme.engines.device import Device
from trireme.engines.engine import Engine, ServedEngine
from trireme.engines.scripted import LOGPROB, ScriptedEngine
from trireme.experience import Experience
from trireme.explorer.metrics import Evaluated, try_tasksets
from trireme.explorer.scheduler import Scheduler
from trireme.ext.external_model.api import Api
from trireme.ext.train.train import Reward, config_from
from trireme.launch.check import checked
from trireme.launch.data import Text, make_text
from trireme.launch.engines import Auxiliary, engine_spec, make_auxiliary
from trireme.launch.explorer_side import make_scheduler
from trireme.launch.servers import engine_servers
from trireme.launch.stop import run_to_its_end
from trireme.launch.tasksets import make_eval_tasksets, make_training_taskset
from trireme.log import ROOT
from trireme.monitor.figures import spoken
from trireme.pictures import legible
from trireme.processes import ending_leftovers, environment
from trireme.text import as_json, say

Replies = Sequence[str] | Callable[[str], str]


GIVEN = (
    f"note: the replies were given, and no model has scored them: each token's log-probability is "
    f"made up ({LOGPROB:.3f} in the experiences)"
)


class TrialFailed(RuntimeError):
    """The workflow, or its reward, failed; `trace` is the first traceback."""

    def __init__(self, sentence: str, trace: str) -> None:
        super().__init__(sentence, trace)
        self.trace = trace

    def __str__(self) -> str:
        return self.args[0]


@dataclass
class Trial:
    """The rollouts of one task; its text is the whole exchange."""

    experiences: list[Experience]
    text: str = field(repr=False)  # a notebook shows the representation below the printed text

    def __str__(self) -> str:
        return self.text


def try_workflow(
    workflow: str | Callable[..., Any] | None,
    task: Mapping[str, Any] | str,
    *,
    model: str | Path,
    reward: Reward | None = None,
    replies: Replies | None = None,
    rollouts: int = 1,
    show: bool = True,
    **overrides: Any,
) -> Trial:
    """Run a workflow on one task, print the exchange, and return it with its experiences.

    `task` is a row, or a prompt. `workflow`, `reward`, `model` and `overrides` are as of
    `trireme.train`. With `replies` (the texts in the order of the calls, or a function of the
    prompt's text) no model is loaded; its tokenizer is, and log-probabilities are made up. Raises
    ConfigError if it cannot run, and TrialFailed with the line that failed.
    """
    if not isinstance(rollouts, int) or rollouts < 1:
        raise ValueError(f"rollouts is {rollouts!r:.60}: expected a number from 1")
    texts = isinstance(replies, list | tuple) and all(isinstance(text, str) for text in replies)
    if not (replies is None or callable(replies) or texts):
        raise ValueError(
            f"replies is {replies!r:.60}: expected a list of texts, one for each call, or a "
            "function that returns the text of a reply to a prompt's"
        )
    with tempfile.TemporaryDirectory() as root:
        config = config_from(
            *(model, [task], reward, workflow, "grpo", None, overrides),
            arguments=[*inspect.signature(try_workflow).parameters],
            folder=Path(root),
        ).model_copy(update={"checkpoint_root_dir": root})
        trial = try_plan(checked(config).plans[-1], replies=replies, rollouts=rollouts)
    if show:
        say(trial)
    return trial


def try_plan(
    plan: Plan, *, place: int = 0, replies: Replies | None = None, rollouts: int = 1
) -> Trial:
    """Run rollouts of the task in one row of a plan's taskset. Works in a running event loop too.

    Raises ValueError for a row that does not exist, TrialFailed if a rollout fails.
    """

    def work() -> Trial:
        return run_to_its_end(_try(plan, place, replies, rollouts))

    if running_loop() is None:
        return work()  # in this thread, so that a debugger's prompt works in a workflow
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


async def _try(plan: Plan, number: int, replies: Replies | None, rollouts: int) -> Trial:
    taskset = make_training_taskset(plan)
    if taskset is None:
        raise ValueError(f"mode {plan.mode} tries no task: expected a stage that explores")
    tasks = taskset.all()
    if not 0 <= number < len(tasks):
        raise ValueError(f"there is no task {number}: the taskset has 0 to {len(tasks) - 1}")
    quiet = logging.getLogger(ROOT)
    if not quiet.handlers:  # a failure is raised, and so not logged as well
        quiet.addHandler(logging.NullHandler())
    task = dataclasses.replace(tasks[number], repeat_times=rollouts, is_eval=False)

    def scripted(text: Text) -> Engine:
        assert replies is not None
        length = plan.lengths.max_model_len
        return ScriptedEngine(replies, tokenizer=text.tokenizer, max_model_len=length)

    make_engine = None if replies is None else scripted
    greedy = get_recipe(plan.config.algorithm).greedy_run
    # the first failure is the one to show, and replies are there once
    opened = open_scheduler(plan, make_engine, greedy_run=greedy, max_retries=0)
    async with opened as (scheduler, text):
        await scheduler.submit(1, [task])
        [outcome] = await scheduler.results(1)
    if outcome.failures:
        failed = outcome.failures[0]
        raise TrialFailed(str(failed.fault), failed.trace)
    row = as_json(task.raw_task, default=str)
    lines = [f"task {number}: {row}", f"truth: {task.truth!r}"]
    for experience in outcome.experiences:
        lines += ["", *described(experience, text, scored=replies is None)]
    if replies is not None:
        lines += ["", GIVEN]
    return Trial(outcome.experiences, "\n".join(lines))


def described(experience: Experience, text: Text, *, scored: bool = True) -> Iterator[str]:
    """Yield an experience as lines: reward, messages, and its tokens with the trained ones marked.

    `scored`: a model computed its log-probabilities.
    """
    e = experience
    parts = ", ".join(f"{name} {value:g}" for name, value in e.metrics.items())
    reward = "none" if e.reward is None else f"{e.reward:g}"
    trained, size = e.trained_tokens, len(e.tokens)
    yield (
        f"rollout {e.eid.run}, step {e.eid.step}: reward {reward}{f' ({parts})' * bool(parts)}; "
        f"{trained} of {size} tokens would be trained; ended by {e.stop_reason or 'the workflow'}"
    )
    for message in e.messages or []:
        shown = spoken(message).replace("\n", f"\n{'':13}")
        yield f"  {message.get('role', '?'):<10} {shown}"
    yield "  token     id  trained  logprob  text"
    for is_trained, places in groupby(range(size), key=lambda index: bool(e.mask[index])):
        span = list(places)
        if is_trained:
            for at in span:
                logprob = "" if e.logprobs is None else f"{float(e.logprobs[at]):.3f}"
                logprob = logprob if scored else "made up"
                piece = text.tokenizer.decode([int(e.tokens[at])])
                yield f"  {at:>5} {int(e.tokens[at]):>6}      yes {logprob:>8}  {piece!r}"
        else:
            ids = e.tokens[span[0] : span[-1] + 1].tolist()
            piece = legible(ids, lambda part: str(text.tokenizer.decode(part)))
            yield f"  {f'{span[0]}-{span[-1]}':>12}       no           {piece!r}"
    unknown = text.tokenizer.unk_token_id
    if isinstance(unknown, int) and (count := int(e.tokens.eq(unknown).sum())):
        yield (
            f"note: {count} of the tokens are {text.tokenizer.unk_token!r}: the model's vocabulary "
            "does not cover that text"
        )


def evaluate(plan: Plan, *, rollouts: int | None = None, api: Api | None = None) -> list[Evaluated]:
    """Run every task of the plan's evaluation tasksets `rollouts` times (or their own number), with
    the plan's model, or the `api`'s.

    Raises ValueError if there is no such taskset, RuntimeError if the engine or the API fails, or
    more rollouts do than `explorer.max_failures` allows.
    """
    return run_to_its_end(_evaluate(plan, rollouts, api))


async def _evaluate(plan: Plan, rollouts: int | None, api: Api | None) -> list[Evaluated]:
    tasksets = make_eval_tasksets(plan)
    if not tasksets:
        raise ValueError("buffer.explorer_input.eval_tasksets is empty: there is nothing to try")

    async def measured(
        make_engine: Callable[[Text], Engine] | None, remote: ServedEngine | None = None
    ) -> list[Evaluated]:
        async with open_scheduler(plan, make_engine) as (scheduler, _):
            if remote is not None:
                await remote.connect()  # a server that refuses us is no failed rollout
            limit = plan.config.explorer.max_failures
            return await try_tasksets(scheduler, tasksets, rollouts, limit)

    if api is not None:
        timeout = plan.config.explorer.max_timeout
        return await measured(
            lambda text: api.make(text.tokenizer, plan.lengths.max_model_len, timeout)
        )
    if plan.places.spread:
        return await launcher_named(plan.places.launcher).evaluate(plan, rollouts)
    if plan.engine.served:
        return await engine_servers().run(
            plan, plan.model_path, lambda engine: measured(lambda _: engine, engine)
        )
    return await measured(None)


@asynccontextmanager
async def open_scheduler(
    plan: Plan, make_engine: Callable[[Text], Engine] | None = None, **options: Any
) -> AsyncIterator[tuple[Scheduler, Text]]:
    """Open a scheduler that runs tasks outside a run, over the plan's embedded engine or that of
    `make_engine`, with its auxiliary models; all is closed. `options`: make_scheduler's.
    """

    def note(text: str) -> None:
        say(f"note: {text}", file=sys.stderr)

    disable_progress_bar()
    text = make_text(plan, plan.model_path)
    async with AsyncExitStack() as held:
        held.enter_context(environment(plan.config.explorer.env_vars))
        held.enter_context(ending_leftovers(note))
        device = Device()
        held.callback(device.close)
        if make_engine is not None:
            engine = make_engine(text)
        else:
            apart = plan.engine.hosts > 0 or plan.places.spread  # a trial starts no processes
            kind = kind_named(EMBEDDED if apart else plan.engine.kind)
            engine = await kind.make(engine_spec(plan, plan.model_path), text.tokenizer, device)
        held.push_async_callback(engine.close)
        others = make_auxiliary(plan, device)
        for other in others:
            if isinstance(other, Auxiliary):
                held.push_async_callback(other.engine.close)
        path = plan.model_path
        scheduler = make_scheduler(plan, path, engine, text, None, auxiliary=others, **options)
        held.push_async_callback(scheduler.close)
        scheduler.start()
        yield scheduler, text
