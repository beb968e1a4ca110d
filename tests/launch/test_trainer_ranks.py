"""Trainer ranks: a plan's trainer on two processes trains, saves and goes on like one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.models import save_checkpoint
from tests.config.made import config_of, values
from tests.trainer.ranks import run
from tests.trainer.samples import experiences
from trireme.algorithms.recipes import get_recipe
from trireme.checkpoint.layout import JobFolder
from trireme.config import Plan
from trireme.launch.check import make_plans
from trireme.launch.models import follow_plan, lead_ranks, make_models
from trireme.trainer.led import Models
from trireme.trainer.ranks import RankSpec


def _plan(folder: Path, model: Path, algorithm: str) -> Plan:
    given = values(folder) | {"model": {"model_path": str(model), "max_model_len": 256}}
    given["model"]["max_response_tokens"] = 64
    given["algorithm"] = {
        "algorithm_type": algorithm,
        "repeat_times": 4,
        "optimizer": {"lr": 0.001},
        "critic": {"optimizer": {"lr": 0.001}, "warmup_steps": 1},
    }
    return make_plans(config_of(folder, given))[0]


def _train(models: Models, plan: Plan, job: Path) -> dict[str, Any]:
    """Two steps, a checkpoint, a step that is forgotten by loading it, and one more."""
    backend, train_state = models.backend, models.train_state
    folder, metrics = JobFolder(job), []

    def step(number: int) -> None:
        samples = experiences(number)
        for n, e in enumerate(samples):
            e.reward = float(n % 2)
        measured = models.train_step(samples, version=0)
        metrics.append({n: v for n, v in measured.items() if not n.startswith(("perf/", "time/"))})

    for number in (0, 1):
        step(number)
    save_checkpoint(
        folder,
        2,
        save=partial(backend.save, hf=True),
        save_critic=models.save_critic if train_state.critic else None,
        run_state={},
        model_dir=plan.model_path,
    )
    state = train_state.state()
    step(5)
    backend.load(folder.actor_dir(2))
    train_state.load_state(state)
    if train_state.critic:
        models.load_critic(folder.critic_dir(2))
    step(2)
    weights = {name: tensor.clone() for name, tensor in backend.each_weight()}
    return {"metrics": metrics, "weights": weights}


def _rank(place: RankSpec, folder: Path, model: Path, algorithm: str) -> dict[str, Any]:
    plan = _plan(folder / f"config_{place.rank}", model, algorithm)
    if place.rank:
        follow_plan(plan, plan.model_path, place)
        return {}
    recipe = get_recipe(plan.config.algorithm)
    models, leader = lead_ranks(plan, plan.model_path, recipe, place)
    trained = _train(models, plan, folder / "job")
    leader.close()
    return trained


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_plan_trains_on_two_ranks_as_on_one(algorithm, tiny_dir, tmp_path):
    plan, own = _plan(tmp_path / "alone", tiny_dir, algorithm), tmp_path / "alone" / "job"
    recipe = get_recipe(plan.config.algorithm)
    expected = _train(make_models(plan, plan.model_path, recipe), plan, own)
    got, _ = run(_rank, tmp_path / "ranks", tmp_path, tiny_dir, algorithm)
    assert set(got["weights"]) == set(expected["weights"])
    for name, weight in expected["weights"].items():
        assert torch.allclose(got["weights"][name], weight, atol=1e-5), name
    for ours, theirs in zip(got["metrics"], expected["metrics"], strict=True):
        assert ("critic/value_loss" in theirs) == (algorithm == "ppo")
        assert ours.pop("perf/micro_batches", 0) >= theirs.pop("perf/micro_batches", 0)
        assert ours == pytest.approx(theirs, abs=1e-5)
    if algorithm == "ppo":
        critic = Path("job", "global_step_2", "critic", "model.safetensors")
        saved = load_file(tmp_path / critic)
        for name, weight in load_file(tmp_path / "alone" / critic).items():
            assert torch.allclose(saved[name], weight, atol=1e-5), name
