"""Nodes cut a trie so that a layer with a state computes each token once, from the state of its
parent's end.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.trainer.samples import experiences
from tests.trainer.test_attention_kernels import rows_of
from trireme.batch import Batch, flatten, of_tokens
from trireme.engines.torch.recurrent import State, States
from trireme.trainer.pack import pack

KERNEL = torch.tensor([0.3, -0.5, 0.7, 1.1], dtype=torch.float64)
"""Weights of the last four inputs, the newest last."""


def mixer(hidden: Tensor, begin: State | None) -> tuple[Tensor, State]:
    """A convolution over four inputs, then a state that decays: [N, S, W] -> the same."""
    states = States(begin)
    length = hidden.shape[1]
    inputs = states.update_conv_state(hidden.transpose(1, 2), 0, conv_kernel_size=4)
    padded = torch.nn.functional.pad(inputs, (3, 0))
    windows = padded.unfold(2, 4, 1)[:, :, -length:]
    mixed = (windows * KERNEL).sum(-1)
    state = states.get_recurrent_state(0)
    state = torch.zeros_like(mixed[..., 0]) if state is None else state
    out = []
    for t in range(length):
        state = 0.8 * state + mixed[..., t].tanh()
        out.append(state * mixed[..., t])
    states.update_recurrent_state(state, 0)
    return torch.stack(out, 1), states.end


def by_paths(batch: Batch, table: Tensor) -> list[Tensor]:
    """Each row alone, in plain loops."""
    rows = []
    for ids in batch.tokens:
        state, out = torch.zeros(table.shape[1], dtype=table.dtype), []
        for t in range(len(ids)):
            last = [table[ids[t - k]] if t >= k else torch.zeros_like(state) for k in range(4)]
            mixed = (torch.stack(last, -1) * KERNEL.flip(0)).sum(-1)
            state = 0.8 * state + torch.tanh(mixed)
            out.append(state * mixed)
        rows.append(torch.stack(out))
    return rows


def batches() -> list[Batch]:
    rng = random.Random(1)
    steps = [[3, 4, 5], [3, 4, 5, 6], [3, 4, 5, 6, 7, 8], [3, 4, 9], [3, 4], [5, 5, 5]]
    return [flatten(experiences()), of_tokens(steps), *(of_tokens(rows_of(rng)) for _ in range(8))]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("batch", batches())
def test_values_and_gradients_are_those_of_each_row_alone(batch: Batch, share: bool) -> None:
    layout = pack(batch, share_prefix=share, nodes=True)
    assert layout.nodes is not None
    torch.manual_seed(0)
    table = torch.randn(100, 3, dtype=torch.float64, requires_grad=True)
    got = layout.nodes.carry(mixer, 0, table[layout.tokens][None])[0][layout.predecessors]
    ends = zip(batch.sample_ids.tolist(), batch.positions.tolist(), strict=True)
    rows = by_paths(batch, table)
    expected = torch.stack([rows[row][at - 1] for row, at in ends])
    assert float((got - expected).detach().abs().max()) < 1e-12
    weights = torch.randn_like(expected)
    one, other = (torch.autograd.grad((x * weights).sum(), table)[0] for x in (got, expected))
    assert float((one - other).abs().max()) < 1e-12


@pytest.mark.parametrize("batch", batches())
def test_every_token_is_computed_once_and_a_continued_node_has_no_padding(batch: Batch) -> None:
    layout = pack(batch, nodes=True)
    assert layout.nodes is not None
    flat = torch.cat([call.tokens.reshape(-1) for call in layout.nodes.calls])
    assert flat[layout.nodes.place].equal(torch.arange(len(layout.tokens)))
    for call in layout.nodes.calls:
        if call.continued:
            assert len(call.tokens.unique()) == call.tokens.numel()


def test_equal_rollouts_of_a_prompt_are_two_calls() -> None:
    """One for the prompt and one for all replies, whatever their number."""
    prompt = list(range(10, 40))
    rows = [[*prompt, n, *range(50, 51 + n % 3)] for n in range(16)]
    layout = pack(of_tokens(rows), nodes=True)
    assert layout.nodes is not None
    assert [call.continued for call in layout.nodes.calls] == [True, False]
    assert layout.nodes.calls[1].tokens.shape[0] == 16


def test_a_layout_without_mixers_has_no_nodes() -> None:
    assert pack(flatten(experiences())).nodes is None
