"""Runner: runs the rollouts of one task on a workflow, and turns whatever happens into data.

Invariants:
- n rollouts of a task are n run ids, whatever the workflow does; the Runner stamps them.
- Whatever user code raises ends here, once, as a `Failed` with its traceback; it is counted, never
  turned into a reward.
- Each attempt has `max_timeout` seconds; after that its Model is revoked, its requests are aborted
  and the result of a late thread is dropped.
- Each attempt has its own copy of the task, so that what the workflow does to a row stays there.
- A retry draws new random numbers, so that it does not repeat the reply that failed. An error of
  the code itself (a TypeError, say: see usercode.py) is not retried.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch

from trireme.aio import call_user, ended, in_thread
from trireme.engines.barrier import RolloutBarrier
from trireme.engines.engine import Engine
from trireme.experience import EID, Experience
from trireme.log import FILE_ONLY, get_logger
from trireme.model.model import Model
from trireme.pictures import with_text
from trireme.rewards.reward import number
from trireme.task import Task
from trireme.usercode import Fault, UserCode, awaiting, fault_of
from trireme.workflows.workflow import NoExperience, WorkflowSpec, WrongExperience

logger = get_logger("explorer")

Key = tuple[Any, ...]
"""(batch, task, run), and the number of the attempt if it is not the first."""
ModelFactory = Callable[[Task, Key], Model]
TOGETHER_S = 1.0
"""Seconds in which the log's lines about rollouts become one record."""
HELD_UP_S = 20.0
"""Seconds for which the engine waits for a rollout before a warning names the place."""


@dataclass
class Failed:
    """A rollout that gave no experience, with cause and place."""

    key: str
    kind: str
    """error, timeout or empty."""
    fault: Fault
    trace: str = ""

    @property
    def message(self) -> str:
        """Return the error in one line."""
        return self.fault.text

    def __str__(self) -> str:
        return f"rollout {self.key} ({self.kind}): {self.fault}"


@dataclass
class Outcome:
    """The result of the rollouts of one task, or of a part of them."""

    task: Task
    experiences: list[Experience] = field(default_factory=list)
    failures: list[Failed] = field(default_factory=list)
    retries: int = 0
    seconds: float = 0.0
    attempts: list[tuple[float, float]] = field(default_factory=list)
    """Per workflow call: its seconds, and how many of them it waited for the model."""

    @property
    def rollouts(self) -> list[Experience]:
        """The task's own experiences; a repeatable workflow may have made other groups as well."""
        return [e for e in self.experiences if not is_apart(e, self.task)]

    def join(self, other: Outcome) -> None:
        """Add another part of the same task."""
        self.experiences += other.experiences
        self.failures += other.failures
        self.retries += other.retries
        self.seconds = max(self.seconds, other.seconds)
        self.attempts += other.attempts


class TimeLimit:
    """How long an attempt may take: `most` seconds, or less once task durations are known.

    With `ratio` the limit is that many times the mean duration of finished training tasks, once
    `warmup` of them have finished.
    """

    def __init__(self, most: float, *, ratio: float | None = None, warmup: int = 1) -> None:
        self.most, self._ratio, self._warmup = most, ratio, warmup
        self._total, self._count = 0.0, 0
        self.reported = False
        """Whether the console has reported a time-out; the explorer counts them after each step."""
        self.held_up = False
        """Whether it has named a rollout that the engine waits for."""

    def add(self, seconds: float) -> None:
        """Record that a training task took `seconds`."""
        self._total, self._count = self._total + seconds, self._count + 1

    @property
    def seconds(self) -> float:
        """Return the limit for an attempt that begins now."""
        if self._ratio is None or self._count < max(self._warmup, 1):
            return self.most
        return min(self.most, self._ratio * self._total / self._count)


class Runner:
    """Runs one task at a time; a Scheduler owns several."""

    def __init__(
        self,
        make_model: ModelFactory,
        engine: Engine,
        *,
        limit: TimeLimit,
        max_retries: int,
        overlap: bool = False,
        barrier: RolloutBarrier | None = None,
        index: int = 0,
        explorer: str = "",
        teacher: bool = False,
    ) -> None:
        """`overlap`: repeats of workflows that block, or start processes, run concurrently, as
        those of other workflows always do.

        `teacher`: the first auxiliary model scores the tokens that training rollouts sampled.

        `explorer`: the explorer's name if there are several; each samples its own replies.
        """
        self.make_model = make_model
        self.engine = engine
        self.limit = limit
        self.max_retries = max_retries
        self.overlap = overlap
        self.barrier = barrier
        self.explorer = (explorer,) if explorer else ()
        self.teacher = teacher
        self.log = get_logger(f"explorer_runner_{index}")
        self._noted: list[str] = []

    async def run(
        self,
        task: Task,
        spec: WorkflowSpec,
        runs: Sequence[int],
        answered: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """Run the rollouts `runs` of a task. Never raises for what a workflow does.

        `answered` is called when all of them have their last reply, if that is known before they
        end; the next task may begin then.
        """
        started = time.monotonic()
        unanswered = set(runs)

        def one_is(run: int) -> None:
            unanswered.discard(run)
            if not unanswered:
                answered()

        if spec.can_repeat:
            parts = [await self._rollout(task, spec, list(runs), one_is)]
        elif self.overlap or not spec.one_at_a_time:
            work = (self._rollout(task, spec, [run], one_is) for run in runs)
            parts = await asyncio.gather(*work)
        else:
            parts = [await self._rollout(task, spec, [run], one_is) for run in runs]
        outcome = Outcome(task)
        for part in parts:
            outcome.join(part)
        outcome.seconds = time.monotonic() - started
        if not task.is_eval and not outcome.failures:
            self.limit.add(outcome.seconds)
        return outcome

    def _note(self, line: str) -> None:
        """Log a line about a rollout, in one record with those that follow at once: of rollouts
        that take milliseconds, a record of its own for each would be a tenth of the work.
        """
        self._noted.append(line)
        if len(self._noted) == 1:
            asyncio.get_running_loop().call_later(TOGETHER_S, self.log_noted)

    def log_noted(self) -> None:
        """Log the lines about rollouts that are not in the log yet."""
        noted, self._noted = self._noted, []
        if noted:
            self.log.info("%s", "\n".join(noted))

    def has_begun(self, task: Task, runs: Sequence[int]) -> bool:
        """Return whether one of a task's rollouts has begun and not ended, where a barrier counts
        them.
        """
        begun = self.barrier.begun if self.barrier else ()
        return any(self._key(task, run) in begun for run in runs)

    def is_trying(self, task: Task, runs: Sequence[int]) -> bool:
        """Return the same for those that may still ask the model."""
        barrier = self.barrier
        return barrier is not None and any(barrier.is_trying(self._key(task, run)) for run in runs)

    def _key(self, task: Task, run: int) -> tuple[Any, ...]:
        return (batch_order(task, *self.explorer), task.task_id, run)

    async def _rollout(
        self, task: Task, spec: WorkflowSpec, runs: list[int], answered: Callable[[int], None]
    ) -> Outcome:
        """Call the workflow (for one run, or for all of a repeatable one), with retries."""
        outcome = Outcome(task)
        key = self._key(task, runs[0])
        with self.barrier.rollout(key) if self.barrier else nullcontext():
            for attempt in range(self.max_retries + 1):
                if attempt and self.barrier:
                    await self.barrier.again(key)
                outcome.retries = attempt
                own_key = (*key, attempt) if attempt else key
                model = self.make_model(task, own_key)
                if self.barrier and self._asks_once(task, spec, model):
                    self.barrier.asks_once(key, partial(answered, runs[0]))
                result = await self._attempt(task, spec, runs, model, own_key, outcome.attempts)
                if isinstance(result, list):
                    outcome.experiences = result
                    self._note(_in_one_line(rollout_name(task, runs[0]), result))
                    return outcome
                # the explorer reports failures by cause only after the step; where rollouts hang
                # that takes long, so the first time-out is reported at once
                first = result.kind == "timeout" and not self.limit.reported
                self.limit.reported |= first
                shown = {"place": result.fault.place} if first else FILE_ONLY
                self.log.warning("%s (attempt %d of %d)\n%s", result, attempt + 1,
                                 self.max_retries + 1, result.trace, extra=shown)  # fmt: skip
                if result.fault.lasting:
                    break
        outcome.failures = [replace(result, key=rollout_name(task, run)) for run in runs]
        return outcome

    async def _attempt(
        self,
        task: Task,
        spec: WorkflowSpec,
        runs: list[int],
        model: Model,
        key: Key,
        attempts: list[tuple[float, float]],
    ) -> list[Experience] | Failed:
        """Make one attempt: experiences with their ids, or why there are none. Appends to
        `attempts`.
        """
        name = rollout_name(task, runs[0])
        call = asyncio.create_task(self._call(task.for_rollout(), spec, model, runs))
        seconds = self.limit.seconds
        begun = time.monotonic()
        try:
            await self._wait(call, key[:3], seconds)
            if not call.done():
                whose = "max_timeout" if seconds == self.limit.most else "dynamic_timeout"
                part, place = awaiting(call.get_coro())
                what = part.what if part is not None else spec.label
                alone = what == spec.label
                took = "it took" if alone else "it was not done when the rollout had taken"
                late = f"{took} longer than explorer.{whose} ({seconds:g} s)"
                return Failed(name, "timeout", Fault(what, late, place, lasting=False))
            if call.cancelled():  # cancelled by its own code: this runner has not cancelled it yet
                itself = Fault(spec.label, "it cancelled itself", "", lasting=False)
                return Failed(name, "error", itself)
            return stamp(call.result(), task, runs, spec)
        except Exception as error:  # foreign code: the one place where any exception may occur
            self.engine.health()  # raises: a failed engine is not the workflow's fault
            kind = "empty" if isinstance(error, NoExperience) else "error"
            fault = fault_of(error, spec.label, spec.code)
            assert fault is not None
            return Failed(name, kind, fault, traceback.format_exc())
        finally:
            took = time.monotonic() - begun
            attempts.append((took, min(model.seconds, took)))
            drop(call)
            model.revoke()
            await self.engine.abort(key)

    def _asks_once(self, task: Task, spec: WorkflowSpec, model: Model) -> bool:
        """Return whether a rollout needs no engine after its first reply, nor begins another."""
        together = self.overlap or not spec.one_at_a_time
        scored = self.teacher and not task.is_eval
        return (
            spec.one_call and together and not spec.can_repeat and not (scored or model.auxiliary)
        )

    async def _wait(self, call: asyncio.Task[Any], key: Key, seconds: float) -> None:
        """Wait until the call is done or has used its `seconds`, not counting time at the
        barrier.
        """
        unheld = -self.barrier.held(key) if self.barrier else 0.0
        begun = time.monotonic()
        left = seconds
        while left > 0 and not call.done():
            await ended(call, min(left, HELD_UP_S) if self.barrier else left)
            unnamed = not (call.done() or self.limit.held_up)
            if self.barrier and unnamed and self.barrier.waits_for(key) >= HELD_UP_S:
                self._name_what_holds_up(call, seconds)
            held = self.barrier.held(key) + unheld if self.barrier else 0.0
            left = seconds - (time.monotonic() - begun - held)

    def _name_what_holds_up(self, call: asyncio.Task[Any], seconds: float) -> None:
        """Report, once, a rollout that the engine waits for: it may itself wait for one that waits
        for the engine, and until its time-out nothing else would say so.
        """
        self.limit.held_up = True
        part, place = awaiting(call.get_coro())
        self.log.warning(
            "the engine has computed nothing for %g s, since it waits for the code of %s (so that "
            "the same seed gives the same weights). A lock or semaphore that another rollout holds "
            "while it calls the model opens for nobody before the time-out (%g s): hold none "
            "during a call, or set `deterministic: false`",
            *(HELD_UP_S, "a rollout" if part is None else part.what, seconds),
            extra={"place": place},
        )

    async def _call(
        self, task: Task, spec: WorkflowSpec, model: Model, runs: list[int]
    ) -> list[Experience]:
        """Run the workflow's code, in its own daemon thread if it blocks, and the teacher."""
        with UserCode(spec.label, spec.code) as _:
            if spec.blocking:
                blocking = model.blocking(asyncio.get_running_loop())
                experiences = await in_thread(
                    lambda: spec.call(task, blocking, len(runs), runs[0]),
                    name=f"workflow-{task.task_id}",
                )
            else:
                experiences = await spec.call(task, model, len(runs), runs[0])
        if self.teacher and not task.is_eval:
            teacher = model.auxiliary[0]
            whose = f"the teacher (explorer.auxiliary_models[0], {teacher.model_path})"
            with UserCode(whose) as _:  # a failing teacher is not the workflow's fault
                await scored(experiences, teacher, model, task.raw_task.get(TEACHER_PROMPT))
        return experiences


TEACHER_PROMPT = "teacher_prompt"
"""The column with the prompt that only the teacher reads, in place of the task's prompt."""


async def scored(
    experiences: Sequence[Experience], teacher: Model, model: Model, prompt: Any = None
) -> None:
    """Give each experience that has none the teacher's log-probabilities of its tokens.

    With a `prompt` the teacher reads it in place of the last message that the user of `model` sent
    before the first reply (OPSD, arXiv:2601.18734), with that message's pictures; the tokens after
    it are the same.
    """
    for e in experiences:
        if e.teacher_logprobs is not None:
            continue
        tokens, temperature = e.tokens.tolist(), e.temperature or 1.0
        read, shared = _with_teacher_prompt(model, tokens, prompt) if prompt else ([], 0)
        scores = [*read, *tokens[shared:]]
        if prompt and len(scores) > teacher.max_model_len:
            raise ValueError(
                f"with the row's {TEACHER_PROMPT} it reads {len(scores)} tokens: expected at most "
                f"{teacher.max_model_len} (explorer.auxiliary_models[0].max_model_len)"
            )
        more: Any = {"pictures": e.pictures} if e.pictures else {}
        logprobs = await teacher.logprobs(scores, temperature, **more)
        whole = [*[0.0] * shared, *logprobs[len(read) :]]
        e.teacher_logprobs = torch.tensor(whole, dtype=torch.float32)


def _with_teacher_prompt(model: Model, tokens: list[int], prompt: Any) -> tuple[list[int], int]:
    """Return the token ids of a teacher's prompt, and how many of `tokens` they replace."""
    if not isinstance(prompt, str):
        raise ValueError(f"the row's {TEACHER_PROMPT} is {prompt!r:.60}: expected text")
    roots = [call for call in model.recorder if call.parent is None and call.messages]
    mine = [call for call in roots if tokens[: len(call.inserted)] == call.inserted]
    asked = roots[0].messages or [] if roots else []
    users = [at for at, message in enumerate(asked) if message["role"] == "user"]
    if (
        not mine
        or not users
        or (mine[-1].messages or [])[: users[-1] + 1] != asked[: users[-1] + 1]
    ):
        raise ValueError(
            f"the row has a {TEACHER_PROMPT}, and the rollout no recorded conversation with the "
            "prompt that it stands for: expected a workflow that keeps its first messages"
        )
    messages = [*(mine[-1].messages or [])]
    messages[users[-1]] = with_text(messages[users[-1]], prompt)
    return model.chat_tokens.prompt(messages, mine[-1].tools).ids, len(mine[-1].inserted)


def _in_one_line(name: str, experiences: Sequence[Experience]) -> str:
    # one for the whole group is given once all its rollouts have ended
    rewards = ", ".join(
        "to come" if e.reward is None else f"{e.reward:.3g}" for e in experiences[:8]
    )
    more = " …" if len(experiences) > 8 else ""
    sampled = sum(e.trained_tokens for e in experiences)
    return f"{name}: reward {rewards}{more}, {sampled} tokens sampled"


async def judge(
    outcome: Outcome, spec: WorkflowSpec, seconds: float, models: Sequence[Any] = ()
) -> None:
    """Have the rollouts of a task judged together; if that fails, all of them have failed."""
    if spec.judge is None or not outcome.experiences:
        return
    rewards, whose = spec.judge, f"the rewards of {spec.label}"

    async def judged() -> None:
        with UserCode(whose, spec.code) as _:
            away = partial(in_thread, name="judge")
            await call_user(rewards, outcome.task, outcome.experiences, models, away=away)
            for e in outcome.experiences:
                if e.reward is not None:
                    e.reward = number(e.reward, f"{whose} gave", WrongExperience)

    call, kind, trace = asyncio.create_task(judged()), "error", ""
    try:
        await ended(call, seconds)
        if call.cancelled():  # by its own code
            fault = Fault(whose, "they cancelled themselves", "", lasting=False)
        elif call.done():
            call.result()
            return
        else:
            part, place = awaiting(call.get_coro())
            what = part.what if part is not None else whose
            took = "they took" if what == whose else "it was not done when the rewards had taken"
            text = f"{took} longer than explorer.max_timeout ({seconds:g} s)"
            kind, fault = "timeout", Fault(what, text, place, lasting=False)
    except Exception as error:  # foreign code, as in Runner
        fault, trace = fault_of(error, whose), traceback.format_exc()
    finally:
        drop(call)  # it may go on: code that swallows its end is not waited for
    assert fault is not None
    failures = [
        Failed(rollout_name(outcome.task, run), kind, fault, trace)
        for run in sorted({e.eid.run for e in outcome.experiences})
    ]
    logger.warning("%s\n%s", failures[0], trace, extra=FILE_ONLY)
    outcome.failures += failures
    outcome.experiences = []


class BatchOrder(tuple[int | str, ...]):
    """A batch's id, and the explorer's name if there are several, in a form that sorts: training
    before evaluation of the same step. As a text it is a name: step, taskset and explorer.
    """

    __slots__ = ()

    def __str__(self) -> str:
        step, _, *names = self
        return "/".join(str(part) for part in (step, *names) if part != "")


def batch_order(task: Task, *explorer: str) -> BatchOrder:
    """Return where a task's batch comes among others."""
    step, _, name = str(task.batch_id).partition("/")
    return BatchOrder((int(step), int(bool(name)), name, *explorer))


def rollout_name(task: Task, run: int) -> str:
    """Name a rollout in messages: batch/task/run."""
    return f"{task.batch_id}/{task.task_id}/{run}"


def is_apart(experience: Experience, task: Task) -> bool:
    """Return True if the experience is in a group that a repeatable workflow made besides the
    task's.
    """
    return str(experience.eid.task).startswith(f"{task.task_id}-")


_stamped: WeakSet[Experience] = WeakSet()


def stamp(
    experiences: list[Experience], task: Task, runs: list[int], spec: WorkflowSpec
) -> list[Experience]:
    """Set each experience's id: batch and task from the task; run from the runner, or from the
    workflow if it repeats itself; step from the workflow if its steps differ, else by position.

    A repeatable workflow that sets `eid.task` to `<task_id>-<word>` makes a separate group of
    those. Raises WrongExperience for one that another rollout has returned.
    """
    for place, e in enumerate(experiences):
        if e in _stamped:  # its reward counts where it came first, and its id is in use
            raise WrongExperience(
                f"{spec.label} returned an experience (place {place}) that rollout {e.eid.rid} has "
                "returned before: expected only those of its own; a list that is made once, as an "
                "attribute of a class, a default argument or a global, has those of all rollouts"
            )
    _stamped.update(experiences)
    by_run: dict[tuple[int | str, int], list[Experience]] = {}
    shown = task.for_people()
    for e in experiences:
        separate = spec.can_repeat and is_apart(e, task)
        run = e.eid.run if spec.can_repeat else runs[0]
        by_run.setdefault((e.eid.task if separate else task.task_id, run), []).append(e)
    assert {run for _, run in by_run} <= set(runs), "the workflow's adapter checks run ids"
    for (group, run), mine in by_run.items():
        steps: Sequence[int] = [e.eid.step for e in mine]
        if len(set(steps)) < len(mine):
            steps = range(len(mine))
        for e, step in zip(mine, steps, strict=True):
            e.eid = EID(task.batch_id, group, run, step)
            e.info.setdefault("model_version", e.version)
            if group == task.task_id:
                e.info["task_index"] = dict(task.index)
                e.info = shown | e.info
    return experiences


def drop(call: asyncio.Future[Any]) -> None:
    """Cancel a call whose result is no longer awaited, and ignore what it still raises, or has
    raised when its rollout was cancelled.
    """
    if call.done():
        _ = call.cancelled() or call.exception()  # else asyncio prints it
    else:
        call.add_done_callback(lambda late: late.cancelled() or late.exception())
        call.cancel()
