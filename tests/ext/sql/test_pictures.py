"""Pictures in a database: once each, however many experiences of however many processes show it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import MetaData, create_engine, delete, func, select

from tests.buffer.samples import run, sql_buffer
from tests.buffer.test_contract import database
from trireme.buffer.buffer import DEFAULTS
from trireme.buffer.table import experience_table, picture_table
from trireme.experience import EID, Experience
from trireme.ext.sql.buffer import SqlBuffer
from trireme.pictures import Picture


def made(number: int) -> Picture:
    data = bytes([number]) * 50_000
    return Picture(data, hashlib.sha256(data).hexdigest(), 2, (1, 2, 4))


def shown(step: int, picture: Picture, runs: int = 4) -> list[Experience]:
    tokens = [1, *picture.ids, 2, 3]
    return [
        Experience(tokens, prompt_length=4, eid=EID(step, 0, run), reward=1.0, pictures=[picture])
        for run in range(runs)
    ]


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return database(request, tmp_path)


def test_pictures_come_out_of_a_database_as_they_went_in(url: str) -> None:
    writers: list[Any] = [
        SqlBuffer("seen", url, DEFAULTS, role="explore", party=f"explorer_{n}") for n in range(2)
    ]
    reader = SqlBuffer("seen", url, DEFAULTS, role="train", party="trainer")
    rows = [shown(0, made(0)), shown(1, made(0)), shown(2, made(1))]

    async def play() -> list[Experience]:
        await writers[0].put(rows[0])
        await writers[1].put(rows[1])  # another process, which knows of no picture yet
        await writers[0].put(rows[2])
        return await reader.take(12)

    taken = run(play())
    assert [e.pictures for e in taken] == [e.pictures for each in rows for e in each]
    assert [e.tokens.tolist() for e in taken] == [e.tokens.tolist() for each in rows for e in each]
    engine = reader._database
    metadata = MetaData()
    table, pictures = experience_table("seen", metadata), picture_table("seen", metadata)
    with engine.connect() as connection:
        assert connection.scalar(select(func.count()).select_from(pictures)) == 2
        largest = connection.scalar(select(func.max(func.length(table.c.experience_bytes))))
    assert largest is not None and largest < 5_000  # 50,000 bytes of a picture are not in a row
    for one in (*writers, reader):
        one.dispose()


def test_a_row_whose_picture_is_gone_is_damaged(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'seen.db'}"
    buffer = sql_buffer("seen", url)
    run(buffer.put(shown(0, made(0))))
    with create_engine(url).begin() as connection:
        connection.execute(delete(picture_table("seen", MetaData())))

    async def take() -> Any:
        return await buffer.take(4)

    with pytest.raises(ValueError, match=f"its picture {made(0).digest:.16} is missing"):
        run(take())
    buffer.dispose()
