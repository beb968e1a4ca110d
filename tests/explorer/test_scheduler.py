"""Scheduler: what runs when, on how many runners, and that every task ends in one outcome."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch

from tests.explorer.made import BrokenEngine, ask, make_runner, run, scripted, task
from tests.limits import HANG_S
from trireme.experience import Experience
from trireme.explorer.runner import Outcome, TimeLimit, judge
from trireme.explorer.scheduler import OverRollout, Scheduler, split
from trireme.task import Task
from trireme.workflows.classes import Workflow
from trireme.workflows.workflow import resolve


def make(runners: int = 1, most: int | None = None, engine: Any = None) -> Scheduler:
    engine = engine or scripted()
    return Scheduler([make_runner(engine) for _ in range(runners)], max_repeats_per_runner=most)


def test_repeats_are_split_in_parts_of_at_most_so_many() -> None:
    assert split(5, 2) == [[0, 1], [2, 3], [4]]
    assert split(3, None) == [[0, 1, 2]]


def test_a_task_whose_repeats_are_split_is_one_outcome_with_all_runs() -> None:
    async def main() -> Any:
        scheduler = make(runners=3, most=2)
        scheduler.start()
        await scheduler.submit(1, [task(repeat_times=5, task_id=i) for i in range(2)])
        outcomes = await scheduler.results(1)
        await scheduler.close()
        return outcomes

    outcomes = run(main())
    assert [outcome.task.task_id for outcome in outcomes] == [0, 1]
    for outcome in outcomes:
        assert [e.eid.run for e in outcome.experiences] == [0, 1, 2, 3, 4]


def test_order_is_step_then_training_before_evaluation_then_place() -> None:
    order: list[tuple[Any, Any]] = []

    async def notes(task: Any, model: Any) -> Any:
        order.append((task.batch_id, task.task_id))
        return await ask(task, model)

    async def main() -> None:
        scheduler = make()
        for batch in ("2/held_out", 10, 2, "1/held_out", 1):
            await scheduler.submit(batch, [task(notes, task_id=i) for i in range(2)])
        scheduler.start()
        for batch in (1, 2, 10, "1/held_out", "2/held_out"):
            await scheduler.results(batch)
        await scheduler.close()

    run(main())
    batches = [1, "1/held_out", 2, "2/held_out", 10]
    assert order == [(batch, place) for batch in batches for place in range(2)]


def test_all_runners_work_at_once() -> None:
    inside, most = [0], [0]

    async def counts(task: Any, model: Any) -> Any:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        await asyncio.sleep(0.01)
        inside[0] -= 1
        return await ask(task, model)

    async def main() -> None:
        scheduler = make(runners=3)
        scheduler.start()
        await scheduler.submit(1, [task(counts, task_id=i) for i in range(7)])
        assert len(await scheduler.results(1)) == 7
        await scheduler.close()

    run(main())
    assert most == [3]


def test_a_failed_engine_reaches_whoever_waits_for_the_batch() -> None:
    unseen: list[Any] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, what: unseen.append(what))
        scheduler = make(runners=2, engine=BrokenEngine())
        scheduler.start()
        await scheduler.submit(1, [task(task_id=i) for i in range(4)])
        with pytest.raises(RuntimeError, match="the engine has failed"):
            await scheduler.results(1)
        await scheduler.close()

    run(main())
    assert not unseen


def test_closing_ends_what_waits_and_a_new_start_begins_empty() -> None:
    async def hangs(task: Any, model: Any) -> Any:
        await asyncio.sleep(60)

    async def main() -> None:
        scheduler = make()
        scheduler.start()
        await scheduler.submit(1, [task(hangs, task_id=i) for i in range(3)])
        await scheduler.submit(2, [task(hangs)])  # none of it has begun
        waiting = [asyncio.ensure_future(scheduler.results(batch)) for batch in (1, 2)]
        await asyncio.sleep(0.01)
        await scheduler.close()
        for batch in waiting:
            with pytest.raises(asyncio.CancelledError):
                await batch
        scheduler.start()
        await scheduler.submit(1, [task()])
        assert len(await scheduler.results(1)) == 1
        await scheduler.close()

    run(main())


def test_an_unknown_workflow_is_refused_before_it_is_queued() -> None:
    with pytest.raises(ValueError, match="no_such_workflow"):
        run(make().submit(1, [task("no_such_workflow")]))


def late(*task_ids: int) -> Any:
    """A workflow whose tasks of these ids take for ever."""

    async def workflow(task: Any, model: Any) -> Any:
        if task.task_id in task_ids and not task.is_eval:
            await asyncio.sleep(60)
        return await ask(task, model)

    return workflow


def test_over_rollout_goes_on_without_the_slowest_tasks_and_frees_their_runners() -> None:
    async def main() -> None:
        runners = [make_runner(scripted(), max_timeout=HANG_S) for _ in range(3)]
        over = OverRollout(ratio=0.25, wait_after_min=0.05)
        scheduler = Scheduler(runners, max_repeats_per_runner=1, over_rollout=over)
        scheduler.start()
        for batch in (1, 2):
            await scheduler.submit(
                batch, [task(late(2), task_id=i, repeat_times=2) for i in range(4)]
            )
        for batch in (1, 2):
            outcomes = await scheduler.results(batch)
            assert [outcome.task.task_id for outcome in outcomes] == [0, 1, 3]
            assert all(len(outcome.experiences) == 2 for outcome in outcomes)
        assert scheduler.dropped_tasks == 2
        await scheduler.close()

    run(main())


def test_over_rollout_waits_for_every_task_of_an_evaluation_and_for_enough_of_a_batch() -> None:
    async def main() -> None:
        over = OverRollout(ratio=0.5, wait_after_min=HANG_S)
        scheduler = Scheduler(
            [make_runner(scripted())], max_repeats_per_runner=None, over_rollout=over
        )
        scheduler.start()
        await scheduler.submit(1, [task(task_id=i) for i in range(3)])
        await scheduler.submit("1/held_out", [task(task_id=i) for i in range(3)])
        assert len(await scheduler.results(1)) == 3  # the rest came in its time
        assert len(await scheduler.results("1/held_out")) == 3
        await scheduler.close()

    run(main())


def test_over_rollout_waits_for_enough_tasks_before_the_rest_has_its_time() -> None:
    async def slow(task: Any, model: Any) -> Any:
        await asyncio.sleep(600 if task.task_id > 1 else 0.2)
        return await ask(task, model)

    async def main() -> None:
        runners = [make_runner(scripted(), max_timeout=HANG_S) for _ in range(4)]
        over = OverRollout(ratio=0.5, wait_after_min=0.0)
        scheduler = Scheduler(runners, max_repeats_per_runner=None, over_rollout=over)
        scheduler.start()
        await scheduler.submit(1, [task(slow, task_id=i) for i in range(4)])
        outcomes = await scheduler.results(1)
        assert [outcome.task.task_id for outcome in outcomes] == [0, 1]
        assert scheduler.dropped_tasks == 2
        await scheduler.close()

    run(main())


@pytest.mark.parametrize("further", [lambda task: [f"judge of {task.task_id}"], None])
def test_the_rewards_of_a_group_are_given_the_tasks_own_auxiliary_models(further: Any) -> None:
    seen: list[Any] = []

    def judged(task: Task, answer: str, *, auxiliary_models: Any) -> float:
        seen.append(list(auxiliary_models))
        return 0.5

    async def main() -> Any:
        scheduler = Scheduler(
            [make_runner(scripted())], max_repeats_per_runner=None, further=further
        )
        scheduler.start()
        tasks = [task("simple_workflow", task_id=i) for i in range(2)]
        for one in tasks:
            one.reward_fn = [judged]
        await scheduler.submit(1, tasks)
        outcomes = await scheduler.results(1)
        await scheduler.close()
        return [e.reward for outcome in outcomes for e in outcome.experiences]

    assert run(main()) == [0.5, 0.5]
    assert seen == ([["judge of 0"], ["judge of 1"]] if further else [[], []])


def test_partial_tasks_are_kept_where_they_are_asked_for() -> None:
    async def half(task: Any, model: Any) -> Any:
        if task.task_id == 1 and model.key[2] == 1:
            await asyncio.sleep(60)
        return await ask(task, model)

    async def main() -> Any:
        runners = [make_runner(scripted(), max_timeout=HANG_S) for _ in range(4)]
        over = OverRollout(ratio=0.5, wait_after_min=1.0, keep_partial=True)
        scheduler = Scheduler(runners, max_repeats_per_runner=1, over_rollout=over)
        scheduler.start()
        await scheduler.submit(1, [task(half, task_id=i, repeat_times=2) for i in range(2)])
        outcomes = await scheduler.results(1)
        await scheduler.close()
        return [[e.eid.run for e in outcome.experiences] for outcome in outcomes]

    assert run(main()) == [[0, 1], [0]]


def test_a_dynamic_time_out_follows_the_mean_of_the_tasks() -> None:
    limit = TimeLimit(100.0, ratio=3.0, warmup=2)
    limit.add(1.0)
    assert limit.seconds == 100.0
    limit.add(3.0)
    assert limit.seconds == 6.0
    limit.add(500.0)
    assert limit.seconds == 100.0
    assert TimeLimit(7.0).seconds == 7.0


def test_a_rollout_past_the_dynamic_time_out_fails_by_its_name() -> None:
    async def main() -> Any:
        limit = TimeLimit(60.0, ratio=2.0)
        limit.add(0.02)
        slow = task(late(0))
        return await make_runner(scripted(), limit=limit).run(slow, resolve(late(0)), [0])

    (failed,) = run(main()).failures
    assert failed.kind == "timeout" and "explorer.dynamic_timeout (0.04 s)" in failed.message


def test_what_the_runners_do_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        scheduler = Scheduler(
            [make_runner(scripted(), max_timeout=HANG_S) for _ in range(2)],
            max_repeats_per_runner=None,
            report_interval=0.05,
        )
        scheduler.start()
        await scheduler.submit(1, [task(late(0), task_id=0)])
        while "runner 0: task 1/0" not in caplog.text:
            await asyncio.sleep(0.01)
        busy, idle = scheduler.states()
        assert re.fullmatch(r"runner 0: task 1/0, runs \[0\] for \d+ s", busy)
        assert idle == "runner 1: idle"
        await scheduler.close()

    with caplog.at_level("INFO"):
        run(main())
    assert re.search(r"0 tasks wait\nrunner 0: task 1/0, .* s\nrunner 1: idle", caplog.text)


def test_rollouts_that_end_together_are_one_record_and_none_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        scheduler = Scheduler([make_runner(scripted())], max_repeats_per_runner=None)
        scheduler.start()
        await scheduler.submit(1, [task(ask, task_id=7, repeat_times=3)])
        await scheduler.results(1)
        await scheduler.close()  # sooner than the lines would have become a record

    with caplog.at_level("INFO"):
        run(main())
    (record,) = (one for one in caplog.records if "sampled" in one.getMessage())
    lines = record.getMessage().splitlines()
    assert sorted(line.partition(":")[0] for line in lines) == ["1/7/0", "1/7/1", "1/7/2"]


def test_a_line_about_a_rollout_is_logged_while_others_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        hold = asyncio.Event()

        async def some_wait(task: Any, model: Any) -> Any:
            if model.key[2]:
                await hold.wait()
            return await ask(task, model)

        one = task(some_wait, repeat_times=2)
        running = asyncio.create_task(make_runner(scripted()).run(one, resolve(some_wait), [0, 1]))
        while "1/0/0: reward" not in caplog.text:
            await asyncio.sleep(0.01)
        assert "1/0/1: reward" not in caplog.text
        hold.set()
        await running

    with caplog.at_level("INFO"):
        run(main())


async def judged_by(*rewards: Any, most: float = 0.2) -> Any:
    scheduler = Scheduler([make_runner(scripted(), max_timeout=most)], max_repeats_per_runner=None)
    scheduler.start()
    one = task("simple_workflow", repeat_times=2)
    one.reward_fn = [*rewards]
    await scheduler.submit(1, [one])
    (outcome,) = await scheduler.results(1)
    await scheduler.close()
    assert not outcome.experiences and len(outcome.failures) == 2
    return outcome.failures[0]


def test_rewards_of_a_group_that_swallow_their_end_are_not_waited_for() -> None:
    async def stays(task: Any, answer: str) -> float:
        for _ in range(2):  # the second ends with the event loop
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(HANG_S)
        return 1.0

    failed = run(judged_by(stays))
    assert failed.kind == "timeout"
    assert "had taken longer than explorer.max_timeout (0.2 s)" in str(failed)


def test_the_reward_that_hangs_is_the_one_that_is_named() -> None:
    async def hangs(task: Any, answer: str) -> float:
        await asyncio.sleep(HANG_S)
        return 1.0

    async def quick(task: Any, answer: str) -> float:
        return 1.0

    failed = run(judged_by(quick, hangs))
    said = "reward 'hangs' failed: it was not done when the rewards had taken longer than explorer"
    assert said in str(failed) and "await asyncio.sleep(HANG_S)" in failed.fault.place


def test_the_other_rewards_end_with_one_that_fails() -> None:
    ends: list[str] = []

    async def slow(task: Any, answer: str) -> float:
        try:
            await asyncio.sleep(HANG_S)
        finally:
            ends.append("slow")
        return 1.0

    async def wrong(task: Any, answer: str) -> Any:
        await asyncio.sleep(0)
        return "1.0"

    async def main() -> None:
        assert "reward 'wrong' gave '1.0'" in str(await judged_by(slow, wrong, most=HANG_S))
        assert ends == ["slow", "slow"]

    run(main())


def test_a_plain_judge_runs_in_a_thread() -> None:
    async def asks(task: Any, model: Any) -> list[Experience]:
        return model.experiences()

    threads: list[threading.Thread] = []

    def judge_plainly(task: Task, experiences: Sequence[Experience], models: Any = ()) -> None:
        threads.append(threading.current_thread())
        for experience in experiences:
            experience.reward = 0.5

    asks.judge = judge_plainly
    outcome = Outcome(task(asks), [Experience([1, 2], prompt_length=1)])
    run(judge(outcome, resolve(asks), HANG_S))
    assert [e.reward for e in outcome.experiences] == [0.5] and not outcome.failures
    assert threads[0] is not threading.main_thread()


@pytest.mark.parametrize("given", [float("nan"), "1.0", torch.zeros(2)])
def test_rewards_of_a_group_that_are_no_numbers_fail_it(given: Any) -> None:
    class JudgesItself(Workflow):
        def run(self) -> list[Experience]:
            return self.model.chat([{"role": "user", "content": "?"}])

        @classmethod
        async def judge(
            cls, task: Task, experiences: Sequence[Experience], models: Sequence[Any] = ()
        ) -> None:
            for experience in experiences:
                experience.reward = given

    outcome = Outcome(task(JudgesItself), [Experience([1, 2], prompt_length=1)])
    run(judge(outcome, resolve(JudgesItself), HANG_S))
    assert not outcome.experiences
    assert "the rewards of workflow 'JudgesItself' gave" in str(outcome.failures[0])
    assert "number" in outcome.failures[0].message


def test_a_time_out_of_a_groups_rewards_own_is_their_error_and_not_ours() -> None:
    async def away(task: Any, answer: str) -> float:
        raise TimeoutError("the judge's server did not answer within 5 s")

    failed = run(judged_by(away, most=HANG_S))
    assert failed.kind == "error"
    assert "the judge's server did not answer within 5 s" in str(failed)


@pytest.mark.parametrize(
    ("tasks", "ratio", "wanted"), [(10, 0.7, 3), (20, 0.85, 3), (100, 0.45, 55), (4, 0.3, 3)]
)
def test_over_rollout_waits_for_no_task_more_than_its_ratio_says(
    tasks: int, ratio: float, wanted: int
) -> None:
    async def main() -> int:
        runners = [make_runner(scripted(), max_timeout=HANG_S) for _ in range(tasks)]
        over = OverRollout(ratio=ratio, wait_after_min=0.0)
        scheduler = Scheduler(runners, max_repeats_per_runner=None, over_rollout=over)
        scheduler.start()
        slow = late(*range(wanted, tasks))
        await scheduler.submit(1, [task(slow, task_id=i) for i in range(tasks)])
        outcomes = await scheduler.results(1)
        await scheduler.close()
        return len(outcomes)

    assert run(main()) == wanted
