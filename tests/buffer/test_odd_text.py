"""Texts that are no text go through every store, in every field that somebody else may fill."""

from __future__ import annotations

import dataclasses
import json
import math
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.buffer.samples import run, sql_buffer
from tests.buffer.test_contract import database
from tests.odd import ODD
from trireme.buffer.blocks import stored_experiences
from trireme.buffer.queue import QueueBuffer
from trireme.buffer.record import Record
from trireme.experience import EID, Experience
from trireme.ext.replay.replay import ReplayBuffer
from trireme.files import read_jsonl
from trireme.pictures import Picture
from trireme.serialize import Damaged, decode, encode
from trireme.text import all_joined

STORES = ("queue", "replay", "sqlite", "postgres")
ANY = st.text(st.characters(exclude_categories=()))
PIECES = st.one_of(st.sampled_from(list(ODD)).map(lambda name: ODD[name]), ANY)
TEXTS = st.lists(PIECES, min_size=1, max_size=3).map("".join)
VALUES = st.recursive(
    st.one_of(TEXTS, st.none(), st.booleans(), st.integers(-9, 9)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(TEXTS, inner, max_size=2)),
    max_leaves=4,
)
NUMBERS = count(1)


def strategy_of(kind: Any) -> st.SearchStrategy[Any] | None:
    """Odd values of a field's type; None for numbers. A type that is not known here fails."""
    if get_origin(kind) is UnionType:
        inner = [strategy_of(one) for one in get_args(kind) if one is not NoneType]
        return inner[0] if len(inner) == 1 else None
    if kind is str:
        return TEXTS
    if kind is Any:
        return VALUES
    if kind in (int, float, torch.Tensor) or kind == dict[str, torch.Tensor]:
        return None
    if kind == tuple[Picture, ...]:  # made by a reader: bytes, and a digest in hexadecimal digits
        return None
    if kind is EID:
        return st.builds(EID, batch=st.just(1), task=TEXTS, run=st.just(0), suffix=TEXTS)
    if get_origin(kind) is list:
        inner = strategy_of(get_args(kind)[0])
        return None if inner is None else st.lists(inner, min_size=1, max_size=2)
    if get_origin(kind) is dict:
        key, value = map(strategy_of, get_args(kind))
        assert key is not None
        numbers = st.just(0.5)
        return st.dictionaries(key, numbers if value is None else value, min_size=1, max_size=3)
    raise AssertionError(f"Experience has a field of type {kind}: what may others write into it?")


FIELDS = {
    name: strategy
    for name, kind in get_type_hints(Experience).items()
    if (strategy := strategy_of(kind)) is not None
}


@st.composite
def experiences(draw: Any) -> Experience:
    """One with odd texts in all of its fields, and a group of its own."""
    values = {name: draw(strategy) for name, strategy in FIELDS.items()}
    number = next(NUMBERS)
    odd: EID = values["eid"]
    values["eid"] = EID(number, f"{odd.task}{number}", 0, 0, odd.suffix)
    values["info"] |= {"task_index": {"index": number}}
    return Experience([1, 2, 3], prompt_length=1, logprobs=[-0.5, -0.25], reward=1.0, **values)


def as_json(value: Any) -> Any:
    """What JSON makes of it: halves that meet are one character."""
    return json.loads(json.dumps(value))


def same(before: Experience, after: Experience) -> None:
    """All odd fields are what they were, and so are the tokens."""
    for field in dataclasses.fields(Experience):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if isinstance(old, torch.Tensor):
            assert torch.equal(old, new), field.name
        elif field.name == "pictures":
            assert old == new
        elif field.name == "eid":
            assert dataclasses.astuple(old) == dataclasses.astuple(new)
        else:
            new = (
                {k: v for k, v in new.items() if k != "use_count"} if field.name == "info" else new
            )
            assert as_json(old) == new, field.name


@contextmanager
def opened(store: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[Any]:
    """A store, with the copy for people where it keeps one."""
    if store in ("queue", "replay"):
        record = Record(database=f"sqlite:///{folder / 'copy.db'}", lines=folder / "copy.jsonl",
                        messages=True)  # fmt: skip
        kind = QueueBuffer if store == "queue" else ReplayBuffer
        yield kind("experiences", record=record)
        record.close()
        return
    request.param = store
    buffer = sql_buffer("experiences", database(request, folder))
    yield buffer
    buffer.dispose()


def test_every_field_of_an_experience_that_holds_text_is_drawn() -> None:
    assert {"eid", "info", "metrics", "messages", "tools", "prompt_text", "response_text",
            "stop_reason", "truncate_status"} == FIELDS.keys()  # fmt: skip


@pytest.mark.parametrize("store", STORES)
def test_odd_texts_come_out_of_a_store_as_they_went_in(
    store: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with opened(store, request, tmp_path) as buffer:

        @settings(
            max_examples=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        )
        @given(put=st.lists(experiences(), min_size=1, max_size=2))
        def through(put: list[Experience]) -> None:
            async def put_and_take() -> list[Experience]:
                await buffer.put(put)
                if store in ("queue", "replay"):
                    buffer.load_state(buffer.state())
                else:
                    buffer.commit()
                return await buffer.take(len(put))

            taken = run(put_and_take())
            for before in put:
                same(before, next(e for e in taken if e.eid == before.eid))

        through()


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_the_other_side_reads_of_a_failure_with_odd_words(
    store: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    request.param = store
    url = database(request, tmp_path)
    explorer = sql_buffer("experiences", url, role="explore", party="e")
    trainer = sql_buffer("experiences", url, role="train", party="t")
    for name, text in ODD.items():
        run(explorer.fail(ValueError(f"no page: {text}")))
        with pytest.raises(RuntimeError, match="no page"):
            run(trainer.take(1))
        assert name
    explorer.dispose()
    trainer.dispose()


def test_the_copy_for_people_has_every_text_and_is_read_again(tmp_path: Path) -> None:
    lines, url = tmp_path / "copy.jsonl", f"sqlite:///{tmp_path / 'copy.db'}"
    record = Record(database=url, lines=lines, messages=True, limit=math.inf)
    put = [
        Experience([1, 2], prompt_length=1, reward=0.0, eid=EID(1, n, 0), prompt_text=text,
                   response_text=text, info={"odd": text, text: 1}, metrics={text: 1.0},
                   messages=[{"role": "user", "content": text}])
        for n, text in enumerate(ODD.values())
    ]  # fmt: skip

    run(record.write(put))
    run(record.write(put[:3]))  # again: the file is read and written anew
    record.close()

    read = {line["eid"]: line for line in read_jsonl(lines)}
    for e in put:
        assert as_json(e.info) == read[e.eid.uid]["info"]
        assert as_json(e.prompt_text) == read[e.eid.uid]["prompt"]
        assert as_json(e.messages) == read[e.eid.uid]["messages"]
    with sqlite3.connect(url.removeprefix("sqlite:///")) as database:
        for (text,) in database.execute("SELECT prompt_text FROM experiences"):
            assert "\0" not in text
            text.encode()
        whole = list(stored_experiences(database, lambda digest: None))
    assert [as_json(e.prompt_text) for e in whole] == [
        as_json(e.prompt_text) for e in (*put[3:], *put[:3])
    ]


def test_a_flipped_bit_anywhere_in_the_bytes_is_seen() -> None:
    data = encode([Experience([5, 6, 7], prompt_length=1, logprobs=[-1.0, -2.0], info={"a": "b"})])
    missed = []
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 4
        try:
            out = decode(bytes(bad))[0]
        except Damaged:
            continue
        if out.tokens.tolist() != [5, 6, 7] or out.info != {"a": "b"}:
            missed.append(at)
    assert missed == []


def test_joined_leaves_no_half_and_nothing_else_changes() -> None:
    for text in ODD.values():
        assert all_joined({text: [text]}) == {all_joined(text): [all_joined(text)]}
        all_joined(text).encode()
