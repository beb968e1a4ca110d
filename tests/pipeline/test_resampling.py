"""Resampling: a train batch is filled up after so many further explore steps, and not before."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from tests.explorer.made import Sync, ask, make_explorer, make_taskset, run
from tests.pipeline.test_pipeline import group
from trireme.algorithms.recipes import Recipe, get_recipe
from trireme.experience import Experience
from trireme.pipeline.pipeline import Pipeline, Resampling


def recipe_of(**args: Any) -> Recipe:
    options = {"max_resample_times": 2} | args
    return get_recipe(SimpleNamespace(algorithm_type="dapo", advantage_fn_args=options))


def made(most: int, *, batch_size: int = 4, rollouts: int = 4) -> Pipeline:
    resampling = Resampling(most, batch_size=batch_size, rollouts=rollouts)
    return Pipeline(recipe_of(max_resample_times=most), resampling=resampling)


def step(pipeline: Pipeline, *groups: list[float]) -> tuple[list[Experience], dict[str, float]]:
    """One explore step of these groups, which is put."""
    experiences = [e for n, rewards in enumerate(groups) for e in group(rewards, task=n)]
    kept, metrics = asyncio.run(pipeline.run(experiences))
    assert pipeline.resampling is not None
    pipeline.resampling.put()
    return kept, {name.partition("/")[2]: value for name, value in metrics.items()}


def advantages(experiences: list[Experience]) -> list[float]:
    return [float(e.advantages[-1]) for e in experiences if e.advantages is not None]


EQUAL, DIFFER = [0.0, 0.0], [0.0, 1.0]


def test_groups_of_equal_rewards_are_trained_after_so_many_further_steps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pipeline = made(2)
    for times in (0, 1):
        kept, metrics = step(pipeline, EQUAL, EQUAL)
        assert kept == [] and metrics["resample_times"] == times
        assert metrics["refilled_count"] == 0 and metrics["filtered_count"] == 4
    with caplog.at_level(logging.WARNING):
        kept, metrics = step(pipeline, EQUAL, EQUAL)
    assert advantages(kept) == [0.0] * 4
    assert metrics["resample_times"] == 2 and metrics["refilled_count"] == 4
    assert metrics["filtered_count"] == 0 and metrics["kept"] == 4
    assert "has 0 experiences of groups whose rewards differ after 2 further" in caplog.text
    assert "expected 4; 4 of groups with equal rewards are trained" in caplog.text
    kept, metrics = step(pipeline, EQUAL, EQUAL)  # the next batch begins to count anew
    assert kept == [] and metrics["resample_times"] == 0


def test_only_what_is_missing_is_filled_up_in_whole_groups() -> None:
    pipeline = made(1)
    kept, _ = step(pipeline, EQUAL, DIFFER)
    assert [e.eid.task for e in kept] == [1, 1]
    kept, metrics = step(pipeline, EQUAL, EQUAL)
    assert [e.eid.task for e in kept] == [0, 0] and metrics["filtered_count"] == 2
    full = made(1)
    step(full, EQUAL, DIFFER)
    kept, metrics = step(full, DIFFER, EQUAL)
    assert [e.eid.task for e in kept] == [0, 0] and metrics["refilled_count"] == 0


def test_without_further_steps_nothing_is_left_out() -> None:
    kept, metrics = step(made(0), EQUAL, DIFFER)
    assert advantages(kept)[:2] == [0.0, 0.0] and metrics["refilled_count"] == 2


def test_a_batch_of_several_explore_steps_counts_only_those_beyond() -> None:
    pipeline = made(1, batch_size=8)
    for times in (0, 0):
        assert step(pipeline, EQUAL, EQUAL)[1]["resample_times"] == times
    assert len(step(pipeline, EQUAL, EQUAL)[0]) == 4  # all there are
    assert len(step(pipeline, EQUAL, EQUAL)[0]) == 4
    assert step(pipeline, EQUAL, EQUAL)[0] == []


def test_several_batches_of_an_explore_step_carry_the_rest_over() -> None:
    pipeline = made(1, batch_size=2)
    assert len(step(pipeline, DIFFER, [0.0, 1.0, 1.0])[0]) == 5
    assert pipeline.resampling is not None
    assert pipeline.resampling.state() == {"steps": 0, "collected": 1}


@pytest.mark.parametrize(
    ("waiting", "batch_size", "after"),
    [
        (2, 4, (1, 2)),
        (6, 4, (1, 2)),  # a whole batch, too
        (0, 4, (0, 0)),  # trained, as the run's last
        (2, 2, (0, 0)),  # enough for a batch of the present size
        (None, 4, (1, 2)),
    ],
)
def test_a_resumed_run_fills_up_what_is_missing_beyond_the_buffer(
    waiting: int | None, batch_size: int, after: tuple[int, int]
) -> None:
    pipeline = made(1)
    step(pipeline, EQUAL, DIFFER)
    assert pipeline.resampling is not None
    resumed = made(1, batch_size=batch_size).resampling
    assert resumed is not None
    resumed.load_state(pipeline.resampling.state(), waiting)
    assert tuple(resumed.state().values()) == after


def test_rewards_that_are_no_finite_numbers_fill_nothing_up() -> None:
    kept, metrics = step(made(0), [float("nan"), 0.0], EQUAL)
    assert [e.eid.task for e in kept] == [1, 1] and metrics["refilled_count"] == 2


def of_mine(rewards: Tensor, groups: Tensor, *, margin: float = 0.0) -> Tensor:
    """NaN for groups of equal rewards."""
    return rewards.where(rewards > margin, float("nan"))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"algorithm_type": "grpo"}, "advantage_fn 'grpo' leaves none out"),
        ({"algorithm_type": "ppo"}, "advantage_fn 'ppo' leaves none out"),
        ({"advantage_fn_args": {"std_threshold": None}}, "'dapo' leaves none out"),
        ({"advantage_fn": f"{__name__}:of_mine"}, "has no option std_threshold, by which it"),
        ({"advantage_fn_args": {"duplicate_experiences": True}}, "fills the batch with copies"),
        ({"sample_strategy": "explore_step"}, "no effect with sample_strategy 'explore_step'"),
        ({"advantage_fn_args": {"max_resample_times": -1}}, "max_resample_times"),
        ({"advantage_fn_args": {"max_resample_times": 1.5}}, "max_resample_times"),
    ],
)
def test_a_limit_that_no_batch_waits_for_is_refused(given: Any, sentence: str) -> None:
    args = {"max_resample_times": 2} | given.pop("advantage_fn_args", {})
    algorithm = {"algorithm_type": "dapo", "advantage_fn_args": args} | given
    with pytest.raises(ValueError, match="max_resample_times") as caught:
        get_recipe(SimpleNamespace(**algorithm))
    assert sentence in str(caught.value)


def test_a_resumed_explorer_counts_on_where_the_first_one_stood() -> None:
    async def never(task: Any, model: Any) -> Any:
        experiences = await ask(task, model)
        experiences[0].reward = 0.0
        return experiences

    def explorer(**options: Any) -> Any:
        one = make_explorer(**options)
        one.explorer.pipeline = made(2)
        return one

    async def main() -> tuple[Any, Any]:
        whole = explorer(workflow=never)
        await whole.explorer.explore()
        states: list[dict[str, Any]] = []
        sync = Sync(at_pull=lambda step: states.append(cut.explorer.state()))
        tasks = make_taskset(never, total_steps=2)
        cut = explorer(workflow=never, sync=sync, taskset=tasks)
        with pytest.raises(RuntimeError):  # none of its steps left anything
            await cut.explorer.explore()
        assert [state["resampling"]["steps"] for state in states] == [1, 2]
        resumed = explorer(workflow=never)
        resumed.explorer.load_state(states[0])
        await resumed.explorer.explore()
        return await whole.buffer.take(99), await resumed.buffer.take(99)

    expected, found = run(main())
    assert [e.eid for e in found] == [e.eid for e in expected]
    assert {e.eid.batch for e in found} == {3}  # of four steps: the next batch had only one
