"""`mode: serve` over engines of other processes: recorded, token by token, until it is stopped."""

from __future__ import annotations

import signal
from pathlib import Path

import openai
import pytest

from tests.e2e.agent import serving, until
from tests.e2e.job import small_config
from tests.e2e.test_command import ENGINES
from tests.e2e.test_two_commands import Pair
from tests.tiny import make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize("overrides", ENGINES)
def test_agents_are_served_whatever_generates(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    config = small_config(tmp_path)
    make_model(tmp_path / "model", max_len=256, head_dim=32)
    config["buffer"]["trainer_input"] = {"experience_buffer": {"name": "shared"}}
    config["explorer"] |= {"proxy_port": 0, "service_status_check_interval": 0.1}
    pair = Pair(tmp_path, config)
    pair.start("serve", *overrides)
    process = pair.running["serve"]
    try:
        url = until(lambda: serving(pair.job / "explorer_server_url.txt"), "the server")
        client = openai.OpenAI(base_url=f"{url}/s/one/v1", api_key="none", max_retries=0)
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
        body = {"reward": 1.0, "session_id": "one"}
        assert client.post(f"{url}/feedback", body=body, cast_to=dict)
        sent = client.post(f"{url}/commit", body={}, cast_to=dict)
        assert sent == {"committed": 1}
    finally:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=100)
    assert "the server has ended: 1 commits" in output and process.returncode == 0, output
    assert len(pair.rows()) == 1
