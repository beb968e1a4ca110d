"""Samples: shows experiences as text, with the trained parts marked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from trireme.pictures import legible

if TYPE_CHECKING:
    from trireme.config import Plan
    from trireme.experience import Experience


@dataclass
class Sample:
    """An experience as text, with the trained parts marked."""

    title: str
    parts: list[tuple[str, float, bool]] = field(default_factory=list)
    """Text, its weight (0: not trained), and whether it consists of special tokens only."""
    tokens: int = 0
    untrained: bool = False
    """Whether it is a row that trains nothing at any length."""


def of_data(plan: Plan, count: int) -> Iterator[Sample]:
    """Yield rows of the plan's data set, as they are trained on."""
    from trireme.algorithms.recipes import row_of
    from trireme.config.lookup import vocabulary_of
    from trireme.data.kinds import FORMATS
    from trireme.data.rows import load_rows
    from trireme.experience import EID
    from trireme.launch.data import make_text

    config = plan.config.buffer.trainer_input.experience_buffer
    text = make_text(plan, plan.model_path)
    rows = load_rows(plan.store.path, config.subset_name, config.split, on_error=config.on_error)
    to_experience = FORMATS[row_of(plan.config.algorithm.algorithm_type).schema](
        rows,
        text.tokenizer,
        max_model_len=plan.lengths.max_model_len,
        format_args=config.format.model_dump(),
        chat_template=text.template,
        enable_thinking=plan.config.model.enable_thinking,
        on_error=config.on_error,
        reader=text.chat.reader,
        vocabulary=vocabulary_of(plan.model_path),
    )
    untrained = 0
    for index in range(min(count, len(to_experience))):
        experience = to_experience(index, eid=EID(0, index))
        if experience is None:
            before, untrained = untrained, to_experience.counts["untrained"]
            title = f"row {index}: left out, nothing of it is trained"
            yield Sample(title, untrained=untrained > before)
            continue
        yield from of_experience(f"row {index}", experience, text.tokenizer)


def of_experience(title: str, e: Experience, tokenizer: Any) -> Iterator[Sample]:
    """Split the tokens of an experience into trained and untrained parts; a pair gives two
    samples.
    """
    if e.chosen is not None and e.rejected is not None:
        for name, reply in (("chosen", e.chosen), ("rejected", e.rejected)):
            ids, weights = [*e.tokens.tolist(), *reply.tolist()], [0.0] * len(e.tokens)
            weights += [1.0] * len(reply)
            yield _sample(f"{title}, {name}", ids, weights, tokenizer)
        return
    weights = e.mask.float() if e.loss_weight is None else e.loss_weight * e.mask
    yield _sample(title, e.tokens.tolist(), weights.tolist(), tokenizer)


def _sample(title: str, ids: Sequence[int], weights: Sequence[float], tokenizer: Any) -> Sample:
    special = set(tokenizer.all_special_ids)
    kinds = [
        (weight, weight == 0 and token in special)
        for token, weight in zip(ids, weights, strict=True)
    ]
    parts = [
        (legible([ids[index] for index in places], tokenizer.decode), weight, is_special)
        for (weight, is_special), places in groupby(range(len(ids)), key=lambda i: kinds[i])
    ]
    trained = sum(weight != 0 for weight in weights)
    return Sample(f"{title}: {len(ids)} tokens, {trained} trained", parts, len(ids))


def bracketed(sample: Sample) -> str:
    """Write the trained parts in double brackets, with their weight if it is not 1."""
    out = []
    for text, weight, _ in sample.parts:
        weighted = f"(x{weight:g})" if weight not in (0, 1) else ""
        out.append(f"[[{text}]]{weighted}" if weight else text)
    return "".join(out)
