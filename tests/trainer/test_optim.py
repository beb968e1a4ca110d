"""Optim: learning rates by hand, and settings that cannot be."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.samples import Settings
from trireme.trainer.optim import Schedule, make_optimizer


def test_the_warm_up_is_linear_and_starts_above_zero():
    schedule = Schedule(Settings(lr=1.0, lr_warmup_steps=4), None)
    assert [schedule.lr(s) for s in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]


def test_the_warm_up_may_be_a_share_of_all_steps():
    settings = Settings(lr=1.0, lr_warmup_steps=-1, lr_warmup_steps_ratio=0.5)
    assert [Schedule(settings, 4).lr(s) for s in range(3)] == [0.5, 1, 1]


def test_a_cosine_ends_at_its_floor_and_stays_there():
    schedule = Schedule(Settings(lr=2.0, lr_scheduler_type="cosine", min_lr_ratio=0.1), 10)
    assert schedule.lr(0) == pytest.approx(2)
    assert schedule.lr(5) == pytest.approx(1.1)
    assert schedule.lr(10) == schedule.lr(50) == pytest.approx(0.2)


@pytest.mark.parametrize(
    "settings",
    [Settings(lr_scheduler_type="cosine"), Settings(lr_warmup_steps=-1, lr_warmup_steps_ratio=0.1)],
)
def test_a_schedule_of_unknown_length_is_refused(settings):
    with pytest.raises(ValueError, match="needs the number of train steps"):
        Schedule(settings, None)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="expected constant or cosine"):
        Schedule(Settings(lr_scheduler_type="linear"), 5)
    with pytest.raises(ValueError, match="expected adam, adamw or sgd"):
        make_optimizer([], Settings(optimizer_type="lion"))


def test_sgd_moves_against_the_gradient():
    p = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = make_optimizer([p], Settings(lr=0.1, optimizer_type="sgd", weight_decay=0.0))
    p.grad = torch.tensor([2.0])
    optimizer.step()
    assert p.item() == pytest.approx(0.8)
