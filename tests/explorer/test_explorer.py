"""Explorer: what gets into the buffer and when, what stops a run, and where a resume goes on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.data.made import taskset_of
from tests.explorer.made import (
    BrokenEngine,
    Sync,
    ask,
    make_explorer,
    make_taskset,
    run,
)
from trireme.buffer.buffer import Closed
from trireme.buffer.queue import QueueBuffer
from trireme.checkpoint.layout import JobFolder
from trireme.data.rows import Rows
from trireme.engines.barrier import RolloutBarrier
from trireme.explorer.explorer import LONG_WAIT_S, RolloutsFailed
from trireme.monitor.events import Evaluated, Event, StepDone
from trireme.task import no_effect


async def explored(**options: Any) -> Any:
    """An explorer that has run to its end."""
    made = make_explorer(**options)
    try:
        await made.explorer.explore()
    finally:
        await made.explorer.close()
    return made


def fails_for(*tasks: int) -> Any:
    """A workflow that raises for some places of a batch."""

    async def workflow(task: Any, model: Any) -> Any:
        if task.task_id in tasks:
            raise ValueError(f"task {task.task_id} is beyond me")
        return await ask(task, model)

    return workflow


async def reads_one(task: Any, model: Any) -> Any:
    task.workflow_args.get("level", 1)
    return await ask(task, model)


async def reads_all(task: Any, model: Any) -> Any:
    assert dict(**task.workflow_args) == {"levl": 2, "more": 3}
    return await ask(task, model)


@pytest.mark.parametrize(("workflow", "count"), [(reads_one, 2), (reads_all, 0)])
def test_arguments_that_no_workflow_reads_are_reported_once(
    workflow: Any, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    taskset = make_taskset(workflow=workflow, workflow_args={"levl": 2, "more": 3})
    run(explored(taskset=taskset))
    said = [r.getMessage() for r in caplog.records if "so that it has no effect" in r.getMessage()]
    assert len(said) == count
    if said:
        assert said[0].startswith("step 1: no workflow has read workflow_args.levl, ")
        assert said[0].endswith("effect: did you mean 'level'?") and said[1].endswith("effect")


def test_an_argument_that_was_noted_before_the_run_is_not_reported_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each of those of built-in workflows was printed twice."""
    arguments = {"levl": 2, "more": 3}
    taskset = make_taskset(workflow=reads_one, workflow_args=arguments)
    held_out = make_taskset(
        workflow=reads_one, workflow_args=arguments, name="held_out", is_eval=True
    )
    notes = [no_effect("sums", "levl"), no_effect("held_out", "more", "mode")]
    options: Any = {"evaluations": [held_out], "notes": notes, "eval_on_startup": True}
    run(explored(taskset=taskset, **options))
    said = [r.getMessage() for r in caplog.records if "so that it has no effect" in r.getMessage()]
    assert [line.partition(", so")[0] for line in said] == [
        "evaluation 'held_out' at step 0: no workflow has read workflow_args.levl",
        "step 1: no workflow has read workflow_args.more",
    ]


def test_an_engine_that_waits_long_for_the_code_of_workflows_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    totals = iter([LONG_WAIT_S - 1, 2 * LONG_WAIT_S, 4 * LONG_WAIT_S, 4 * LONG_WAIT_S])

    class Waits(RolloutBarrier):
        waited = property(lambda self: next(totals))

    made = run(explored(runners=1, runner_options={"barrier": Waits()}))
    waits = [metrics["time/engine_wait"] for _, _, metrics in made.reports]
    assert waits == [LONG_WAIT_S - 1, LONG_WAIT_S + 1, 2 * LONG_WAIT_S, 0]
    (record,) = (one for one in caplog.records if "the engine waited" in one.getMessage())
    assert record.getMessage().startswith(f"step 2: the engine waited {LONG_WAIT_S + 1:.0f} of")
    assert "`one_call = True`" in record.getMessage()
    assert "time/engine_wait" not in run(explored()).reports[0][2]  # without a barrier


def test_an_engines_wait_in_an_evaluation_is_none_of_a_step() -> None:
    class Waits(RolloutBarrier):
        seconds = 0.0
        waited = property(lambda self: self.seconds)

    barrier = Waits()

    async def busy(task: Any, model: Any) -> Any:
        barrier.seconds += 100 if task.is_eval else 1
        return await ask(task, model)

    held_out = make_taskset(busy, rows=3, name="held_out", is_eval=True, repeat_times=1)
    evaluated: dict[str, Any] = {"evaluations": [held_out], "eval_on_startup": True}
    options: dict[str, Any] = {"runners": 1, "runner_options": {"barrier": barrier}}
    made = run(explored(workflow=busy, **evaluated, **options))
    steps = [metrics for part, _, metrics in made.reports if part == "explorer"]
    assert barrier.seconds > 300 and [row["time/engine_wait"] for row in steps] == [4.0] * 4


def test_whole_groups_with_advantages_are_put_step_after_step() -> None:
    made = run(explored())
    taken = run(made.buffer.take(16))
    uids = [f"{step}/{task}/{i}/0" for step in range(1, 5) for task in range(2) for i in range(2)]
    assert [e.eid.uid for e in taken] == uids
    assert all(e.advantages is not None and torch.all(e.advantages == 0) for e in taken)
    assert [step for part, step, _ in made.reports if part == "explorer"] == [1, 2, 3, 4]
    with pytest.raises(Closed):
        run(made.buffer.take(1))


def test_failed_rollouts_are_counted_and_the_run_goes_on() -> None:
    made = run(explored(workflow=fails_for(1)))
    assert len(made.buffer) == 8
    for _, _, metrics in made.reports:
        assert metrics["rollout/failed"] == metrics["rollout/failed/error"] == 2
        assert metrics["rollout/experiences"] == 2


def test_time_outs_and_empty_returns_are_counted_by_kind() -> None:
    async def mixed(task: Any, model: Any) -> Any:
        if task.raw_task["prompt"].startswith("0"):
            await asyncio.sleep(60)
        return [] if task.raw_task["prompt"].startswith("1") else await ask(task, model)

    taskset = make_taskset(mixed, batch_size=4, repeat_times=1, total_steps=1)
    made = run(explored(taskset=taskset, runner_options={"max_timeout": 1.0}))
    ((_, _, metrics),) = made.reports
    assert metrics["rollout/failed/timeout"] == metrics["rollout/failed/empty"] == 1
    assert metrics["rollout/failed"] == 2 and len(made.buffer) == 2


def test_a_step_whose_every_rollout_failed_raises_with_the_first_traceback() -> None:
    made = make_explorer(workflow=fails_for(0, 1))

    async def main() -> None:
        with pytest.raises(RolloutsFailed) as raised:
            await made.explorer.explore()
        said = str(raised.value)
        sentence, place = said.splitlines()
        assert "failed in all 4 rollouts of step 1: ValueError: task 0 is beyond me" in sentence
        assert "test_explorer.py:" in place and "is beyond me" in place
        assert "Traceback" in raised.value.trace
        with pytest.raises(RuntimeError, match="failed in all 4 rollouts of step 1"):
            await made.buffer.take(1)
        await made.explorer.close()

    run(main())


@pytest.mark.parametrize(("quota", "stops"), [(0.5, False), (0.49, True), (0.0, True)])
def test_more_failures_than_the_quota_stop_the_run(quota: float, stops: bool) -> None:
    if stops:
        with pytest.raises(RolloutsFailed, match="failed in 2 of 4 rollouts of step 1"):
            run(explored(workflow=fails_for(1), max_failures=quota))
    else:
        assert len(run(explored(workflow=fails_for(1), max_failures=quota)).buffer) == 8


def test_a_failed_engine_stops_the_run_and_wakes_the_trainer() -> None:
    made = make_explorer(engine=BrokenEngine())

    async def main() -> None:
        taking = asyncio.ensure_future(made.buffer.take(4))
        with pytest.raises(RuntimeError, match="the engine has failed: out of memory"):
            await made.explorer.explore()
        with pytest.raises(RuntimeError, match="the other side has failed: the engine has failed"):
            await taking
        await made.explorer.close()

    run(main())
    assert not made.reports


def test_a_step_is_evaluated_before_it_is_put() -> None:
    events: list[str] = []

    class Watched(QueueBuffer):
        async def put(self, experiences: Any) -> None:
            events.append(f"put {experiences[0].eid.batch}")
            await super().put(experiences)

    held_out = make_taskset(rows=3, name="held_out", is_eval=True, repeat_times=1)
    made = make_explorer(
        buffer=Watched("store"), evaluations=[held_out], eval_interval=2, eval_on_startup=True
    )
    emit = made.explorer.emit

    def watched(event: Event) -> None:
        if isinstance(event, StepDone | Evaluated):
            events.append(f"{event.part} {event.step}")
        emit(event)

    made.explorer.emit = watched
    run(made.explorer.explore())
    assert events == [
        "eval 0", "explorer 1", "put 1", "eval 2", "explorer 2", "put 2",
        "explorer 3", "put 3", "eval 4", "explorer 4", "put 4",
    ]  # fmt: skip
    assert made.explorer.first_evaluation == made.explorer.last_evaluation
    metrics = made.reports[0][2]
    assert metrics["eval/held_out/tasks"] == 3 and metrics["eval/held_out/reward/mean@1"] == 0


def test_steps_that_end_together_have_one_rate() -> None:
    """The second one's own seconds are almost none, and its tokens are not sampled in these."""
    pause = 0.1

    async def together(task: Any, model: Any) -> Any:
        await asyncio.sleep(pause)
        return await ask(task, model)

    made = run(explored(workflow=together, sync=Sync(interval=9), runners=16))
    found = [metrics for part, _, metrics in made.reports if part == "explorer"]
    seconds = [metrics["time/explore"] for metrics in found]
    total = sum(e.trained_tokens for e in run(made.buffer.take(16)))
    assert found[-1]["perf/tokens_per_s"] == pytest.approx(total / sum(seconds))
    assert max(metrics["perf/tokens_per_s"] for metrics in found) < 2 * total / pause


def test_the_seconds_of_an_evaluation_begin_when_it_was_submitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    held_out = make_taskset(rows=1, name="held_out", is_eval=True, repeat_times=1)
    made = make_explorer(evaluations=[held_out], eval_interval=1)

    async def two_under_way() -> None:
        monkeypatch.setattr("trireme.explorer.explorer.time", clock)
        for step in (1, 2):
            now[0] = 10.0 * step
            await made.explorer._submit_evaluation(step)
        made.explorer.scheduler.start()
        for step, end in ((1, 25.0), (2, 26.0)):
            now[0] = end
            await made.explorer._finish_evaluation(step)
        await made.explorer.close()

    run(two_under_way())
    seconds = [metrics["eval/held_out/seconds"] for part, _, metrics in made.reports]
    assert seconds == [15.0, 6.0]


def test_the_example_of_several_turns_is_text_without_the_marks_of_the_chat_template() -> None:
    async def twice(task: Any, model: Any) -> Any:
        chat = [{"role": "system", "content": "play"}, {"role": "user", "content": "start"}]
        reply = await model.chat(chat)
        await model.chat([*chat, reply.message, {"role": "user", "content": "No."}])
        return model.experiences(reward=0.0)

    # a prompt that is no text, as those of environments
    rows = Rows("games", [{"prompt": [{"seed": 1}], "response": ""}], ["prompt", "response"])
    options = {"is_eval": True, "repeat_times": 1, "batch_size": 2}
    games = taskset_of(rows, name="games", workflow=twice, **options)
    made = make_explorer(evaluations=[games])
    run(made.explorer.evaluate(0))
    (example,) = made.explorer.last_examples
    assert example["prompt"] == "start"
    first, last = example["reply"].split("\n[user] No.\n[replied] ")
    assert first and last and "<|" not in example["reply"]


def test_an_evaluation_that_fails_altogether_says_so() -> None:
    held_out = make_taskset(fails_for(0, 1), rows=2, name="held_out", is_eval=True)
    made = make_explorer(evaluations=[held_out])
    with pytest.raises(RolloutsFailed, match="all 4 rollouts of evaluation 'held_out' at step 7"):
        run(made.explorer.evaluate(7))


def test_state_names_the_first_step_that_is_not_in_the_buffer() -> None:
    states: list[dict[str, Any]] = []

    async def main() -> None:
        sync = Sync(interval=2, at_pull=lambda step: states.append(made.explorer.state()))
        made = make_explorer(sync=sync, buffer=QueueBuffer("store", capacity=1))
        exploring = asyncio.ensure_future(made.explorer.explore())
        while len(made.buffer) == 0:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        # step 1 is in the buffer; step 2 is explored and waits for room
        states.append(made.explorer.state())
        assert made.explorer.step == 2
        for _ in range(4):
            await made.buffer.take(4)
        await exploring
        await made.explorer.close()

    run(main())
    assert states == [
        {"step": 1, "taskset": {"current_index": 2, "step": 1}},
        {"step": 2, "taskset": {"current_index": 4, "step": 2}},
        {"step": 4, "taskset": {"current_index": 8, "step": 4}},
    ]


def test_state_names_a_step_that_is_just_being_submitted() -> None:
    """The trainer's checkpoint may come while it waits for the runners' lock."""
    states: list[int] = []

    async def main() -> None:
        made = make_explorer()
        submit = made.explorer.scheduler.submit

        async def slowly(*args: Any) -> None:
            await submit(*args)
            states.append(made.explorer.state()["step"])

        made.explorer.scheduler.submit = slowly
        await made.explorer.explore()
        await made.explorer.close()

    run(main())
    assert states == [0, 1, 2, 3]


def test_a_resume_explores_the_same_tasks_under_the_same_ids() -> None:
    async def main() -> tuple[Any, Any]:
        whole = await explored()
        state: dict[str, Any] = {}
        sync = Sync(at_pull=lambda step: state.update(now=cut.explorer.state()))
        cut = make_explorer(sync=sync, taskset=make_taskset(total_steps=2))
        await cut.explorer.explore()
        gone_on = make_explorer()
        gone_on.explorer.load_state(state["now"])
        await gone_on.explorer.explore()
        expected = (await whole.buffer.take(16))[8:]
        return expected, await gone_on.buffer.take(16)

    expected, found = run(main())
    assert [e.eid for e in found] == [e.eid for e in expected]
    assert [e.prompt_text for e in found] == [e.prompt_text for e in expected]


def test_exploring_ends_in_peace_when_the_trainer_closes_the_buffer() -> None:
    started: list[int] = []

    async def slow_later(task: Any, model: Any) -> Any:
        started.append(task.batch_id)
        if not task.is_eval and task.batch_id > 1:
            await asyncio.sleep(60)
        return await ask(task, model)

    held_out = make_taskset(slow_later, rows=2, name="held_out", is_eval=True)

    async def main() -> None:
        sync = Sync(interval=3)
        made = make_explorer(
            workflow=slow_later, sync=sync, evaluations=[held_out], eval_interval=3
        )
        await made.buffer.close()
        await made.explorer.explore()
        # the abandoned rollouts of steps 2 and 3 hold nothing up, nor is their evaluation here
        found = await made.explorer.evaluate(3)
        assert found["held_out"]["tasks"] == 2 and found["held_out"]["failed"] == 0
        await made.explorer.close()

    run(main())


def test_a_trainer_that_has_finished_ends_exploring() -> None:
    sync = Sync(at_pull=lambda step: setattr(sync, "finished", step == 2))
    made = run(explored(sync=sync))
    assert made.explorer.step == 2 and len(made.buffer) == 8


def test_an_explorer_alone_goes_on_by_its_own_state(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    folder.make()
    run(explored(taskset=make_taskset(total_steps=2), folder=folder))
    meta = json.loads(folder.explorer_meta.read_text())
    position = {"current_index": 4, "step": 2}
    assert meta == {"latest_iteration": 2, "taskset_states": [position]}
    made = run(explored(folder=folder))
    assert [step for part, step, _ in made.reports if part == "explorer"] == [3, 4]


def test_exploring_shows_one_rollout_of_each_step() -> None:
    shown = run(explored()).shown
    assert [(e.eid.batch, e.response_text) for e in shown] == [(i, "42") for i in range(1, 5)]


def test_a_step_is_in_the_buffer_while_a_later_one_is_under_way() -> None:
    release = asyncio.Event()

    async def second_waits(task: Any, model: Any) -> Any:
        if task.batch_id == 2:
            await release.wait()
        return await ask(task, model)

    async def main() -> None:
        made = make_explorer(workflow=second_waits, sync=Sync(interval=4), runners=8, max_pending=3)
        exploring = asyncio.ensure_future(made.explorer.explore())
        assert len(await made.buffer.take(4)) == 4  # step 1, though the border is at step 4
        await asyncio.sleep(0.05)
        assert made.explorer.step == 4 and len(made.buffer) == 0  # and 3 waits for 2: order
        assert made.explorer.state()["step"] == 1
        release.set()
        await exploring
        assert len(made.buffer) == 12
        await made.explorer.close()

    run(main())
