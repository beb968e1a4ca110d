"""Pictures on a server: once each, within a limit, and sent again where they have gone."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from trireme.engines.engine import Sampling
from trireme.ext.remote.engine import RemoteEngine
from trireme.ext.remote.shelf import UNKNOWN, PictureBody, Shelf
from trireme.pictures import Picture
from trireme.serialize import picture_to_wire


def made(number: int) -> Picture:
    data = bytes([number]) * 100
    return Picture(data, hashlib.sha256(data).hexdigest(), 2, (1, 2, 4))


def put(shelf: Shelf, picture: Picture) -> None:
    shelf.put(PictureBody.model_validate(picture_to_wire(picture)))


def test_pictures_arrive_whole_and_the_least_recently_used_go() -> None:
    shelf = Shelf(limit=250)
    for n in (0, 0, 1):
        put(shelf, made(n))
    assert shelf.get([made(1).digest, made(0).digest]) == [made(1), made(0)]
    put(shelf, made(2))
    with pytest.raises(ValueError, match=f"{UNKNOWN}: {made(1).digest}"):
        shelf.get([made(0).digest, made(1).digest])
    assert shelf.get([made(2).digest]) == [made(2)]


def test_data_that_is_no_base64_is_refused() -> None:
    body = PictureBody.model_validate({**picture_to_wire(made(0)), "data": "@@"})
    with pytest.raises(ValueError, match="not in base64"):
        Shelf().put(body)


def test_a_client_sends_each_picture_once_and_again_if_it_has_gone() -> None:
    shelf, sent = Shelf(), list[str]()

    class Faked(RemoteEngine):
        async def _post(self, url: str, path: str, body: Any) -> Any:
            assert path == "/engine/pictures"
            sent.append(body["digest"])
            await asyncio.sleep(0.01)
            shelf.put(PictureBody.model_validate(body))

        async def _generate(self, url: str, body: dict[str, Any], restarts: Any) -> Any:
            shelf.get(body.get("pictures", []))
            return []

        async def _ask_while(self, key: Any, ask_server: Any, **size: Any) -> Any:
            return await ask_server("http://server")

    async def ask(engine: RemoteEngine, pictures: Sequence[Picture]) -> None:
        await engine.generate([1], Sampling(), pictures=pictures)

    async def run() -> None:
        engine = Faked(["http://server"])
        servers: Any = engine.servers
        servers.instances["http://server"] = "first"
        servers.router = SimpleNamespace(replied=lambda sizes: None)
        await ask(engine, [made(0), made(1)])
        await ask(engine, [made(1)])
        await ask(engine, [])
        assert sent == [made(0).digest, made(1).digest]
        shelf._pictures.clear()
        await ask(engine, [made(1)])
        assert sent[2:] == [made(1).digest]
        servers.instances["http://server"] = "restarted"
        await ask(engine, [made(1)])
        assert sent[3:] == [made(1).digest]
        # rollouts of a task ask at once, and one of them is aborted
        first, *others = (asyncio.ensure_future(ask(engine, [made(2)])) for _ in range(4))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(*others)
        assert first.cancelled() and sent[4:] == [made(2).digest]

    asyncio.run(run())
