"""Pipeline: a raw copy before, group-relative advantages after, metrics under its own name."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from trireme.buffer.record import Record
from trireme.experience import EID, Experience
from trireme.pipeline.operators import OperatorFailed, make_operator
from trireme.pipeline.pipeline import Pipeline, left_out_by
from trireme.registry import ALGORITHMS, OPERATORS

GRPO = ALGORITHMS.get("grpo")
SFT = ALGORITHMS.get("sft")


def group(rewards: list[float], task: int = 0) -> list[Experience]:
    return [
        Experience([1, 2, 3], prompt_length=1, reward=reward, eid=EID(1, task, i))
        for i, reward in enumerate(rewards)
    ]


def test_advantages_are_of_each_group_alone() -> None:
    kept, metrics = asyncio.run(Pipeline(GRPO).run(group([0.0, 1.0]) + group([5.0, 5.0], task=1)))
    scores = [e.advantages[-1].item() for e in kept if e.advantages is not None]
    assert scores == pytest.approx([-0.7071, 0.7071, 0, 0], abs=1e-3)
    assert metrics and all(name.startswith("experience_pipeline/") for name in metrics)


def test_a_recipe_without_advantages_lets_experiences_through() -> None:
    given = group([0.0, 1.0])
    kept, metrics = asyncio.run(Pipeline(SFT).run(given))
    assert kept == given and metrics["experience_pipeline/kept"] == 2


def told(rows: dict[int, float], taskset: int = 0) -> tuple[str, dict[str, object]]:
    """An operator that tells the selector this of one taskset."""
    of = {"indices": list(rows), "values": list(rows.values())}
    return f"{__name__}:says", {"of": {taskset: of}}


def says(experiences: list[Experience], *, of: Any) -> tuple[list[Experience], Any]:
    return experiences, {"selector_metric": of}


def test_what_several_operators_tell_is_put_together() -> None:
    pipeline = piped(told({0: 0.5, 1: 0.75}), told({0: 0.25}), told({3: 1.0}, taskset=1))
    asyncio.run(pipeline.run(group([1.0, 0.0]), sizes={0: 2, 1: 4}))
    assert pipeline.pass_rates == {0: {0: 0.25, 1: 0.75}, 1: {3: 1.0}}


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (told({99: 0.25}), "the row 99 of taskset 0 in selector_metric: expected rows from 0 to 7"),
        (told({-1: 0.25}), "the row -1 of taskset 0 in selector_metric: expected rows from 0 to 7"),
        (told({1: 1.0}, taskset=7), "the taskset 7 in selector_metric: expected one of 0, 1"),
    ],
)
def test_rows_that_no_taskset_has_are_not_told(wrong: tuple[str, Any], why: str) -> None:
    with pytest.raises(OperatorFailed, match=f"operator '.*:says' returned {why}"):
        asyncio.run(piped(wrong).run(group([1.0, 0.0]), sizes={0: 8, 1: 2}))


def test_the_raw_copy_is_of_what_came_in(tmp_path: Path) -> None:
    lines = tmp_path / "raw.jsonl"
    record = Record(lines=lines)
    asyncio.run(Pipeline(GRPO, raw=record).run(group([0.0, 1.0])))
    record.close()
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [row["reward"] for row in rows] == [0.0, 1.0]


def test_nothing_in_gives_nothing_out() -> None:
    kept, _ = asyncio.run(Pipeline(GRPO).run([]))
    assert kept == []


def piped(*operators: tuple[str, dict[str, object]]) -> Pipeline:
    made = [make_operator(OPERATORS, name, args, "operators") for name, args in operators]
    return Pipeline(GRPO, operators=made)


def test_operators_come_before_the_advantages_and_in_their_order() -> None:
    pipeline = piped(("reward_filter", {"threshold": 0.5}), ("reward_std_filter", {}))
    given = group([0.0, 1.0, 2.0]) + group([0.0, 1.0], task=1)
    kept, metrics = asyncio.run(pipeline.run(given))
    assert [e.eid.rid for e in kept] == ["1/0/1", "1/0/2"]
    scores = [e.advantages[-1].item() for e in kept if e.advantages is not None]
    assert scores == pytest.approx([-0.7071, 0.7071], abs=1e-3)
    assert metrics["experience_pipeline/reward_filter/dropped"] == 2.0
    assert metrics["experience_pipeline/reward_std_filter/dropped"] == 1.0
    assert metrics["experience_pipeline/emptied_groups"] == 1.0


def test_a_step_may_be_emptied() -> None:
    kept, metrics = asyncio.run(piped(("reward_filter", {"threshold": 9})).run(group([0.0, 1.0])))
    assert kept == [] and metrics["experience_pipeline/emptied_groups"] == 1.0


def test_pass_rates_are_those_at_the_operator_s_place() -> None:
    shaping = {"stats_key": "half", "op_type": "MUL"}
    pipeline = piped(
        ("reward_shaping_mapper", {"reward_shaping_configs": [shaping]}),
        ("pass_rate_calculator", {}),
        ("reward_filter", {"threshold": 9}),
    )
    given = group([1.0, 1.0])
    for experience in given:
        experience.info |= {"half": 0.5, "task_index": {"taskset_id": 0, "index": 7}}
    assert pipeline.pass_rates is None
    asyncio.run(pipeline.run(given))
    assert pipeline.pass_rates == {0: {7: 0.5}}


def tells(experiences: list[Experience], *, values: Any = (0.25,)) -> tuple[list[Experience], Any]:
    """An operator of a user that says itself how often a row was solved."""
    return experiences, {"seen": 1, "selector_metric": {0: {"indices": [7], "values": values}}}


def test_an_operator_tells_the_selector_what_it_measured() -> None:
    def run(**args: Any) -> tuple[Any, dict[str, float]]:
        pipeline = piped((f"{__name__}:tells", args))
        _, metrics = asyncio.run(pipeline.run(group([1.0, 0.0])))
        return pipeline.pass_rates, metrics

    rates, metrics = run()
    assert rates == {0: {7: 0.25}}
    assert metrics[f"experience_pipeline/{__name__}:tells/seen"] == 1
    assert not any("selector_metric" in name for name in metrics)
    with pytest.raises(OperatorFailed, match="as selector_metric: expected "):
        run(values=[0.5, 0.5])


def test_the_raw_copy_does_not_see_what_operators_change(tmp_path: Path) -> None:
    record = Record(lines=tmp_path / "raw.jsonl")
    pipeline = piped(("length_penalty", {"max_length": 2, "cache_length": 1}))
    pipeline.raw = record
    kept, _ = asyncio.run(pipeline.run(group([1.0, 3.0])))
    record.close()
    rows = [json.loads(line) for line in (tmp_path / "raw.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in rows] == [1.0, 3.0]
    assert [e.reward for e in kept] == [0.0, 2.0]


def test_a_group_is_as_old_as_its_oldest_token() -> None:
    given = group([0.0, 1.0]) + group([0.0, 1.0], task=1)
    for experience, version in zip(given, (3, 5, 4, 4), strict=True):
        experience.versions = torch.tensor([-1, version, version + 1], dtype=torch.int32)
    kept, _ = asyncio.run(Pipeline(GRPO).run(given))
    assert [e.info["group_version"] for e in kept] == [3, 3, 4, 4]


class Prepares:
    """An operator that counts what is called."""

    calls: ClassVar[list[str]] = []

    def prepare(self) -> None:
        self.calls.append("prepare")

    def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        self.calls.append("process")
        return experiences, {}

    def close(self) -> None:
        self.calls.append("close")


def test_an_operator_is_prepared_once_and_closed_where_it_was_prepared() -> None:
    async def main(steps: int) -> list[str]:
        Prepares.calls.clear()
        pipeline = piped((f"{__name__}:Prepares", {}))
        for _ in range(steps):
            await pipeline.run(group([1.0, 0.0]))
        await pipeline.close()
        return list(Prepares.calls)

    assert asyncio.run(main(2)) == ["prepare", "process", "process", "close"]
    assert asyncio.run(main(0)) == []


class PreparedLate(Prepares):
    """An operator that cannot be prepared the first time."""

    def prepare(self) -> None:
        super().prepare()
        if self.calls.count("prepare") == 2:
            raise OSError("no model")


def test_an_operator_that_could_not_be_prepared_is_prepared_at_the_next_call() -> None:
    """`mode: serve` answers a failure, and is asked again."""

    async def main() -> list[str]:
        Prepares.calls.clear()
        pipeline = piped((f"{__name__}:Prepares", {}), (f"{__name__}:PreparedLate", {}))
        with pytest.raises(OperatorFailed, match="no model"):
            await pipeline.run(group([1.0, 0.0]))
        await pipeline.run(group([1.0, 0.0]))
        await pipeline.close()
        return list(Prepares.calls)

    prepared, used = ["prepare"] * 3, ["process"] * 2
    assert asyncio.run(main()) == [*prepared, *used, "close", "close"]


def test_rewards_that_spoil_advantages_are_counted_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rewards = [1.0, float("nan"), float("inf"), -1e20, 0.0]
    caplog.set_level("INFO")
    _, metrics = asyncio.run(Pipeline(SFT).run(group(rewards)))
    assert metrics["experience_pipeline/not_finite"] == 3
    assert "rewards of 1/0/1/0 (nan), 1/0/2/0 (inf), 1/0/3/0 (-1e+20)" in caplog.text
    without = group([1.0])
    without[0].reward = None
    assert asyncio.run(Pipeline(SFT).run(without))[1]["experience_pipeline/not_finite"] == 0


def test_what_dynamic_sampling_left_out_is_said_with_its_threshold() -> None:
    name = "experience_pipeline/dapo_dynamic_sampling"
    row = {"experience_pipeline/made": 24.0, "experience_pipeline/kept": 0.0}
    row |= {f"{name}/dropped": 24.0, f"{name}/all_right": 5.0, f"{name}/all_wrong": 1.0}
    assert left_out_by([row]).endswith(
        "dapo_dynamic_sampling left out 24 (5 groups are all right and 1 all wrong: its "
        "`correct_threshold` says which rewards are right)"
    )
