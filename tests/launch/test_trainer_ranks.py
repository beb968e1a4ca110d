"""Trainer ranks: a plan's trainer on two processes trains, saves and goes on like one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.config.made import config_of, values
from tests.trainer.ranks import run
from tests.trainer.samples import experiences
from trireme.checkpoint.layout import JobFolder
from trireme.checkpoint.save import save_checkpoint
from trireme.config import Plan, make_plans
from trireme.launch.parts import training
from trireme.launch.trainer_ranks import TrainerRanks, follow_plan
from trireme.trainer.backend import TorchBackend
from trireme.trainer.fsdp2 import Fsdp2Backend
from trireme.trainer.ranks import Place
from trireme.trainer.step import train_step


def _plan(folder: Path, model: Path) -> Plan:
    given = values(folder) | {"model": {"model_path": str(model), "max_model_len": 256}}
    given["model"]["max_response_tokens"] = 64
    return make_plans(config_of(folder, given, "algorithm.optimizer.lr=0.001"))[0]


def _train(backend: TorchBackend | Fsdp2Backend, plan: Plan, job: Path) -> dict[str, Any]:
    """Two steps, a checkpoint, a step that is forgotten by loading it, and one more."""
    recipe = training.make_recipe(plan)
    for number in (0, 1):
        train_step(backend, recipe, experiences(number), version=0)
    save = partial(backend.save, hf=True)
    save_checkpoint(JobFolder(job), 2, save=save, run_state={}, model_dir=plan.model_path)
    train_step(backend, recipe, experiences(5), version=0)
    backend.load(job / "global_step_2" / "actor")
    train_step(backend, recipe, experiences(2), version=0)
    return {name: tensor.clone() for name, tensor in backend.each_weight()}


def _rank(place: Place, folder: Path, model: Path) -> dict[str, Any]:
    plan = _plan(folder / f"config_{place.rank}", model)
    if place.rank:
        follow_plan(plan, plan.model_path, place)
        return {}
    ranks = TrainerRanks(plan, plan.model_path, training.make_recipe(plan), place)
    weights = _train(ranks.backend, plan, folder / "job")
    ranks.close()
    return weights


def test_a_plan_trains_on_two_ranks_as_on_one(tiny_dir, tmp_path):
    plan = _plan(tmp_path / "alone", tiny_dir)
    alone = training.make_backend(plan, plan.model_path, training.make_recipe(plan))
    expected = _train(alone, plan, tmp_path / "alone" / "job")
    got, _ = run(_rank, tmp_path / "ranks", tmp_path, tiny_dir)
    assert set(got) == set(expected)
    for name, weight in expected.items():
        assert torch.allclose(got[name], weight, atol=1e-5), name
