"""Runner: whatever a workflow does, n rollouts are n run ids or failures that are counted."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from tests.explorer.made import (
    TOKENIZER,
    BrokenEngine,
    Models,
    ask,
    make_runner,
    run,
    scripted,
    task,
)
from tests.limits import HANG_S
from tests.model.fake import user
from trireme.engines.barrier import RolloutBarrier
from trireme.engines.scripted import ScriptedEngine
from trireme.experience import EID, Experience
from trireme.explorer import runner as runner_module
from trireme.explorer.metrics import rollout_metrics
from trireme.explorer.runner import Outcome, batch_order, drop
from trireme.model.model import Revoked
from trireme.workflows.classes import Workflow
from trireme.workflows.single_turn import SimpleWorkflow
from trireme.workflows.workflow import resolve


def outcome_of(workflow: Any, *, runs: int = 1, **options: Any) -> Outcome:
    """What `runs` rollouts of a workflow come to."""

    async def main() -> Outcome:
        one = task(workflow, repeat_times=runs)
        return await make_runner(**options).run(one, resolve(workflow), range(runs))

    return run(main())


class Blocking(Workflow):
    """Asks once, in a thread."""

    def run(self) -> list[Experience]:
        reply = self.model.chat([{"role": "user", "content": self.task_desc}])[0]
        reply.reward = float(reply.response_text == self.truth)
        return [reply]


class Loops(Blocking):
    """Loops over its own and its task's repeat_times, as some users do."""

    def run(self) -> list[Experience]:
        times = max(self.repeat_times, self.task.repeat_times)
        return [e for _ in range(times) for e in super(Loops, self).run()]


class Repeats(Workflow):
    """Gives all runs of a call by itself."""

    can_repeat = True

    def run(self) -> list[Experience]:
        replies = self.model.chat([{"role": "user", "content": "?"}], n=self.repeat_times)
        for reply in replies:
            reply.reward = 1.0
        return replies


class WrongRuns(Repeats):
    """Forgets which run ids it was given."""

    def run(self) -> list[Experience]:
        replies = super().run()
        for place, reply in enumerate(replies):
            reply.eid = EID(run=place + 7)
        return replies


@pytest.mark.parametrize("workflow", [ask, Blocking, Loops, Repeats])
def test_n_rollouts_are_n_run_ids(workflow: Any) -> None:
    outcome = outcome_of(workflow, runs=4)
    assert [e.eid for e in outcome.experiences] == [EID(1, 0, i, 0) for i in range(4)]
    assert [e.reward for e in outcome.experiences] == [1.0] * 4
    first = outcome.experiences[0]
    assert first.info["model_version"] == 0 and first.info["task_index"] == {"index": 0}
    assert not outcome.failures


def test_a_repeatable_workflow_that_gets_later_runs_gives_these() -> None:
    async def main() -> Outcome:
        return await make_runner().run(task(Repeats), resolve(Repeats), [4, 5, 6])

    assert [e.eid.run for e in run(main()).experiences] == [4, 5, 6]


@pytest.mark.parametrize(
    ("own", "stamped"), [([0, 0, 0], [0, 1, 2]), ([2, 0, 0], [0, 1, 2]), ([5, 3, 4], [5, 3, 4])]
)
def test_steps_are_the_workflows_own_where_they_differ(own: list[int], stamped: list[int]) -> None:
    async def several(task: Any, model: Any) -> list[Experience]:
        return [Experience([1, 2], prompt_length=1, eid=EID(step=step)) for step in own]

    assert [e.eid.step for e in outcome_of(several).experiences] == stamped


def test_the_calls_of_a_run_are_numbered_as_its_steps() -> None:
    async def steps(task: Any, model: Any) -> list[Experience]:
        for _ in range(3):
            await model.chat([{"role": "user", "content": "again"}])
        return model.experiences(reward=[0.0, 0.5, 1.0])

    found = [(e.eid.run, e.eid.step, e.reward) for e in outcome_of(steps, runs=2).experiences]
    assert found == [(r, s, s / 2) for r in range(2) for s in range(3)]


@pytest.mark.parametrize("max_retries", [0, 1])
def test_what_a_workflow_does_to_its_row_stays_in_its_rollout(max_retries: int) -> None:
    async def grows(task: Any, model: Any) -> list[Experience]:
        chat, again = task.prompt, task.raw_task.setdefault("again", "Again?")
        chat.append((await model.chat(chat)).message)
        task.workflow_args["tried"].append(again)
        task.raw_task["again"] += "!"
        chat.append(user(again))
        await model.chat(chat)
        if len(model.key) == 3 and max_retries:
            raise ValueError("no luck in the first attempt")
        return model.experiences(reward=len(chat), tried=len(task.workflow_args["tried"]))

    async def main() -> Outcome:
        own = {"raw_task": {"prompt": [user("6 x 7?")]}, "workflow_args": {"tried": []}}
        one = replace(task(grows), **own)
        outcome = await make_runner(max_retries=max_retries).run(one, resolve(grows), [1, 2, 3])
        assert {"raw_task": one.raw_task, "workflow_args": one.workflow_args} == own
        return outcome

    outcome = run(main())
    assert [e.reward for e in outcome.experiences] == [3.0] * 3
    assert [e.metrics["tried"] for e in outcome.experiences] == [1.0] * 3
    assert all("Again?!" not in str(e.prompt_text) for e in outcome.experiences)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_reply_in_two_experiences_fails_the_rollout(goes_on: bool) -> None:
    async def twice(task: Any, model: Any) -> list[Experience]:
        reply = await model.chat([user("one?")])
        early = model.experiences(reward=0.5)
        await model.chat([user("one?"), reply.message, user("two?")] if goes_on else [user("two?")])
        return early + model.experiences(reward=1.0)

    def both(task: Any, model: Any) -> list[Experience]:
        return model.chat([user("one?")]) + model.experiences(reward=1.0)

    for workflow in (twice, both):
        [failure] = outcome_of(workflow, max_retries=1).failures
        assert "returned one reply of the model in two experiences (places 0 and 1)" in str(failure)
        assert failure.fault.lasting


def test_replies_may_be_looked_at_before_they_are_returned() -> None:
    async def looks(task: Any, model: Any) -> list[Experience]:
        await model.chat([user("one?")])
        tokens = sum(e.trained_tokens for e in model.experiences())
        first, *_ = model.experiences(per_call=True)
        await model.chat([user("two?")], n=1)
        return model.experiences(reward=[1.0, 0.5], tokens=tokens + first.trained_tokens)

    outcome = outcome_of(looks)
    assert [e.reward for e in outcome.experiences] == [1.0, 0.5] and not outcome.failures


def test_a_thread_that_hangs_is_told_by_its_line() -> None:
    hold = threading.Event()

    def hangs(task: Any, model: Any) -> list[Experience]:
        hold.wait(HANG_S)
        return []

    [failure] = outcome_of(hangs, max_timeout=0.2).failures
    hold.set()
    assert failure.kind == "timeout" and failure.fault.what == "workflow 'hangs'"
    assert failure.fault.place.endswith(": hold.wait(HANG_S)")


class NoWords(Exception):
    """An error whose own text fails."""

    def __str__(self) -> str:
        return self.message  # type: ignore[attr-defined]


def test_an_error_whose_text_fails_is_a_failure_like_others() -> None:
    async def raises(task: Any, model: Any) -> list[Experience]:
        raise NoWords

    [failure] = outcome_of(raises).failures
    assert failure.message == "NoWords: its __str__ raised AttributeError"
    assert "test_runner.py" in failure.fault.place and "raise NoWords" in failure.fault.place


def test_the_first_error_of_a_group_is_the_cause() -> None:
    async def together(task: Any, model: Any) -> list[Experience]:
        async with asyncio.TaskGroup() as group:
            group.create_task(model.chat([user("?")], tempature=1.0))
            group.create_task(model.chat([user("?")], temperature="hot"))
        return model.experiences(reward=1.0)

    async def nested(task: Any, model: Any) -> list[Experience]:
        async def looks() -> None:
            task.raw_task["price"]

        async with asyncio.TaskGroup() as group:
            group.create_task(looks())
        return model.experiences(reward=1.0)

    [failure] = outcome_of(together).failures
    assert failure.message.startswith("ValueError: sampling has no option 'tempature': did you")
    assert failure.message.endswith("(the first error of a group: unhandled errors in a TaskGroup "
                                    "(2 sub-exceptions))")  # fmt: skip
    assert "async with asyncio.TaskGroup()" in failure.fault.place
    [failure] = outcome_of(nested, max_retries=2).failures
    assert failure.message.startswith("the row has no 'price'") and failure.fault.lasting
    assert 'task.raw_task["price"]' in failure.fault.place


class Collects(Workflow):
    """Has one list for all of its objects."""

    found: ClassVar[list[Experience]] = []

    def run(self) -> list[Experience]:
        self.model.chat([{"role": "user", "content": "?"}])
        self.found.extend(self.model.experiences(reward=float(len(self.found))))
        return self.found


def test_a_list_that_all_rollouts_share_gives_each_experience_once() -> None:
    Collects.found.clear()
    outcome = outcome_of(Collects, runs=3, max_retries=2)
    [first] = outcome.experiences
    assert (first.eid, first.reward) == (EID(1, 0, 0, 0), 0.0)
    assert [f.key for f in outcome.failures] == ["1/0/1", "1/0/2"] and not outcome.retries
    for failed in outcome.failures:
        assert failed.message.startswith(
            "returned an experience (place 0) that rollout 1/0/0 has returned before: expected"
        )
        assert "test_runner.py" in failed.fault.place


async def _raises(task: Any, model: Any) -> Any:
    raise KeyError("answer")


async def _exits(task: Any, model: Any) -> Any:
    sys.exit(0)


async def _interrupts(task: Any, model: Any) -> Any:
    raise KeyboardInterrupt


async def _is_closed(task: Any, model: Any) -> Any:
    raise GeneratorExit("enough")


class Panic(BaseException):
    """As the tokenizers' Rust code raises it."""


def _panics(task: Any, model: Any) -> Any:
    raise Panic("index out of bounds")


def _exits_in_a_thread(task: Any, model: Any) -> Any:
    sys.exit(0)


def _stops_iteration(task: Any, model: Any) -> Any:
    return next(iter(()))


async def _cancels_itself(task: Any, model: Any) -> Any:
    raise asyncio.CancelledError


async def _gives_nothing(task: Any, model: Any) -> Any:
    return []


async def _gives_none(task: Any, model: Any) -> Any:
    return None


def _gives_numbers(task: Any, model: Any) -> Any:
    return [1.0]


@pytest.mark.parametrize(
    ("workflow", "kind", "message"),
    [
        (_raises, "error", "KeyError: 'answer'"),
        (_exits, "error", "SystemExit: 0"),
        (_exits_in_a_thread, "error", "SystemExit: 0"),
        (_interrupts, "error", "KeyboardInterrupt"),
        (_is_closed, "error", "GeneratorExit: enough"),
        (_panics, "error", "Panic: index out of bounds"),
        (_stops_iteration, "error", "RuntimeError: raised StopIteration()"),
        (_cancels_itself, "error", "it cancelled itself"),
        (_gives_nothing, "empty", "returned no experience"),
        (_gives_none, "error", "returned None: expected a list of Experience"),
        (_gives_numbers, "error", "a list with float at place 0: expected Experience"),
        (WrongRuns, "error", "returned the runs [7, 8]: expected [0, 1]"),
    ],
)
def test_what_a_workflow_does_wrong_is_a_failure_of_each_run(
    workflow: Any, kind: str, message: str
) -> None:
    outcome = outcome_of(workflow, runs=2)
    assert [(f.key, f.kind) for f in outcome.failures] == [("1/0/0", kind), ("1/0/1", kind)]
    assert message in outcome.failures[0].message and not outcome.experiences
    metrics = rollout_metrics([outcome])
    assert metrics["rollout/failed"] == metrics[f"rollout/failed/{kind}"] == 2


def test_a_failure_keeps_the_users_own_lines() -> None:
    trace = outcome_of(_raises).failures[0].trace
    assert 'raise KeyError("answer")' in trace and "test_runner.py" in trace


def test_a_coroutine_that_hangs_times_out_and_its_model_is_revoked() -> None:
    models = Models(scripted())

    async def hangs(task: Any, model: Any) -> Any:
        await asyncio.sleep(60)

    outcome = outcome_of(hangs, models=models, max_timeout=0.05)
    assert outcome.failures[0].kind == "timeout"
    assert "'hangs' failed: it took longer than explorer.max_timeout (0.05 s)" in str(
        outcome.failures[0]
    )
    with pytest.raises(Revoked):
        run(models.made[0].chat([{"role": "user", "content": "still there?"}]))


def test_a_thread_that_hangs_times_out_alone_and_what_it_returns_is_dropped() -> None:
    release, late = threading.Event(), []

    def hangs(task: Any, model: Any) -> Any:
        if task.task_id == 1:
            return Blocking(task=task, model=model).run()
        release.wait(HANG_S)
        try:
            return model.chat([{"role": "user", "content": "late"}])
        except Revoked as error:
            late.append(error)
            raise

    async def main() -> tuple[Outcome, Outcome]:
        spec, options = resolve(hangs), {"max_timeout": 2.0}
        hung = asyncio.ensure_future(make_runner(**options).run(task(hangs), spec, [0]))
        fine = await make_runner(**options).run(task(hangs, task_id=1), spec, [0])
        assert not hung.done(), "the other runner's thread does not wait for the hung one"
        outcome = await hung
        release.set()
        while not late:
            await asyncio.sleep(0.01)
        return outcome, fine

    hung, fine = run(main())
    assert [f.kind for f in hung.failures] == ["timeout"] and not hung.experiences
    assert len(fine.experiences) == 1
    assert late, "the thread's next call told it that the rollout is over"


def test_a_time_out_ends_the_requests_of_the_rollout() -> None:
    engine = scripted()

    async def main() -> None:
        await engine.pause()
        outcome = await make_runner(engine, max_timeout=0.05).run(task(), resolve(ask), [0])
        assert outcome.failures[0].kind == "timeout"
        await asyncio.sleep(0)
        assert engine.health().waiting == 0

    run(main())


def test_a_cancelled_run_revokes_the_models_of_its_threads() -> None:
    models, started, ended = Models(scripted()), threading.Event(), []

    def loops(task: Any, model: Any) -> Any:
        started.set()
        try:
            while True:
                model.chat([{"role": "user", "content": "again"}])
                time.sleep(0.001)
        except Revoked:
            ended.append(True)
            raise

    async def main() -> None:
        call = make_runner(models=models).run(task(loops), resolve(loops), [0])
        running = asyncio.ensure_future(call)
        while not started.is_set():
            await asyncio.sleep(0.005)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        for _ in range(200):
            if ended:
                break
            await asyncio.sleep(0.005)

    run(main())
    assert ended


def test_retries_are_counted_and_sample_anew() -> None:
    models = Models(scripted())

    async def second_time_lucky(task: Any, model: Any) -> Any:
        if len(models.made) == 1:
            raise ValueError("no luck")
        return await ask(task, model)

    outcome = outcome_of(second_time_lucky, models=models, max_retries=2)
    assert (len(outcome.experiences), outcome.retries, outcome.failures) == (1, 1, [])
    assert rollout_metrics([outcome])["rollout/retries"] == 1
    first, second = (model.key for model in models.made)
    assert first != second and first[:3] == second[:3]


def test_a_rollout_that_fails_every_attempt_is_one_failure() -> None:
    outcome = outcome_of(_gives_nothing, max_retries=2)
    assert (len(outcome.failures), outcome.retries) == (1, 2)


def test_an_error_of_the_code_itself_is_not_tried_again() -> None:
    outcome = outcome_of(_raises, max_retries=2)
    assert (len(outcome.failures), outcome.retries) == (1, 0)


@pytest.mark.parametrize("workflow", [ask, Blocking])
def test_a_failed_engine_is_not_the_workflows_failure(workflow: Any) -> None:
    with pytest.raises(RuntimeError, match="the engine has failed: out of memory"):
        outcome_of(workflow, engine=BrokenEngine())


def test_every_rollout_is_live_at_the_gate_while_it_runs() -> None:
    barrier, seen = RolloutBarrier(), []

    async def looks(task: Any, model: Any) -> Any:
        await asyncio.sleep(0)
        seen.append(sorted(key[2] for key in barrier.live))
        return await ask(task, model)

    assert len(outcome_of(looks, runs=3, barrier=barrier).experiences) == 3
    assert seen[0] == [0, 1, 2] and not barrier.live


@pytest.mark.parametrize(("overlap", "at_once"), [(False, 1), (True, 3)])
def test_blocking_repeats_overlap_only_where_asked(overlap: bool, at_once: int) -> None:
    inside, most, lock = [0], [0], threading.Lock()

    def counts(task: Any, model: Any) -> Any:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        time.sleep(0.05)
        with lock:
            inside[0] -= 1
        return Blocking(task=task, model=model).run()

    outcome_of(counts, runs=3, overlap=overlap)
    assert most == [at_once]


SYSTEM = {"role": "system", "content": "Be kind."}


class Scores(ScriptedEngine):
    """A teacher: token t of ids has the log-probability -t / temperature."""

    async def logprobs(self, ids: Any, *, temperature: float = 1.0) -> list[list[float]]:
        return [[-t / temperature for t in range(len(row))] for row in ids]


class Taught(Models):
    """Models with a teacher beside them."""

    def __init__(self, teacher: ScriptedEngine) -> None:
        super().__init__(scripted())
        self.teacher = teacher

    def __call__(self, task: Any, key: Any) -> Any:
        model = super().__call__(task, key)
        teacher = Models(self.teacher)(task, key)
        teacher.model_path = "big/model"
        model.auxiliary = [teacher]
        return model


@pytest.mark.parametrize("workflow", [ask, Blocking])
def test_a_teacher_scores_what_was_sampled(workflow: Any) -> None:
    models = Taught(Scores([], tokenizer=TOKENIZER))
    outcome = outcome_of(workflow, runs=2, models=models, teacher=True)
    assert not outcome.failures and len(outcome.experiences) == 2
    for e in outcome.experiences:
        assert e.teacher_logprobs is not None and e.teacher_logprobs.dtype == torch.float32
        assert e.teacher_logprobs.tolist() == [
            -t / (e.temperature or 1.0) for t in range(len(e.tokens))
        ]
    unasked = outcome_of(workflow, models=models)
    assert unasked.experiences[0].teacher_logprobs is None


class Reads(Scores):
    """A teacher whose score of a token is its id, and which keeps what it read."""

    async def logprobs(self, ids: Any, *, temperature: float = 1.0) -> list[list[float]]:
        self.read = [list(row) for row in ids]
        return [[0.0, *(-float(token) for token in row[1:])] for row in ids]


def test_a_teacher_may_read_more_than_the_prompt() -> None:
    async def twice(task: Any, model: Any) -> list[Experience]:
        reply = await model.chat([SYSTEM, user(task.task_desc)])
        await model.chat([SYSTEM, user(task.task_desc), reply.message, user("again")])
        return model.experiences(reward=0.0)

    def taught(prompt: Any) -> tuple[Outcome, Reads]:
        teacher = Reads([], tokenizer=TOKENIZER)
        one = task(twice)
        one.raw_task["teacher_prompt"] = prompt

        async def main() -> Outcome:
            runner = make_runner(models=Taught(teacher), teacher=True)
            return await runner.run(one, resolve(twice), range(1))

        return run(main()), teacher

    outcome, teacher = taught("The answer is 7. Why?")
    assert not outcome.failures, outcome.failures[0]
    [e] = outcome.experiences
    assert e.teacher_logprobs is not None
    trained = e.mask.nonzero().flatten().tolist()
    assert len(trained) > 2
    assert [e.teacher_logprobs[t] for t in trained] == [-float(e.tokens[t]) for t in trained]
    text = TOKENIZER.decode(teacher.read[0])
    assert text.count("The answer is 7. Why?") == 1 and "again" in text and "Be kind." in text
    assert "again" in TOKENIZER.decode(e.tokens.tolist())
    assert "The answer is 7" not in TOKENIZER.decode(e.tokens.tolist())
    [failure] = taught(["7"])[0].failures
    assert "the row's teacher_prompt is ['7']: expected text" in failure.message
    [failure] = taught("long " * 9999)[0].failures
    assert "with the row's teacher_prompt it reads" in failure.message
    assert "(explorer.auxiliary_models[0].max_model_len)" in failure.message


def test_a_teacher_leaves_evaluations_and_its_own_workflows_alone() -> None:
    models = Taught(Scores([], tokenizer=TOKENIZER))

    async def scored(task: Any, model: Any) -> list[Experience]:
        experiences = await ask(task, model)
        experiences[0].teacher_logprobs = torch.full((len(experiences[0].tokens),), -7.0)
        return experiences

    own = outcome_of(scored, models=models, teacher=True).experiences[0]
    assert own.teacher_logprobs is not None and set(own.teacher_logprobs.tolist()) == {-7.0}

    async def evaluated() -> Outcome:
        one = task(ask, batch_id="1/held_out")
        one.is_eval = True
        return await make_runner(models=models, teacher=True).run(one, resolve(ask), range(1))

    assert run(evaluated()).experiences[0].teacher_logprobs is None


def test_a_teacher_that_fails_fails_the_rollout_and_is_not_blamed_on_the_workflow() -> None:
    class Broken(Scores):
        async def logprobs(self, ids: Any, *, temperature: float = 1.0) -> list[list[float]]:
            raise ValueError("the teacher reads at most 8 tokens")

    models = Taught(Broken([], tokenizer=TOKENIZER))
    [failed] = outcome_of(ask, models=models, teacher=True).failures
    assert failed.kind == "error" and str(failed.fault).startswith(
        "the teacher (explorer.auxiliary_models[0], big/model) failed: "
        "ValueError: the teacher reads at most 8 tokens\n"
    )


def test_a_teacher_that_is_too_slow_is_named_and_not_the_workflow() -> None:
    class Silent(Scores):
        async def logprobs(self, ids: Any, *, temperature: float = 1.0) -> list[list[float]]:
            await asyncio.Event().wait()
            return []

    models = Taught(Silent([], tokenizer=TOKENIZER))
    [failed] = outcome_of(ask, models=models, teacher=True, max_timeout=2.0).failures
    assert failed.kind == "timeout" and str(failed.fault).startswith(
        "the teacher (explorer.auxiliary_models[0], big/model) failed: it was not done when the "
        "rollout had taken longer than explorer.max_timeout (2 s)"
    )


def test_a_reward_that_hangs_is_named_with_its_line_and_said_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def hang(task: Any, answer: str) -> float:
        await asyncio.Event().wait()
        return 1.0

    async def main() -> Outcome:
        spec, one = resolve("simple_workflow"), task("simple_workflow")
        one.reward_fn = hang
        return await make_runner(max_timeout=1.0, max_retries=1).run(one, spec, [0])

    [failed] = run(main()).failures
    assert failed.kind == "timeout" and failed.fault.what == "reward 'hang'"
    assert failed.message.startswith("it was not done when the rollout had taken longer than")
    assert failed.fault.place.startswith(f"{__file__}:")
    assert failed.fault.place.endswith(": await asyncio.Event().wait()")
    # the console hears of the first alone
    shown = [not getattr(record, "file_only", False) for record in caplog.records]
    assert shown == [True, False]


class Held(RolloutBarrier):
    """Has held the rollout `before` at first, and `later` once its call is under way."""

    def __init__(self, before: float, later: float) -> None:
        super().__init__()
        self.before, self.later, self.amid = before, later, False

    def held(self, key: tuple[Any, ...]) -> float:
        return self.later if self.amid else self.before


@pytest.mark.parametrize(
    ("before", "later", "fails"), [(0.0, 600.0, []), (600.0, 600.0, ["timeout"])]
)
def test_time_at_the_barrier_is_not_the_rollouts_own_and_an_earlier_attempts_counts_once(
    before: float, later: float, fails: list[str]
) -> None:
    barrier = Held(before, later)

    async def waits(task: Any, model: Any) -> list[Experience]:
        barrier.amid = True
        await asyncio.sleep(0.6 if not fails else 600)
        return await ask(task, model)

    outcome = outcome_of(waits, barrier=barrier, max_timeout=0.2)
    assert [failure.kind for failure in outcome.failures] == fails


@pytest.mark.parametrize("ends", ["before", "after"])
def test_a_call_that_fails_while_its_rollout_is_cancelled_prints_nothing(ends: str) -> None:
    async def main() -> list[Any]:
        gone = RuntimeError("the server is gone")
        reported: list[Any] = []

        def report(_: Any, what: dict[str, Any]) -> None:
            if what.get("exception") is gone:  # not what other tests have left to be collected
                reported.append(what)

        asyncio.get_running_loop().set_exception_handler(report)
        allowed = asyncio.Event()

        async def fails() -> None:
            try:
                await allowed.wait()
            finally:
                raise gone

        call = asyncio.ensure_future(fails())
        await asyncio.sleep(0)
        if ends == "before":
            allowed.set()
            await asyncio.wait({call})
        drop(call)
        await asyncio.wait({call})
        del call
        gc.collect()
        await asyncio.sleep(0)
        return reported

    assert asyncio.run(main()) == []


JUDGED = Taught(Scores([], tokenizer=TOKENIZER))


@pytest.mark.parametrize(
    ("workflow", "options", "expected"),
    [
        (SimpleWorkflow, {}, True),
        (ask, {}, False),  # a function that does not declare it
        (SimpleWorkflow, {"models": JUDGED}, False),
        (SimpleWorkflow, {"models": JUDGED, "teacher": True}, False),
        (type("AsksMore", (SimpleWorkflow,), {"ask": SimpleWorkflow.ask}), {}, False),
        (type("InTurn", (SimpleWorkflow,), {"one_at_a_time": True}), {}, False),
        (type("InTurn", (SimpleWorkflow,), {"one_at_a_time": True}), {"overlap": True}, True),
    ],
)
def test_the_engine_need_not_wait_for_a_rollout_that_asks_nobody_after_its_reply(
    workflow: Any, options: dict[str, Any], expected: bool
) -> None:
    class Noting(RolloutBarrier):
        once: ClassVar[list[Any]] = []

        def asks_once(self, key: Any, then: Any) -> None:
            self.once.append(key)

    Noting.once.clear()

    async def main() -> Outcome:
        one = task(workflow, repeat_times=2)
        one.reward_fn = "accuracy_reward"
        runner = make_runner(barrier=Noting(), **options)
        return await runner.run(one, resolve(workflow), range(2))

    assert len(run(main()).experiences) == 2
    assert Noting.once == ([((1, 0, ""), 0, 0), ((1, 0, ""), 0, 1)] if expected else [])


@pytest.mark.parametrize(
    ("batch", "explorer", "name"),
    [(3, (), "3/5/1"), ("3/held_out", (), "3/held_out/5/1"), (0, ("second",), "0/second/5/1")],
)
def test_people_read_a_rollouts_name_and_not_its_order(
    batch: int | str, explorer: tuple[str, ...], name: str
) -> None:
    one = task(SimpleWorkflow)
    one.batch_id = batch
    order = batch_order(one, *explorer)
    assert "/".join(map(str, (order, 5, 1))) == name
    assert repr(order) == repr(tuple(order))  # of which random streams are made


def test_a_rollout_that_the_engine_waits_for_is_named_before_its_time_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a lock around calls of the model, all rollouts waited for half an hour, and failed."""
    monkeypatch.setattr(runner_module, "HELD_UP_S", 0.05)
    barrier = RolloutBarrier()

    async def locked(task: Any, model: Any) -> list[Experience]:
        if model.key[2] == 0:  # its request waits at the engine, which waits for the other rollout
            barrier.open([model.key])
        while "the engine has computed nothing" not in caplog.text:
            await asyncio.sleep(0.01)
        return await ask(task, model)

    outcome = outcome_of(locked, runs=2, barrier=barrier, max_timeout=HANG_S)
    assert len(outcome.experiences) == 2, outcome.failures
    (record,) = (one for one in caplog.records if "computed nothing" in one.getMessage())
    assert "waits for the code of workflow 'locked' (so" in record.getMessage()
    assert record.place.endswith("await asyncio.sleep(0.01)")  # pyright: ignore


def test_a_lock_that_an_earlier_loop_has_used_is_explained() -> None:
    """One that is made when a module is imported serves the first stage of a run alone."""
    lock = asyncio.Lock()

    async def locked(task: Any, model: Any) -> list[Experience]:
        async with lock:
            await asyncio.sleep(0)
            return await ask(task, model)

    assert not outcome_of(locked, runs=2).failures
    (failed,) = outcome_of(locked, runs=2).failures
    assert "is bound to a different event loop: each stage of a run, and each" in failed.message
