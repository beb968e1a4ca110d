"""Optim: learning rates and moves by hand, and settings that cannot be."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.samples import optimizer_of
from trireme.trainer.optim import Schedule, ScheduledOptimizer, make_optimizer


def test_the_warm_up_is_linear_and_starts_above_zero():
    schedule = Schedule(optimizer_of(lr=1.0, lr_warmup_steps=4), None)
    assert [schedule.lr(s) for s in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]


def test_the_warm_up_may_be_a_share_of_all_steps():
    settings = optimizer_of(lr=1.0, lr_warmup_steps=-1, lr_warmup_steps_ratio=0.5)
    assert [Schedule(settings, 4).lr(s) for s in range(3)] == [0.5, 1, 1]


def test_a_cosine_ends_at_its_floor_and_stays_there():
    schedule = Schedule(optimizer_of(lr=2.0, lr_scheduler_type="cosine", min_lr_ratio=0.1), 10)
    assert schedule.lr(0) == pytest.approx(2)
    assert schedule.lr(5) == pytest.approx(1.1)
    assert schedule.lr(10) == schedule.lr(50) == pytest.approx(0.2)


def test_a_line_falls_from_the_peak_after_the_warm_up_to_its_floor():
    settings = optimizer_of(lr=1.0, lr_scheduler_type="linear", lr_warmup_steps=2, min_lr_ratio=0.0)
    schedule = Schedule(settings, 6)
    assert [schedule.lr(s) for s in (0, 1, 2, 3, 4, 5, 6, 9)] == [0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0]


@pytest.mark.parametrize(
    "settings",
    [
        optimizer_of(lr_scheduler_type="cosine"),
        optimizer_of(lr_scheduler_type="linear"),
        optimizer_of(lr_warmup_steps=-1, lr_warmup_steps_ratio=0.1),
    ],
)
def test_a_schedule_of_unknown_length_is_refused(settings):
    with pytest.raises(ValueError, match="needs the number of train steps"):
        Schedule(settings, None)


@pytest.mark.parametrize("board", [100, 1 << 28])
def test_a_parked_state_comes_back_as_it_was_and_its_memory_is_kept(monkeypatch, board):
    monkeypatch.setattr("trireme.trainer.optim._BOARD", board)
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(n)) for n in (3, 50, 17)]
    parked = ScheduledOptimizer(weights, optimizer_of(), None, grad_clip=1.0)
    boards = []
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        parked.step()
        before = [t.clone() for v in parked.inner.state.values() for t in v.values()]
        parked.park()
        state = [t for v in parked.inner.state.values() for t in v.values() if t.numel() > 1]
        assert state and all(tensor.untyped_storage().nbytes() == 0 for tensor in state)
        boards.append([piece.data_ptr() for piece in parked._shelf])
        parked._unpark()
        after = [t for v in parked.inner.state.values() for t in v.values()]
        assert all(map(torch.equal, before, after))
    assert boards[0] == boards[1] == boards[2]
    assert len(boards[0]) == -(-2 * 4 * (3 + 50 + 17) // board)


def test_sgd_moves_against_the_gradient():
    p = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = make_optimizer([p], optimizer_of(lr=0.1, optimizer_type="sgd", weight_decay=0.0))
    p.grad = torch.tensor([2.0])
    optimizer.step()
    assert p.item() == pytest.approx(0.8)


@pytest.mark.parametrize(("clip", "moved"), [(1.0, [0.6, 0.8]), (10.0, [3.0, 4.0])])
def test_a_long_gradient_is_cut_to_the_clip_and_a_short_one_is_left(clip, moved):
    p = torch.nn.Parameter(torch.zeros(2))
    sgd = optimizer_of(lr=1.0, optimizer_type="sgd", weight_decay=0.0)
    optimizer = ScheduledOptimizer([p], sgd, None, grad_clip=clip)
    p.grad = torch.tensor([3.0, 4.0])
    assert optimizer.step() == (5.0, 1.0), "the norm before the cut"
    assert (-p).tolist() == pytest.approx(moved, rel=1e-5)


def test_two_steps_of_adamw_by_hand():
    lr, b1, b2, decay, epsilon = 0.1, 0.9, 0.99, 0.5, 1e-8
    p = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    settings = optimizer_of(lr=lr, betas=[b1, b2], weight_decay=decay)
    optimizer = ScheduledOptimizer([p], settings, None, grad_clip=100.0)
    x, m, v = 1.0, 0.0, 0.0
    for step, gradient in enumerate((2.0, -0.5), start=1):
        p.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        m, v = b1 * m + (1 - b1) * gradient, b2 * v + (1 - b2) * gradient**2
        x *= 1 - lr * decay  # decoupled: not a part of the gradient
        x -= lr * (m / (1 - b1**step)) / ((v / (1 - b2**step)) ** 0.5 + epsilon)
        assert p.item() == pytest.approx(x, rel=1e-6)


def test_a_resume_goes_on_with_the_moments_and_with_the_options_of_now():
    lr, epsilon = 0.1, 1e-8
    p = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    before = optimizer_of(lr=0.7, betas=[0.9, 0.99], weight_decay=0.5)
    first = ScheduledOptimizer([p], before, None, grad_clip=100.0)
    p.grad = torch.tensor([2.0], dtype=torch.float64)
    first.step()
    m, v, x = 0.1 * 2.0, 0.01 * 2.0**2, p.item()

    b1, b2, decay = 0.8, 0.95, 0.25  # changed between the two starts
    now = optimizer_of(lr=lr, betas=[b1, b2], weight_decay=decay)
    second = ScheduledOptimizer([p], now, None, grad_clip=100.0)
    second.load_state(first.state())
    assert second.steps == 1
    p.grad = torch.tensor([-0.5], dtype=torch.float64)
    second.step()
    m, v = b1 * m + (1 - b1) * -0.5, b2 * v + (1 - b2) * 0.25
    x -= lr * decay * x
    x -= lr * (m / (1 - b1**2)) / ((v / (1 - b2**2)) ** 0.5 + epsilon)
    assert p.item() == pytest.approx(x, rel=1e-6)
