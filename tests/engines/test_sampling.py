"""Sampling: the distribution drawn from, against probabilities worked out here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trireme.engines.engine import Sampling
from trireme.engines.sampling import (
    Drawn,
    RowParameters,
    draw,
    inverse_cdf,
    log_probabilities,
    stream_of,
    uniforms,
)

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])


def many(sampling: Sampling, count: int = 40_000, **options: Any) -> Drawn:
    rows = RowParameters.of([sampling] * count, torch.device("cpu"))
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return draw(LOGITS.expand(count, -1), rows, uniform, **options)


def expected(sampling: Sampling) -> torch.Tensor:
    """Probabilities by the definitions, one token at a time."""
    p = (LOGITS.double() / sampling.temperature).softmax(-1)
    order = sorted(range(len(p)), key=lambda i: -float(p[i]))
    kept = set(order[: sampling.top_k] if sampling.top_k > 0 else order)
    mass, nucleus = 0.0, set()
    total = sum(float(p[i]) for i in kept)
    for i in order:
        if i in kept and mass < sampling.top_p:
            nucleus.add(i)
            mass += float(p[i]) / total
    kept = {i for i in nucleus if float(p[i]) >= sampling.min_p * float(p[order[0]])}
    cut = torch.tensor([float(p[i]) if i in kept else 0.0 for i in range(len(p))])
    return cut / cut.sum()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(top_k=2),
        Sampling(top_p=0.7),
        Sampling(min_p=0.2),
        Sampling(temperature=1.3, top_k=4, top_p=0.9, min_p=0.1),
    ],
)
def test_tokens_come_with_the_probabilities_of_the_definitions(sampling: Sampling) -> None:
    drawn = many(sampling)
    shares = torch.bincount(drawn.tokens, minlength=5) / len(drawn.tokens)
    assert torch.allclose(shares, expected(sampling), atol=1e-4)
    own = expected(sampling).log()[drawn.tokens]
    assert torch.allclose(drawn.sampler_logprobs, own.float(), atol=1e-5)
    raw = (LOGITS / sampling.temperature).log_softmax(-1)[drawn.tokens]
    assert torch.allclose(drawn.logprobs, raw, atol=1e-6)


def test_the_tail_of_a_large_vocabulary_counts() -> None:
    """torch's own log_softmax differs by 8e-6 in the mean here: small probabilities are lost."""
    logits = 4 * torch.randn(16, 49_152, generator=torch.Generator().manual_seed(0))
    apart = (log_probabilities(logits).double() - logits.double().log_softmax(-1)).abs()
    assert apart.mean() < 2e-6
    rows = RowParameters.of([Sampling()] * 16, torch.device("cpu"))
    drawn = draw(logits, rows, torch.linspace(0.01, 0.99, 16, dtype=torch.float64))
    exact = logits.double().log_softmax(-1).gather(1, drawn.tokens[:, None])[:, 0]
    assert (drawn.logprobs.double() - exact).abs().max() < 4e-6


def test_a_penalty_bends_seen_tokens_and_greedy_takes_the_likeliest() -> None:
    seen = torch.tensor([[True, False, False, False, True]])
    bent = LOGITS.clone()
    bent[0], bent[4] = bent[0] / 2, bent[4] * 2
    drawn = many(Sampling(repetition_penalty=2.0), seen=seen.expand(40_000, -1))
    shares = torch.bincount(drawn.tokens, minlength=5) / len(drawn.tokens)
    assert torch.allclose(shares, bent.softmax(-1), atol=1e-4)
    greedy = many(Sampling(temperature=0), count=2)
    assert greedy.tokens.tolist() == [0, 0] and greedy.sampler_logprobs.tolist() == [0.0, 0.0]
    assert torch.allclose(greedy.logprobs, LOGITS.log_softmax(-1)[:1])


def test_rows_with_different_parameters_do_not_touch_each_other() -> None:
    rows = [Sampling(), Sampling(top_k=1), Sampling(temperature=0), Sampling(top_p=0.1)]
    uniform = torch.full((4,), 0.999, dtype=torch.float64)
    parameters = RowParameters.of(rows, torch.device("cpu"))
    drawn = draw(LOGITS.expand(4, -1), parameters, uniform)
    assert drawn.tokens.tolist() == [4, 0, 0, 0]


def splitmix64(stream: int, position: int) -> float:
    """The same number by Python's integers, as the generator's authors give it."""
    bits = (stream + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
    return ((bits ^ bits >> 31) >> 11) / 2**53


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """How likely counts as far from the expected ones are."""
    distance = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, distance.double() / 2))


def of_requests(count: int, length: int) -> torch.Tensor:
    """[count, length] numbers of requests whose keys follow each other, eight to a task."""
    streams = torch.tensor([stream_of(42, ((1, i // 8, i % 8, 0),), 0) for i in range(count)])
    positions = torch.arange(length).repeat(count)
    return uniforms(streams.repeat_interleave(length), positions).view(count, length)


def test_a_token_s_number_depends_on_seed_key_sample_and_position_alone() -> None:
    names = [(1, (1, 2, 3, 0), 0), (1, (1, 2, 3, 0), 1), (2, (1, 2, 3, 0), 0), (1, (1,), 0)]
    streams = [stream_of(*name) for name in names] + [0, -1, 2**63 - 1, -(2**63)]
    positions = [0, 1, 1000, 2**40]
    pairs = [(stream, position) for stream in streams for position in positions]
    made = uniforms(*(torch.tensor(column) for column in zip(*pairs, strict=True)))
    assert made.tolist() == [splitmix64(*pair) for pair in pairs]
    assert len(set(made.tolist())) == len(pairs)
    assert splitmix64(0, 0) == (0xE220A8397B1DCDAF >> 11) / 2**53  # its first number, published


def test_numbers_are_even_and_neighbours_have_nothing_to_do_with_each_other() -> None:
    made = of_requests(1000, 500)
    cells = torch.bincount((made.flatten() * 1000).long(), minlength=1000)
    assert chi_square(cells, torch.full((1000,), made.numel() / 1000)) > 0.001
    spread = (made - 0.5) * 12**0.5
    neighbours = [(spread[:, :-1], spread[:, 1:]), (spread[:-1], spread[1:])]
    for one, other in [*neighbours, (spread[:, :-8], spread[:, 8:])]:
        assert abs(float((one * other).mean())) * one.numel() ** 0.5 < 3.5  # deviations
    for one, other in neighbours:
        cells = ((one / 12**0.5 + 0.5) * 32).long() * 32 + ((other / 12**0.5 + 0.5) * 32).long()
        counts = torch.bincount(cells.flatten(), minlength=1024)
        assert chi_square(counts, torch.full((1024,), one.numel() / 1024)) > 0.001


def test_draws_follow_the_distribution_and_the_running_sum_by_hand() -> None:
    torch.manual_seed(0)
    logprobs = (torch.randn(1300) * 2).log_softmax(-1)
    logprobs[700:900] = -torch.inf  # across two blocks of tokens
    logprobs[1290:] = -torch.inf
    made = of_requests(200, 200).flatten()
    tokens = inverse_cdf(logprobs.expand(len(made), -1), made)
    p = logprobs.double().exp()
    sums = p.cumsum(0) / p.sum()
    assert torch.equal(tokens, torch.searchsorted(sums, made, right=True))
    likely = p * len(made) / p.sum() > 5
    counts = torch.bincount(tokens, minlength=1300)
    both = [
        torch.cat((x[likely], x[~likely].sum()[None]))
        for x in (counts, sums.diff(prepend=p[:1] * 0) * len(made))
    ]
    assert chi_square(*both) > 0.001
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert inverse_cdf(logprobs.expand(2, -1), ends).tolist() == [0, 1289]


@pytest.mark.parametrize("count", [10, 1300])
def test_a_row_that_is_not_finite_gives_a_token_that_exists_and_leaves_the_others_alone(
    count: int,
) -> None:
    """What is made of its log-probability names it: an index error here would name nothing."""
    torch.manual_seed(0)
    logprobs = torch.randn(3, count).log_softmax(-1)
    uniform = torch.full((3,), 0.5, dtype=torch.float64)
    whole = inverse_cdf(logprobs, uniform)
    logprobs[1] = torch.nan
    tokens = inverse_cdf(logprobs, uniform)
    assert 0 <= tokens[1] < count
    assert tokens[[0, 2]].equal(whole[[0, 2]])


def test_a_few_rows_at_a_time_are_drawn_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logprobs = torch.randn(50, 1000).log_softmax(-1)
    made = of_requests(50, 1)[:, 0]
    whole = inverse_cdf(logprobs, made)
    monkeypatch.setattr("trireme.engines.sampling._DRAWN_AT_ONCE", 7000)
    assert torch.equal(inverse_cdf(logprobs, made), whole)


@pytest.mark.gpu
def test_a_gpu_makes_the_same_numbers_and_draws_the_same_tokens() -> None:
    streams = torch.tensor([stream_of(1, (i,), 0) for i in range(1000)])
    positions = torch.arange(1000) * 7919
    made = uniforms(streams, positions)
    assert torch.equal(uniforms(streams.cuda(), positions.cuda()).cpu(), made)
    logprobs = (torch.randn(1000, 1300) * 2).log_softmax(-1)
    tokens = inverse_cdf(logprobs.cuda(), made.cuda()).cpu()
    assert torch.equal(tokens, inverse_cdf(logprobs, made))
