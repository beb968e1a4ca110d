"""Experience: the inner form, the users' form, and the bytes both survive."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from trireme import serialize
from trireme.experience import EID, Experience, group_by
from trireme.pictures import BEGIN
from trireme.serialize import (
    FORMAT,
    Damaged,
    _packed,
    decode,
    encode,
    encode_each,
    experience_of_wire,
    experience_to_wire,
)


def test_response_length_fields_are_padded_to_the_tokens() -> None:
    e = Experience([5, 6, 7, 8], prompt_length=2, logprobs=[-0.5, -1.0], versions=[3, 4])
    assert e.logprobs is not None and e.logprobs.tolist() == [0, 0, -0.5, -1.0]
    assert e.versions is not None and e.versions.tolist() == [-1, -1, 3, 4]
    assert e.mask.tolist() == [False, False, True, True]
    assert e.version == 3


def test_action_mask_of_a_dialogue_keeps_its_holes() -> None:
    e = Experience([1, 2, 3, 4, 5], prompt_length=1, action_mask=[1, 0, 0, 1])
    assert e.mask.tolist() == [False, True, False, False, True]
    assert e.action_mask.tolist() == [True, False, False, True]


def test_the_inner_form_finds_its_prompt_length() -> None:
    assert Experience([1, 2, 3], mask=[0, 0, 1]).prompt_length == 2
    assert Experience([1, 2, 3], mask=[0, 0, 0]).prompt_length == 3


def test_a_field_of_a_wrong_length_says_which_and_what_was_expected() -> None:
    with pytest.raises(ValueError, match=r"logprobs has 3 entries: expected 4 .* or 2"):
        Experience([1, 2, 3, 4], prompt_length=2, logprobs=[0.0, 0.0, 0.0])
    with pytest.raises(ValueError, match="prompt_length is 5: expected 0 to 4"):
        Experience([1, 2, 3, 4], prompt_length=5)
    with pytest.raises(ValueError, match="needs `mask` or `prompt_length`"):
        Experience([1, 2])


def test_experiences_survive_their_bytes() -> None:
    first = Experience(
        [1, 2, 3],
        prompt_length=1,
        logprobs=[-0.25, -0.5],
        versions=[0, 1],
        eid=EID("7/eval", 2, 3, 4),
        reward=0.5,
        stop_reason="length",
        info={"env": {"rounds": 3}},
        metrics={"accuracy": 1.0},
        messages=[{"role": "user", "content": "ü"}],
        multi_modal_inputs={"pixels": torch.arange(6.0).reshape(2, 3)},
    )
    second = Experience([9], mask=[0], chosen=[1, 2], rejected=[3])
    a, b = decode(encode([first, second]))
    assert torch.equal(a.tokens, first.tokens) and a.eid == first.eid and a.reward == 0.5
    assert a.logprobs is not None and a.logprobs.tolist() == [0, -0.25, -0.5]
    assert a.info == first.info and a.messages == first.messages and a.metrics == first.metrics
    assert a.multi_modal_inputs is not None
    assert torch.equal(a.multi_modal_inputs["pixels"], torch.arange(6.0).reshape(2, 3))
    assert b.chosen is not None and b.chosen.tolist() == [1, 2] and b.logprobs is None
    assert decode(encode([])) == []


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_recorded_experts_come_back_beside_samples_without(dtype: torch.dtype) -> None:
    routing = torch.arange(3 * 2 * 4).view(3, 2, 4).to(dtype)
    one = Experience([1, 2, 3], prompt_length=1, routed_experts=routing)
    other = Experience([4, 5], prompt_length=1)
    for data in (encode([other, one]), encode_each([[other, one], [other]])[0]):
        none, back = decode(data)
        assert none.routed_experts is None and back.routed_experts is not None
        assert back.routed_experts.dtype == dtype and torch.equal(back.routed_experts, routing)
    sent = experience_of_wire(json.loads(json.dumps(experience_to_wire(one))))
    assert sent.routed_experts is not None and torch.equal(sent.routed_experts, routing)
    assert sent.routed_experts.dtype == dtype
    assert "routed_experts" not in experience_to_wire(other)
    at = bytearray(encode([one]))
    at[at.rindex(routing.numpy().tobytes())] ^= 1
    with pytest.raises(Damaged, match="checksum"):
        decode(bytes(at))


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_arrays_come_back_from_json(dtype: type) -> None:
    array = np.arange(24, dtype=dtype).reshape(2, 3, 4).transpose(1, 0, 2)
    wire = json.loads(json.dumps(serialize.array_to_wire(array)))
    back = serialize.array_from_wire(wire)
    assert back.dtype == array.dtype and (back == array).all()
    with pytest.raises(ValueError, match="reshape"):
        serialize.array_from_wire(wire | {"shape": [5, 5]})


@pytest.mark.parametrize(
    ("routing", "says"),
    [
        (torch.zeros(2, 2, 4, dtype=torch.uint8), r"\[2, 2, 4\] in uint8: expected \[3, layers"),
        (torch.zeros(3, 4, dtype=torch.uint8), r"\[3, 4\] in uint8"),
        (torch.zeros(3, 2, 4), r"\[3, 2, 4\] in float32: .* in uint8 or int16"),
        ([[[0]]], "list: expected"),
    ],
)
def test_experts_of_other_sizes_than_the_tokens_are_refused(routing: Any, says: str) -> None:
    with pytest.raises(ValueError, match=f"routed_experts is {says}"):
        Experience([1, 2, 3], prompt_length=1, routed_experts=routing)


@pytest.mark.parametrize("begins", [0, 1])
def test_rows_with_many_borders_and_with_few_are_packed_and_come_back_bit_for_bit(
    begins: int,
) -> None:
    size = 24
    runs = torch.arange(size) < 20 if begins else torch.arange(size) >= 20
    some = torch.zeros(size)
    some[4:8], some[15] = torch.tensor([-0.5, -0.0, -2.0, -3.0]), 7.0
    if begins:
        some[0] = 1.0
    each = (torch.arange(size) + begins) % 2
    e = Experience(
        torch.arange(size), mask=runs, logprobs=some, versions=each, advantages=torch.randn(size)
    )
    ((form, packed),) = _packed([runs], [size], torch.bool)
    words = np.frombuffer(packed, np.int32)
    assert form == "runs" and words.tolist() == ([1, 0, 20, 4] if begins else [0, 1, 20, 4])
    ((form, packed),) = _packed([some], [size], torch.float32)
    words = np.frombuffer(packed, np.int32)
    lengths = [0, 1, 3, 4, 7, 1, 8] if begins else [4, 4, 7, 1, 8]  # -0.0 is not the word 0
    assert (form, words[: 2 + len(lengths)].tolist()) == ("some", [size, len(lengths), *lengths])
    [back] = decode(encode([e]))
    for name in ("mask", "logprobs", "versions", "advantages"):
        there, expected = getattr(back, name), getattr(e, name)
        assert there.dtype == expected.dtype and torch.equal(there, expected), name
    assert back.logprobs is not None and back.logprobs[5].signbit()


def _odd(source: random.Random, number: int) -> Experience:
    """Make an experience whose rows have runs, zeros and noise in any order, or pictures' ids."""
    size = source.choice((1, 2, 3, 17, 64, 200))

    def row(noise: Callable[[], float]) -> list[float]:
        parts = [[0] * size, [noise() for _ in range(size)], [noise()] * size]
        return [x for _ in range(3) for x in source.choice(parts)[: source.randrange(size + 1)]]

    def whole(noise: Callable[[], float]) -> list[float]:
        return [*row(noise), *[0] * size][:size]

    floats = [0.0, -0.0, 1.5, math.inf, source.random()]
    tokens = [source.randrange(1000) for _ in range(size)]
    if number % 7 == 3:
        tokens[0] = BEGIN + 5
    return Experience(
        tokens,
        mask=[bool(x) for x in whole(lambda: source.randrange(2))],
        logprobs=whole(lambda: source.choice(floats)) if number % 3 else None,
        versions=[int(x) for x in whole(lambda: source.randrange(-1, 3))],
        advantages=whole(source.random) if number % 4 else None,
        rejected=[] if number % 5 == 0 else None,
        eid=EID(number),
        info={"number": number},
    )


def test_groups_that_are_encoded_together_have_the_bytes_of_each_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = random.Random(0)
    experiences = [_odd(source, number) for number in range(120)]
    groups = [experiences[n : n + n % 4] for n in range(0, 120, 3)]
    alone = [encode(group) for group in groups]
    assert encode_each(groups) == alone
    monkeypatch.setattr(serialize, "TOKENS_TOGETHER", 100)  # some of them together
    assert encode_each(groups) == alone and encode_each([]) == []
    for group, data in zip(groups, alone, strict=True):
        for old, new in zip(group, decode(data), strict=True):
            assert old.eid == new.eid
            for name in ("tokens", "mask", "logprobs", "versions", "advantages", "rejected"):
                a, b = getattr(old, name), getattr(new, name)
                assert (a is None) == (b is None), name
                assert a is None or a.numpy().tobytes() == b.numpy().tobytes(), name


def test_rows_of_another_kind_are_stored_as_the_numbers_that_they_are() -> None:
    """As code of a user leaves them: doubles, a mask of integers."""
    plain, odd = (Experience([1, 2, 3], mask=[0, 1, 1], logprobs=[0, -0.5, -1.5]) for _ in range(2))
    assert odd.logprobs is not None
    odd.logprobs, odd.mask = odd.logprobs.double(), odd.mask.long()
    for experiences in ([odd], [plain, odd]):
        for data in (encode(experiences), encode_each([[e] for e in experiences])[-1]):
            back = decode(data)[-1]
            assert back.logprobs is not None and back.logprobs.tolist() == [0, -0.5, -1.5]
            assert back.mask.tolist() == [False, True, True]


def test_foreign_bytes_and_values_that_are_not_json_are_refused() -> None:
    with pytest.raises(ValueError, match="not experiences written by Trireme"):
        decode(b"\x80\x04 a pickle, say")
    header = json.dumps({"__metadata__": {"format": "other"}}).encode()
    with pytest.raises(ValueError, match="experience format 'other'"):
        decode(struct.pack("<Q", len(header)) + header)
    with pytest.raises(TypeError, match="experience 1/2/0/0: info must be plain JSON"):
        encode([Experience([1], mask=[0], eid=EID(1, 2), info={"env": object()})])


def test_group_by_keeps_the_order_of_first_appearance() -> None:
    rows = [
        Experience([1], mask=[1], eid=EID(1, task, run)) for task, run in [(2, 0), (1, 0), (2, 1)]
    ]
    assert {k: len(v) for k, v in group_by(rows, "task").items()} == {"1/2": 2, "1/1": 1}
    assert list(group_by(rows, id_type="run")) == ["1/2/0", "1/1/0", "1/2/1"]
    with pytest.raises(ValueError, match="one of task, run, step"):
        group_by(rows, "batch")


def test_each_row_comes_back_bit_for_bit_in_any_form() -> None:
    zeros, negative_zero = [0.0] * 40, [-0.0, float("nan"), 1e-45, -3.5]
    noise = torch.linspace(-1, 1, 37).tolist()
    rows = [zeros, negative_zero * 10, [*zeros, *noise], [*noise, *zeros], [0.0], noise[:2]]
    for row in rows:
        versions = [-1 if i < len(row) // 2 else 3 for i in range(len(row))]
        given = [
            Experience(
                list(range(len(row))), mask=[i % 3 == 0 for i in range(len(row))], logprobs=row,
                versions=versions, advantages=[0.25] * len(row), eid=EID(1, i),
            )
            for i in range(2)
        ]  # fmt: skip
        for experiences in (given, given[:1]):
            for old, new in zip(experiences, decode(encode(experiences)), strict=True):
                for name in ("tokens", "mask", "logprobs", "versions", "advantages"):
                    a, b = getattr(old, name), getattr(new, name)
                    assert a.dtype == b.dtype
                    assert a.numpy().tobytes() == b.numpy().tobytes()


def test_stores_of_version_1_are_still_read() -> None:
    row = {"sizes": {"tokens": 3, "mask": 3}, "eid": [1, 2, 0, 0, ""], "prompt_length": 1}
    tensors = {"tokens": torch.tensor([5, 6, 7, 8, 9, 10]), "mask": torch.tensor([0, 1, 1] * 2) > 0}
    metadata = {"format": "trireme-experiences-1", "experiences": json.dumps([row, row])}
    first, second = decode(save(tensors, metadata=metadata))
    assert (first.tokens.tolist(), second.tokens.tolist()) == ([5, 6, 7], [8, 9, 10])
    assert first.mask.tolist() == [False, True, True]
    assert first.eid == EID(1, 2)


def test_an_experience_of_90_tokens_takes_less_than_1500_bytes() -> None:
    text = " ".join(str(i * i) for i in range(60))  # it stands in it twice, and once in a template
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text[:90]}]
    e = Experience(
        torch.arange(90) * 1000, mask=[i >= 60 for i in range(90)], versions=[3] * 90,
        logprobs=[-0.01 * i if i >= 60 else 0.0 for i in range(90)], prompt_text=text,
        response_text=text[:90], messages=messages, info={"model_version": 3},
    )  # fmt: skip
    assert len(encode([e])) < 1500  # version 1: 3,300


def test_experiences_are_written_as_safetensors_writes_them() -> None:
    data = encode([Experience([1, 2, 3], prompt_length=1, reward=0.5, eid=EID(1, 2, 3))])
    assert save(load(data), metadata={"format": FORMAT}) == data


def test_a_list_of_what_is_no_number_is_refused() -> None:
    values: list[Any] = [["3", "4"], [None, 1], [[1], [2]]]
    for wrong in values:
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            Experience(wrong, prompt_length=1)


def test_trained_tokens_are_those_of_the_mask() -> None:
    assert Experience([1, 2, 3, 4], mask=[False, True, False, True]).trained_tokens == 2
    assert Experience([1, 2], prompt_length=2).trained_tokens == 0


def test_rewards_of_tokens_are_taken_by_either_name() -> None:
    older = Experience([1, 2, 3, 4], prompt_length=2, token_level_reward=[0.5, 1.0])
    assert older.token_rewards is not None and older.token_rewards.tolist() == [0, 0, 0.5, 1]
    newer = Experience([1, 2], prompt_length=1, token_rewards=[0.25])
    assert newer.token_rewards is not None and newer.token_rewards.tolist() == [0, 0.25]
    both = Experience([1, 2], prompt_length=1, token_level_reward=[9.0], token_rewards=[0.25])
    assert both.token_rewards is not None and both.token_rewards.tolist() == [0, 0.25]


def test_what_no_weights_sampled_has_the_version_minus_one() -> None:
    assert Experience([1, 2], prompt_length=1).version == -1
    assert Experience([1, 2], prompt_length=1, versions=[-1]).version == -1
    assert Experience([1, 2, 3], prompt_length=1, versions=[0, 5]).version == 0
