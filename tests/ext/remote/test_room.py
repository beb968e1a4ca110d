"""Requests of our own client are within the limits of the server."""

from __future__ import annotations

import json

from trireme.engines.engine import MOST_SAMPLES
from trireme.ext.http import room
from trireme.ext.http.room import look_inside
from trireme.ext.remote.servers import MOST_TOKENS


def test_what_an_engine_is_asked_by_our_own_client_has_room() -> None:
    sampling = {"max_tokens": 9, "stop": ["a", "b"], "stop_token_ids": [1, 2]} | dict.fromkeys(
        "bcdefghijklm", 0
    )
    one = {"ids": [151000] * (MOST_TOKENS // MOST_SAMPLES), "sampling": sampling, "key": [1, 2, 3]}
    body = json.dumps({"id": "x", "requests": [one] * MOST_SAMPLES}).encode()
    size = room.room_of("/engine/stream", 0)
    assert len(body) < size.bytes
    look_inside(body, size)
