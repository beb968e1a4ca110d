"""`trireme run --compare` trains the supervised stage for as long as the reinforcement took."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.config.test_stages import staged, warmup
from trireme.config import Plan
from trireme.launch import run
from trireme.launch.check import make_plans
from trireme.launch.results import StageResult


@pytest.mark.parametrize(("of_sft", "of_rl", "steps"), [(0, 0, 20), (5, 0, 10), (0, 60, 50)])
def test_the_comparison_trains_on_from_the_supervised_stage_for_the_time_of_the_other(
    of_sft: int, of_rl: int, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seconds are those of the last attempt, which may have begun in the middle."""
    plans = make_plans(staged(tmp_path, warmup(tmp_path)))
    ran: list[tuple[Plan, str]] = []
    monkeypatch.setattr(run, "run_plan", lambda plan, model, *_, **__: ran.append((plan, model)))
    stop: Any = SimpleNamespace(run=lambda _: "the result")
    console: Any = SimpleNamespace(stage=lambda *_: None)
    supervised = StageResult(
        "sft_warmup", "train", "sft", steps=10, phases={"train": 2.0}, model_dir="m",
        resumed_from=of_sft,
    )  # fmt: skip
    reinforced = StageResult(
        "rft", "both", "rft", steps=100, phases={"explore": 3.0, "train": 1.0}, resumed_from=of_rl
    )
    assert run.more_supervised(plans, [supervised, reinforced], console, stop) == "the result"
    ((plan, model),) = ran
    assert (plan.steps.train, plan.steps.schedule, model) == (steps, steps, "m")
    assert plan.steps.train_batch_size == plans[0].steps.train_batch_size
    assert plan.job_dir == plans[0].root_dir / run.COMPARISON and plan.model_from_stage == 0
