"""Explorer: tries batch after batch of tasks and puts the resulting experiences into the buffer.

Invariants:
- A step's experiences are put once, whole groups, with their advantages, or the step is run again
  after a resume, under the same ids; `state` names the first step that is not in the buffer yet.
- Evaluation uses the weights of its step's window and puts nothing into the buffer.
- A step in which every rollout failed stops the run with the first cause.
- Steps are put in order, each as soon as it has finished, while later ones are still running.
- A resume begins with the synchronization that its last step may have missed.
"""

from __future__ import annotations

import asyncio
import copy
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.buffer.buffer import Closed, Puts
from trireme.checkpoint.layout import JobFolder
from trireme.checkpoint.manifest import MOST_BYTES
from trireme.data.tasksets import Exhausted, Mixture, Taskset
from trireme.experience import Experience
from trireme.explorer.metrics import (
    Feedback,
    Lost,
    by_cause,
    evaluation_metrics,
    failure_sentence,
    rollout_metrics,
)
from trireme.explorer.runner import Failed, Outcome
from trireme.explorer.scheduler import Scheduler
from trireme.files import Unreadable, read_json, write_json
from trireme.log import get_logger
from trireme.monitor.events import Emit, Evaluated, Failures, RolloutDone, StepDone
from trireme.monitor.figures import in_words, reply_text, turns_of
from trireme.pipeline.operators import pass_rates
from trireme.pipeline.pipeline import Pipeline, left_out_by
from trireme.sync.synchronizer import ExplorerSync
from trireme.task import Task, no_effect, without_effect
from trireme.usercode import with_place

logger = get_logger("explorer")

MOST_EXAMPLES, MOST_TEXT = 64, 2000
"""Held-out tasks that are kept for the end of a run, and the characters of a text of each."""
_RATE_STEPS = 4
"""Steps that tokens a second are counted over: of some that are under way together, all end at
once, and one of them alone has no rate."""
LONG_WAIT_S = 5.0
"""Seconds of a step that an engine may wait for workflows' code without a warning."""

Evaluation = dict[str, dict[str, float]]


class RolloutsFailed(RuntimeError):
    """Too many rollouts failed for the run to continue."""

    def __init__(self, sentence: str, trace: str = "") -> None:
        """`trace` is the traceback of the first failure, for the log alone."""
        super().__init__(sentence, trace)
        self.trace = trace

    def __str__(self) -> str:
        return self.args[0]


class NothingToTrain(RuntimeError):
    """Operators or the algorithm dropped every experience of a run."""


@dataclass(frozen=True)
class ExplorerSettings:
    """The settings of an explorer."""

    name: str = "explorer"
    """Part of the ids of its experiences, where several explorers share a store."""
    eval_interval: int = 0
    """Explore steps from one evaluation to the next; 0: none between steps."""
    eval_on_startup: bool = False
    eval_prefix: str = "eval"
    """The name of evaluations in events."""
    max_failures: float = 1.0
    """The share of a step's rollouts that may fail before the run stops."""
    max_pending: int = 1 << 30
    """How many steps may run at once."""
    notes: Sequence[str] = ()
    """The plan's notes: they were shown before the run, which does not repeat them."""


class Explorer:
    """Taskset.next ▸ Scheduler.submit ▸ results ▸ Pipeline.run ▸ Buffer.put, step after step."""

    def __init__(
        self,
        *,
        taskset: Taskset | Mixture | None,
        eval_tasksets: Sequence[Taskset],
        scheduler: Scheduler,
        pipeline: Pipeline,
        buffer: Puts | None,
        sync: ExplorerSync,
        settings: ExplorerSettings,
        emit: Emit,
        folder: JobFolder | None = None,
    ) -> None:
        """`emit` receives an event for each step, a sample rollout, failures and evaluations.

        Explorers without taskset and buffer only evaluate. An explorer that runs without a trainer
        saves its own state in `folder` after every step.
        """
        self.taskset = taskset
        self.eval_tasksets = list(eval_tasksets)
        self.scheduler = scheduler
        self.pipeline = pipeline
        self.buffer = buffer
        self.sync = sync
        self.settings = settings
        self.emit = emit
        self.folder = folder
        self.step = 0
        self.first_evaluation: Evaluation | None = None
        self.last_evaluation: Evaluation | None = None
        self.first_examples: list[dict[str, Any]] = []
        """The first tasks of the first evaluation taskset, each with a rollout."""
        self.last_examples: list[dict[str, Any]] = []
        self.seconds = {"explore": 0.0, "evaluate": 0.0}
        self.feedback = Feedback()
        self._lost = Lost()
        self._pending: list[int] = []
        self._before: dict[int, dict[str, Any]] = {}
        self._started: dict[int, float] = {}
        self._evaluation_started: dict[int, float] = {}
        self._fresh = True
        """Whether nothing has been put into the buffer yet, by this process or an earlier one."""
        self._unkept: list[dict[str, float]] = []
        """The pipeline's metrics of the steps that left no experience to put."""
        self._last_end = 0.0
        self._engine_wait = 0.0
        """How much of the scheduler's belongs to the steps and evaluations so far."""
        self._has_waited_long = False
        self._examined: set[tuple[bool, Any]] = set()
        """Tasksets whose `workflow_args` were looked at."""
        self._lately: deque[tuple[int, float]] = deque(maxlen=_RATE_STEPS)
        """The sampled tokens and the seconds of the last steps."""
        self._submitted = asyncio.Event()
        self._collected = asyncio.Event()

    async def explore(self) -> None:
        """Explore until the taskset is exhausted or the trainer stops asking."""
        assert self.taskset is not None and self.buffer is not None
        self.scheduler.start()
        self._load_own_state()
        collector = asyncio.create_task(self._collect())
        try:
            if self.settings.eval_on_startup and self.step == 0:
                await self.evaluate(0)
            if self.step and self.sync.due(self.step):
                await self.sync.pull(self.step)
            while not self.sync.finished and await self._begin_step():
                await self._ended(collector, most=self.settings.max_pending - 1)
                if self.sync.due(self.step):
                    self.feedback.release(self.step)
                    await self._ended(collector)
                    await self.sync.pull(self.step)
            await self._ended(collector)
            if self._unkept and self._fresh:
                raise NothingToTrain(left_out_by(self._unkept))
        except Closed:
            logger.info("the trainer has had enough: exploring ends at step %d", self.step)
            # No train step takes the running steps: they must not delay the last evaluation.
            await self.scheduler.close()
        except Exception as error:
            # No await from here on: the trainer learns of the end through the buffer and must not
            # end first.
            await self.buffer.fail(error)
            raise
        finally:
            collector.cancel()
        if self._lost.causes:
            logger.warning("%s", self._lost)
        await self.buffer.close()

    async def evaluate(self, step: int) -> Evaluation:
        """Run all evaluation tasksets with the current weights; returns metrics by taskset name."""
        self.scheduler.start()
        started = time.monotonic()
        await self._submit_evaluation(step)
        evaluation = await self._finish_evaluation(step)
        self.seconds["evaluate"] += time.monotonic() - started
        return evaluation

    async def evaluate_last(self, step: int) -> None:
        """Run the final evaluation, with the final weights."""
        if self.eval_tasksets:
            await self.evaluate(step)

    async def close(self) -> None:
        """End the runners and release the operators."""
        await self.scheduler.close()
        await self.pipeline.close()

    def state(self, *, putting: bool = False) -> dict[str, Any]:
        """Return the state to resume from: the first step whose experiences are not in the buffer
        yet.

        `putting`: the state as it will be once the step that is being put is there.
        """
        assert self.taskset is not None
        pending = list(self._before)[putting:]  # with the step that is being submitted
        state = dict(self._before[pending[0]]) if pending else self._state_now()
        if self.pipeline.resampling is not None:
            state["resampling"] = self.pipeline.resampling.state(putting=putting)
        if pending and "feedback" in state:  # the feedback known then, and what has arrived since
            upto = {"upto": state["feedback"]["upto"]}
            state["feedback"] = self.feedback.state(pending[0]) | upto
        return state

    def load_state(self, state: dict[str, Any], waiting: int | None = None) -> None:
        """Restore what `state` returned; `waiting` experiences are in the buffer."""
        assert self.taskset is not None
        self.step = state["step"]
        self._fresh = not self.step
        self.taskset.load_state(state["taskset"])
        if "feedback" in state:
            self.feedback.load_state(state["feedback"])
        if self.pipeline.resampling is not None and "resampling" in state:
            self.pipeline.resampling.load_state(state["resampling"], waiting)

    def _state_now(self) -> dict[str, Any]:
        assert self.taskset is not None
        state: dict[str, Any] = {"step": self.step, "taskset": self.taskset.state()}
        return state | ({"feedback": self.feedback.state()} if self.taskset.learns else {})

    async def _begin_step(self) -> bool:
        assert self.taskset is not None
        for rates in self.feedback.take(self.step + 1):
            self.taskset.feedback(rates)
        before = self._state_now()
        try:
            tasks = self.taskset.next()
        except Exhausted:
            return False
        self.step += 1
        self._before[self.step] = before
        self._started[self.step] = time.monotonic()
        await self.scheduler.submit(self.step, tasks)
        if self._evaluates(self.step):
            await self._submit_evaluation(self.step)
        self._pending.append(self.step)
        self._submitted.set()
        return True

    def _evaluates(self, step: int) -> bool:
        return self.settings.eval_interval > 0 and step % self.settings.eval_interval == 0

    async def _collect(self) -> None:
        """Finish every step and its evaluation, in order; never returns."""
        while True:
            while self._pending:
                step = self._pending[0]
                await self._finish_step(step)
                self._pending.remove(step)
                if self.sync.pushes_by_itself:  # no synchronization comes that releases them
                    self.feedback.release(step)
                if self.pipeline.resampling is not None:
                    self.pipeline.resampling.put()
                del self._before[step]
                self.feedback.forget(min(self._before, default=self.step))
                self._keep_own_state()
                self._collected.set()
            self._submitted.clear()
            await self._submitted.wait()

    async def _ended(self, collector: asyncio.Task[None], most: int = 0) -> None:
        """Wait until at most `most` steps are running. Raises what the collector has raised."""
        while len(self._pending) > most and not collector.done():
            self._collected.clear()
            one_more = asyncio.ensure_future(self._collected.wait())
            await asyncio.wait({one_more, collector}, return_when=asyncio.FIRST_COMPLETED)
            one_more.cancel()
        if collector.done():
            await collector

    async def _finish_step(self, step: int) -> None:
        """Results ▸ pipeline ▸ buffer, and the step's metrics."""
        outcomes = await self.scheduler.results(step)
        elapsed = time.monotonic() - max(self._started.pop(step), self._last_end)
        self._last_end = time.monotonic()
        self.seconds["explore"] += elapsed
        waited = self._look_at_engine_wait(step, elapsed)
        self._look_at_failures(f"step {step}", outcomes, self.settings.max_failures)
        self._look_at_arguments(f"step {step}", outcomes)
        if self._evaluates(step):
            # Before `put`: the trainer may change shared weights as soon as it has a batch.
            await self._finish_evaluation(step)
        experiences = [e for outcome in outcomes for e in outcome.experiences]
        if self.settings.name != "explorer":
            for experience in experiences:
                experience.eid.batch = f"{step}/{self.settings.name}"
        metrics = rollout_metrics(outcomes)
        metrics["rollout/dropped_tasks"] = float(self.scheduler.dropped_tasks)
        sampled = sum(e.trained_tokens for e in experiences)
        self._lately.append((sampled, elapsed))
        rate = sum(n for n, _ in self._lately) / max(sum(s for _, s in self._lately), 1e-9)
        metrics |= {"time/explore": elapsed, "perf/tokens_per_s": rate}
        metrics |= waited
        if shown := _to_show(outcomes):
            self.emit(RolloutDone(shown))
        taught = self.taskset if self.taskset is not None and self.taskset.learns else None
        own = pass_rates(experiences) if taught is not None else {}  # operators change rewards
        kept, more = await self.pipeline.run(experiences, sizes=taught.sizes if taught else None)
        if taught is not None:
            rates = self.pipeline.pass_rates
            self.feedback.add(step, own if rates is None else rates)
        shown = in_words(metrics, "training")
        logger.info("step %d: %d rollouts in %.2f s  %s", step, len(experiences), elapsed, shown)
        self.emit(StepDone("explorer", step, metrics | more | self.sync.metrics()))
        if kept:
            assert self.buffer is not None
            self._fresh = False
            await self.buffer.put(kept)
        elif self._fresh:
            self._unkept.append(more)

    def _look_at_engine_wait(self, step: int, elapsed: float) -> dict[str, float]:
        """Return how long the engine waited for rollouts' own code in a step, as a metric; report
        the first time that it was long.
        """
        if (total := self.scheduler.engine_wait) is None:
            return {}
        waited, self._engine_wait = total - self._engine_wait, total
        if waited > max(LONG_WAIT_S, elapsed / 2) and not self._has_waited_long:
            self._has_waited_long = True
            logger.warning(
                "step %d: the engine waited %.0f of %.0f s for the code of workflows and rewards, "
                "so that the same seed gives the same weights. If a rollout calls the model once, "
                "declare `one_call = True` in the workflow's class, or as an attribute of its "
                "function; else `deterministic: false` ends the waiting",
                step, waited, elapsed,
            )  # fmt: skip
        return {"time/engine_wait": waited}

    def _look_at_failures(self, when: str, outcomes: Sequence[Outcome], limit: float) -> None:
        """Report once per cause how many rollouts failed of it. Raise if there are too many."""
        failures = [failed for outcome in outcomes for failed in outcome.failures]
        if failures:
            lines = [failure_line(one, o.task) for o in outcomes for one in o.failures]
            self.emit(Failures(lines))
        wanted = sum(outcome.task.repeat_times for outcome in outcomes)
        causes = by_cause(failures)
        if failures:
            first, *_ = worst = max(causes.values(), key=len)
            none_left = not any(outcome.experiences for outcome in outcomes)
            if none_left or len(failures) > limit * wanted:
                most = "" if none_left else f" (explorer.max_failures is {limit:g})"
                sentence = with_place(
                    failure_sentence(worst, wanted, when, most), first.fault.place
                )
                raise RolloutsFailed(sentence, first.trace)
        for cause, failed in causes.items():
            if cause not in self._lost.causes:
                line = failed[0].fault.place
                text = failure_sentence(
                    failed, wanted, when
                )  # text differs: repeats of one are not shown
                logger.warning(f"{text} ({line})" if line else text)
        self._lost.add(wanted, causes)

    def _look_at_arguments(self, when: str, outcomes: Sequence[Outcome]) -> None:
        """Report keys of `workflow_args` without an effect, once for each taskset, unless a note of
        the plan has.
        """
        by_taskset: dict[tuple[bool, Any], list[Task]] = {}
        for outcome in outcomes:
            task = outcome.task
            taskset = task.is_eval, task.index.get("taskset_id")
            if outcome.experiences and taskset not in self._examined:
                by_taskset.setdefault(taskset, []).append(task)
        self._examined.update(by_taskset)
        mixed = self.taskset.tasksets if isinstance(self.taskset, Mixture) else [self.taskset]
        each = [(False, one) for one in mixed] + [(True, one) for one in self.eval_tasksets]
        names = {(is_eval, one.taskset_id): one.name for is_eval, one in each if one is not None}
        for taskset, tasks in by_taskset.items():
            for key, near in without_effect(tasks).items():
                noted = no_effect(names.get(taskset, ""), key)
                if any(note.startswith(noted) for note in self.settings.notes):
                    continue  # with another hint, perhaps
                hint = f": did you mean '{near}'?" if near else ""
                logger.warning(
                    "%s: no workflow has read workflow_args.%s, so that it has no effect%s",
                    when, key, hint,
                )  # fmt: skip

    async def _submit_evaluation(self, step: int) -> None:
        self._evaluation_started[step] = time.monotonic()
        for taskset in self.eval_tasksets:
            await self.scheduler.submit(f"{step}/{taskset.name}", taskset.all())

    async def _finish_evaluation(self, step: int) -> Evaluation:
        evaluation, examples = {}, list[dict[str, Any]]()
        started = self._evaluation_started.pop(step)
        for taskset in self.eval_tasksets:
            outcomes = await self.scheduler.results(f"{step}/{taskset.name}")
            metrics = evaluation_metrics(outcomes, repeat_times=taskset.repeat_times)
            when = f"evaluation '{taskset.name}' at step {step}"
            self._look_at_failures(when, outcomes, limit=1.0)
            self._look_at_arguments(when, outcomes)
            evaluation[taskset.name] = metrics
            examples = examples or _examples(outcomes)
            prefix = self.settings.eval_prefix
            named = {f"{prefix}/{taskset.name}/{k}": v for k, v in metrics.items()}
            seconds = time.monotonic() - started
            named[f"{prefix}/{taskset.name}/seconds"] = seconds
            shown = in_words(metrics, "evaluation")
            logger.info("evaluation '%s' at step %d: %s", taskset.name, step, shown)
            rollouts = [e for o in outcomes for e in o.rollouts]
            self.emit(Evaluated(prefix, step, named, rollouts))
        if self.first_evaluation is None and step == 0:
            self.first_evaluation, self.first_examples = evaluation, examples
        self.last_evaluation, self.last_examples = evaluation, examples
        self._engine_wait = self.scheduler.engine_wait or 0.0
        return evaluation

    def _load_own_state(self) -> None:
        """Resume from the state of an explorer that runs without a trainer."""
        if self.folder is not None and os.path.lexists(self.folder.state_of(self.settings.name)):
            state = explorer_state(self.folder.state_of(self.settings.name))
            self.step = state["step"]
            if state["taskset"]:  # if empty, a server was the explorer so far
                self.load_state(state)

    def _keep_own_state(self) -> None:
        """Save the state, after the step's experiences are safe in another process's store."""
        if self.folder is not None:
            state = self.state()
            meta = {"latest_iteration": state.pop("step"), "taskset_states": [state.pop("taskset")]}
            write_json(self.folder.state_of(self.settings.name), meta | state)


def explorer_state(path: Path) -> dict[str, Any]:
    """Read the state that an explorer without a trainer saved to `path`."""
    meta = read_json(path, dict, MOST_BYTES)
    step, states = meta.get("latest_iteration"), meta.get("taskset_states")
    if not isinstance(step, int) or not isinstance(states, list):
        raise Unreadable(f"{path} does not say how far the explorer is: expected what it wrote")
    feedback = {key: meta[key] for key in ("feedback",) if key in meta}
    return {"step": step, "taskset": states[0] if states else {}, **feedback}


def _examples(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return prompt, reply and reward of a rollout of each of the first tasks, with the number of
    the task.
    """
    out: list[dict[str, Any]] = []
    for number, outcome in enumerate(outcomes[:MOST_EXAMPLES]):
        if not outcome.experiences:
            continue
        task, shown = outcome.task, outcome.experiences[-1]
        prompt = task.prompt if isinstance(task.prompt, str) else turns_of(shown)[0][1]
        out.append(
            {
                "task": number,
                "prompt": prompt[:MOST_TEXT],
                "truth": None if task.truth is None else str(task.truth)[:MOST_TEXT],
                "reply": reply_text(shown)[:MOST_TEXT],
                "reward": shown.reward,
                "temperature": shown.temperature,
            }
        )
    return out


def failure_line(failed: Failed, task: Task) -> dict[str, Any]:
    """Describe a failed rollout for the table that people read."""
    return {
        "eid": f"{failed.key}/0",
        "step": int(str(task.batch_id).partition("/")[0]),
        "reward": None,
        "prompt": task.prompt if isinstance(task.prompt, str) else None,
        "response": None,
        "prompt_length": 0,
        "info": {"task_index": dict(task.index)} | task.for_people(),
        "failure": {
            "kind": failed.kind,
            "what": failed.fault.what,
            "message": failed.fault.text,
            "place": failed.fault.place,
            "trace": failed.trace[-4000:],
        },
    }


def _to_show(outcomes: Sequence[Outcome]) -> Experience | None:
    """Return the last experience of a rollout, with the task's truth."""
    outcome = next((one for one in outcomes if one.experiences), None)
    if outcome is None:
        return None
    shown = copy.copy(outcome.experiences[-1])
    truth = outcome.task.truth
    if truth is not None:
        shown.info = {**shown.info, "truth": f"{truth!r:.120} ({type(truth).__name__})"}
    return shown
