"""Batch: which tokens are entries, and what a part of a batch keeps."""

from __future__ import annotations

import pytest
import torch

from trireme.batch import flatten
from trireme.experience import EID, Experience


def _three() -> list[Experience]:
    return [
        Experience(
            [1, 2, 3, 4], mask=[True, False, True, True], logprobs=[0, 0, -1, -2], eid=EID(0, 0, 0)
        ),
        Experience([1, 2], mask=[False, False], logprobs=[0, 0], eid=EID(0, 0, 1)),
        Experience(
            [5, 6, 7],
            mask=[False, True, False],
            logprobs=[0, -3, 0],
            eid=EID(0, 1, 0),
            temperature=0.5,
        ),
    ]


def test_entries_are_the_trained_tokens_without_the_first():
    batch = flatten(_three())
    assert batch.targets.tolist() == [3, 4, 6]
    assert batch.positions.tolist() == [2, 3, 1]
    assert batch.sample_ids.tolist() == [0, 0, 2]
    assert batch.fields["old_logprobs"].tolist() == [-1, -2, -3]
    assert batch.temperatures.tolist() == [1, 1, 0.5]
    assert (batch.num_samples, batch.num_tokens, batch.width) == (3, 3, 2)


def test_a_greedy_sample_counts_as_temperature_one():
    [e] = [Experience([1, 2], prompt_length=1, temperature=0.0)]
    assert flatten([e]).temperatures.tolist() == [1]


def test_a_selection_keeps_its_entries_in_the_order_asked_for():
    part = flatten(_three()).select([2, 0])
    assert part.targets.tolist() == [6, 3, 4]
    assert part.sample_ids.tolist() == [0, 1, 1]
    assert part.eids == ("0/1/0/0", "0/0/0/0")


def test_a_field_that_one_experience_lacks_is_missing_and_named():
    experiences = _three()
    experiences[2].logprobs = None
    with pytest.raises(ValueError, match="ppo asks for 'old_logprobs', which experience 0/1/0/0"):
        flatten(experiences).get("old_logprobs", asked_by="ppo")


def test_an_unknown_field_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'values', which no batch has. There is: .*old_logprobs"):
        flatten(_three()).get("values", asked_by="ppo")


def test_images_are_refused_by_name():
    e = Experience([1, 2], prompt_length=1, multi_modal_inputs={"pixels": torch.zeros(1)})
    with pytest.raises(ValueError, match="has multi_modal_inputs, which are not trained"):
        flatten([e])


def test_a_batch_in_which_nothing_is_trained_has_no_width():
    batch = flatten([Experience([1, 2], mask=[False, False])])
    assert (batch.num_samples, batch.num_tokens, batch.width) == (1, 0, 0)


def test_rows_of_another_dtype_are_joined_as_they_are():
    made = _three()
    for e in made:
        assert e.logprobs is not None
        e.logprobs = e.logprobs.bfloat16()
    half = flatten(made).fields["old_logprobs"]
    assert half.dtype == torch.bfloat16 and half.tolist() == [-1, -2, -3]
    made[0].logprobs = torch.tensor([0, 0, -1, -2], dtype=torch.float64)
    assert flatten(made).fields["old_logprobs"].tolist() == [-1, -2, -3]


def test_a_batch_has_no_memory_in_common_with_its_experience():
    [e] = [Experience([1, 2], prompt_length=1, logprobs=[-1.0])]
    batch = flatten([e])
    batch.fields["old_logprobs"].zero_()
    assert e.logprobs is not None and e.logprobs.tolist() == [0, -1]
