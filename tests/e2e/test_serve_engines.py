"""`mode: serve` over engines of other processes: recorded, token by token, until it is stopped."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import ResponseCompletedEvent, ResponseIncompleteEvent

from tests.e2e.agent import serving, until
from tests.e2e.job import small_config
from tests.e2e.test_command import ENGINES
from tests.e2e.test_two_commands import Pair
from tests.limits import HANG_S
from tests.tiny import make_model

KEY = "a key of the server's"
pytestmark = pytest.mark.slow


def by_previous_ids(client: openai.OpenAI) -> None:
    """Two responses, of which the second goes on from the first, streamed."""
    limits: Any = {"model": "any", "max_output_tokens": 6}
    first = client.responses.create(input="other", **limits)
    stream = client.responses.create(
        input="more", previous_response_id=first.id, stream=True, **limits
    )
    *_, last = stream
    assert isinstance(last, ResponseCompletedEvent | ResponseIncompleteEvent)
    assert last.response.previous_response_id == first.id
    assert last.response.usage and last.response.usage.input_tokens > 6


def refused_and_counted(client: openai.OpenAI, url: str) -> None:
    """An image is an error of the request; a key that is not known has no effect and is counted."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    message: Any = {"role": "user", "content": [{"type": "text", "text": "hm"}, image]}
    with pytest.raises(openai.BadRequestError, match="shows a picture"):
        client.chat.completions.create(model="any", messages=[message])
    url = f"{url}/s/other/v1"
    client.with_options(base_url=url).chat.completions.create(
        model="any",
        messages=[{"role": "user", "content": "hm"}],
        max_tokens=2,
        extra_body={"a_key_of_others": 1},
    )
    head = {"authorization": f"Bearer {KEY}"}
    said = httpx.get(f"{url.partition('/s/')[0]}/metrics", headers=head).text
    assert re.search(r"trireme_request_keys_ignored_total(?:\{.*\})? [1-9]", said), said


@pytest.mark.parametrize("overrides", ENGINES)
def test_agents_are_served_whatever_generates(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    config = small_config(tmp_path)
    make_model(tmp_path / "model", max_len=256, head_dim=32)
    config["buffer"]["trainer_input"] = {"experience_buffer": {"name": "shared"}}
    config["explorer"] |= {"proxy_port": 0, "service_status_check_interval": 0.1}
    config["explorer"]["rollout_model"] = {"api_key": KEY}
    pair = Pair(tmp_path, config)
    pair.start("serve", *overrides)
    process = pair.running["serve"]
    try:
        url = until(lambda: serving(pair.job / "explorer_server_url.txt"), "the server")
        client = openai.OpenAI(base_url=f"{url}/s/one/v1", api_key=KEY, max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="session:one").models.list()
        messages = [{"role": "user", "content": "hm"}]
        stream = client.chat.completions.create(
            model="any",
            messages=messages,  # type: ignore[arg-type]
            max_tokens=30,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        pieces = [c.choices[0].delta.content for c in stream if c.choices]
        assert len([piece for piece in pieces if piece]) > 15
        refused_and_counted(client, url)
        by_previous_ids(client)
        body = {"reward": 1.0, "session_id": "one"}
        assert client.post(f"{url}/feedback", body=body, cast_to=dict)
        sent = client.post(f"{url}/commit", body={}, cast_to=dict)
        assert sent == {"committed": 2}  # the stream's conversation, and that of the responses
    finally:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=HANG_S)
    assert "the server has ended: 1 commits" in output and process.returncode == 0, output
    assert len(pair.rows()) == 2
