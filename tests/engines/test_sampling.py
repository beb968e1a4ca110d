"""Sampling: the distribution drawn from, against probabilities worked out here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trireme.engines.engine import Sampling
from trireme.engines.sampling import Drawn, RowParameters, Stream, draw

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


def test_a_stream_depends_on_seed_key_and_sample_alone() -> None:
    first = [Stream(1, (1, 2, 3, 0), 0).next() for _ in range(2)]
    assert first[0] == first[1]
    others = {Stream(*a).next() for a in [(1, (1, 2, 3, 0), 1), (2, (1, 2, 3, 0), 0), (1, (1,), 0)]}
    assert len(others | set(first)) == 4
    stream = Stream(1, (), 0)
    assert len({stream.next() for _ in range(300)}) == 300
