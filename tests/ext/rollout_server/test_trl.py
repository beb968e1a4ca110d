"""The requests of TRL 1.16's VLLMClient, as it sends them, and what it reads from the answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.ext.http.made import client_of, torch_rollouts
from tests.tiny import make_model, make_tokenizer

SAMPLING = {
    "n": 2,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "max_tokens": 6,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}


def ask(folder: Path, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async def go() -> dict[str, Any]:
        async with torch_rollouts(folder) as rollouts, client_of(rollouts) as client:
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            return response.json()

    return asyncio.run(go())


def test_generate_reads_ids_and_logprobs_prompt_by_prompt(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    prompts = [make_tokenizer().encode(text) for text in ("one", "another")]
    body = {"model": "m", "prompt": prompts, "logprobs": 2, **SAMPLING}
    found = ask(folder, "/v1/completions", body)
    choices = found["choices"]
    assert [choice["prompt_token_ids"] for choice in choices[::2]] == prompts
    assert len(choices) == 4
    for choice in choices:
        names = [f"token_id:{token}" for token in choice["token_ids"]]
        assert choice["logprobs"]["tokens"] == names
        assert len(choice["logprobs"]["token_logprobs"]) == len(names)
        assert all(len(top) >= 2 for top in choice["logprobs"]["top_logprobs"])
    assert found["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_chat_reads_the_prompts_ids_from_the_response(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": "m", "messages": messages, "logprobs": True, "top_logprobs": 0, **SAMPLING}
    found = ask(folder, "/v1/chat/completions", {**body, "tool_choice": "none"})
    expected: Any = make_tokenizer().apply_chat_template(messages, add_generation_prompt=True)
    ids = expected if isinstance(expected, list) else expected["input_ids"]
    assert found["prompt_token_ids"] == ids
    for choice in found["choices"]:
        rows = choice["logprobs"]["content"]
        assert [row["token"] for row in rows] == [f"token_id:{t}" for t in choice["token_ids"]]
