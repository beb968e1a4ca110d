"""`mode: bench` with `model.external_model`: someone else's API is measured, without a model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import yaml
from typer.testing import CliRunner

from tests.ext.external_model.server import Api
from tests.ext.external_model.server import api as api  # a fixture
from tests.limits import HANG_S
from trireme.cli.main import app
from trireme.config.load import load_config
from trireme.engines.engine import Sampling
from trireme.experience import REPORTED_TOKENS
from trireme.ext.external_model.engine import ApiEngine, byte_tokenizer
from trireme.ext.external_model.model import ApiModel, _with_calls_apart, read_api_calls
from trireme.ext.openai.answer import respond
from trireme.extensions import extensions
from trireme.launch.check import draft
from trireme.model.chat_tokens import ChatTokens

KEY = "model.external_model"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    rows = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(4)]
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    taskset = {"name": "sums", "path": str(data), "repeat_times": 2,
               "format": {"prompt_key": "question", "response_key": "answer"}}  # fmt: skip
    tree: dict[str, Any] = {
        "mode": "bench",
        "name": "api",
        "checkpoint_root_dir": str(tmp_path / "jobs"),
        # shorter than a prompt's bytes: the API has its own limits
        "model": {"model_path": "adder-of-theirs", "max_prompt_tokens": 8, "max_response_tokens": 9,
                  "external_model": {"enable": True, "model_name": "adder",
                                     "base_url_env": "THEIR_URL", "api_key_env": "THEIR_KEY"}},
        "cluster": {"gpu_per_node": 4},
        "buffer": {"explorer_input": {"eval_tasksets": [taskset],
                                      "default_workflow_type": "math_boxed_workflow"}},
    }  # fmt: skip
    if "ray" in extensions():
        tree["cluster"]["ray_address"] = "127.0.0.1:9"  # which is not asked
    path = tmp_path / "bench.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def ran(config: Path, url: str, monkeypatch: pytest.MonkeyPatch, *keys: str) -> Any:
    monkeypatch.setenv("THEIR_URL", url)
    monkeypatch.setenv("THEIR_KEY", "the key")
    return CliRunner().invoke(app, ["run", "--config", str(config), *keys])


def test_an_api_is_measured_where_bench_writes(
    config: Path, tmp_path: Path, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = ran(config, api, monkeypatch)
    assert done.exit_code == 0, done.output
    [job] = tmp_path.glob("jobs/*/api")
    [line] = (job / "monitor" / "metrics.jsonl").read_text().splitlines()
    figures = json.loads(line)["metrics"]
    assert figures["bench/sums/accuracy/mean@2"] == 0.5 and figures["bench/sums/tasks"] == 4
    assert len(Api.asked) == 8
    assert {(one["model"], one["key"], one["max_tokens"]) for one in Api.asked} == {
        ("adder", "Bearer the key", 9)
    }
    asked = {one["messages"][-1]["content"] for one in Api.asked}
    assert asked == {f"{i} + 1?" for i in range(4)}


@pytest.mark.extension("provenance")
def test_the_record_of_a_start_names_the_key_of_an_api_and_does_not_hold_it(
    config: Path, tmp_path: Path, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ran(config, api, monkeypatch).exit_code == 0
    [job] = tmp_path.glob("jobs/*/api")
    written = "".join(file.read_text() for file in (job / "run").glob("start*"))
    assert "THEIR_KEY" in written and "the key" not in written


@pytest.mark.parametrize("told", [None, 41])
def test_lengths_are_the_tokens_that_an_api_says_and_else_unknown(
    config: Path, tmp_path: Path, api: str, monkeypatch: pytest.MonkeyPatch, told: int | None
) -> None:
    monkeypatch.setattr(Api, "told", told)
    done = ran(config, api, monkeypatch)
    assert done.exit_code == 0, done.output
    [line] = tmp_path.glob("jobs/*/api/monitor/metrics.jsonl")
    figures = json.loads(line.read_text())["metrics"]
    lengths = {name: f for name, f in figures.items() if "response_length" in name}
    names = ("mean@2", "std@2", "best@2", "worst@2") if told else ()
    expected = {f"bench/sums/response_length/{name}": told for name in names}
    assert lengths == {name: 0.0 if "std" in name else value for name, value in expected.items()}


@pytest.mark.parametrize("parser", ["hermes", "mistral"])
@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "function", "function": {"name": "add"}}]
)
def test_a_program_s_tool_choice_reaches_an_api(
    api: str, monkeypatch: pytest.MonkeyPatch, choice: Any, parser: str
) -> None:
    function = {"name": "add", "arguments": '{"a": 1}'}
    monkeypatch.setattr(Api, "calls", [{"id": "x", "type": "function", "function": function}])
    monkeypatch.setattr(Api, "told", 5)
    tokenizer = byte_tokenizer()
    chat = ChatTokens(tokenizer, tool_call_parser=parser)
    read_api_calls(chat)
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    body = {"messages": [{"role": "user", "content": "1 + 1?"}], "tools": [tool]}

    async def main() -> tuple[Any, list[Any]]:
        engine = ApiEngine(api, "adder", tokenizer=tokenizer, max_model_len=9999)
        model = ApiModel(engine, chat, max_model_len=9999)
        response = await respond(model, body | {"tool_choice": choice}, chat=True)
        [call] = response["choices"][0]["message"]["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
        body["messages"] += [response["choices"][0]["message"], result]
        await respond(model, body, chat=True)
        await engine.close()
        return call["function"], [e.info for e in model.experiences(1.0)]

    called, infos = asyncio.run(main())
    assert (called["name"], json.loads(called["arguments"])) == ("add", {"a": 1})
    assert infos == [{REPORTED_TOKENS: 10}]  # of both replies, in one conversation
    first, second = Api.asked
    assert first.get("tool_choice") == (None if choice == "auto" else choice)
    assert "tool_choice" not in second
    said, result = second["messages"][1:]
    assert said["tool_calls"][0]["id"] == result["tool_call_id"] and result["content"] == "2"


@pytest.mark.parametrize(
    ("failed", "message"),
    [
        ({"error": {"message": "no provider is up", "code": 502}}, "no provider is up"),
        ({"error": "busy"}, "busy"),
        ({}, "its answer has no choices"),
    ],
)
def test_an_answer_without_choices_fails_with_what_the_api_says(
    api: str, monkeypatch: pytest.MonkeyPatch, failed: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(Api, "failed", failed)
    tokenizer = byte_tokenizer()

    async def main() -> None:
        engine = ApiEngine(api, "adder", tokenizer=tokenizer, max_model_len=9999)
        model = ApiModel(engine, ChatTokens(tokenizer), max_model_len=9999)
        try:
            await model.chat([{"role": "user", "content": "1 + 1?"}])
        finally:
            await engine.close()

    with pytest.raises(RuntimeError, match=rf"adder \(http.*\) gave no reply: {message}"):
        asyncio.run(main())


def test_a_call_that_an_api_s_thinking_mentions_is_sent_back_as_text() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    thinking = f"<think>I could {call} but no.</think>"
    message = {"role": "assistant", "content": thinking}
    assert _with_calls_apart([message]) == [message]
    [sent] = _with_calls_apart([{**message, "content": thinking + call}])
    assert sent["content"] == thinking and len(sent["tool_calls"]) == 1


@pytest.mark.parametrize("with_call", [False, True])
def test_text_of_an_api_that_had_to_call_a_tool_reaches_the_program(
    api: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, with_call: bool
) -> None:
    function = {"name": "add", "arguments": '{"a": 1}'}
    if with_call:
        monkeypatch.setattr(Api, "calls", [{"id": "x", "type": "function", "function": function}])
        monkeypatch.setattr(Api, "said", "I add.")
    tokenizer = byte_tokenizer()
    chat = ChatTokens(tokenizer)
    read_api_calls(chat)
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    body = {"messages": [{"role": "user", "content": "1 + 1?"}], "tools": [tool]}

    async def main() -> tuple[Any, str]:
        engine = ApiEngine(api, "adder", tokenizer=tokenizer, max_model_len=9999)
        model = ApiModel(engine, chat, max_model_len=9999)
        for _ in range(2):
            response = await respond(model, body | {"tool_choice": "required"}, chat=True)
        await engine.close()
        return response["choices"][0]["message"], model.experiences(1.0)[0].response_text or ""

    message, recorded = asyncio.run(main())
    assert Api.asked[0]["tool_choice"] == "required"
    if with_call:
        assert message["content"] == "I add." and len(message["tool_calls"]) == 1
        assert recorded.startswith("I add.<tool_call>")
        assert not caplog.messages
    else:
        assert message["content"] == "\\boxed{2}" and not message.get("tool_calls")
        assert recorded.startswith("\\boxed{")
        [warning] = caplog.messages
        assert "answered without a tool call, although tool_choice required one" in warning


def test_an_api_that_fails_midway_has_measured_nothing(
    config: Path, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Api, "status", 401)  # after three answers
    done = ran(config, api, monkeypatch, "explorer.runner_per_model=1")
    assert done.exit_code == 1 and "Error code: 401" in done.output, done.output


UNSUPPORTED = {"param": "max_tokens", "code": "unsupported_parameter"}


@pytest.mark.parametrize(
    ("error", "wants", "limit"),
    [
        ({"message": "'max_tokens' is too large: 99 > 90"}, "nothing", "max_tokens"),
        ({"message": "'max_tokens' is not supported for this text"}, "nothing", "max_tokens"),
        ({"message": "no", **UNSUPPORTED}, "max_completion_tokens", "max_completion_tokens"),
        ({"message": "Unsupported: max_tokens"}, "max_completion_tokens", "max_completion_tokens"),
    ],
)
def test_only_an_api_that_answers_to_the_other_name_of_the_length_gets_it_from_then_on(
    error: dict[str, str], wants: str, limit: str
) -> None:
    """One prompt that is too long changes no other request."""
    request = httpx.Request("POST", "http://api/v1/chat/completions")

    async def create(**options: Any) -> str:
        if wants in options:
            return "answer"
        response: Any = httpx.Response(400, request=request)
        raise openai.BadRequestError(error["message"], response=response, body=error)

    async def main() -> tuple[Any, dict[str, Any]]:
        engine = ApiEngine("http://api/v1", "m", tokenizer=byte_tokenizer(), max_model_len=99)
        completions = SimpleNamespace(create=create)
        client: Any = SimpleNamespace(chat=SimpleNamespace(completions=completions))
        engine._client = client
        try:
            answer = await engine._ask(messages=[], **engine._limits(Sampling(max_tokens=9)))
        except openai.BadRequestError:
            answer = None
        return answer, engine._limits(Sampling(max_tokens=9))

    answer, limits = asyncio.run(main())
    assert answer == ("answer" if wants == limit else None)
    expected = {"temperature", "top_p"} if limit == "max_tokens" else set()
    assert limits.keys() == {limit, *expected}


def test_an_api_that_does_not_answer_is_told_with_its_limit(
    config: Path, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = Event()
    monkeypatch.setattr(Api, "do_POST", lambda handler: over.wait(HANG_S))
    monkeypatch.setattr(Api, "do_GET", lambda handler: handler.send_error(404), raising=False)
    limits = "explorer.max_timeout=0.5", "explorer.max_retry_times=0"
    done = ran(config, api, monkeypatch, *limits)
    over.set()
    assert done.exit_code == 1 and "explorer.max_timeout" in done.output, done.output


@pytest.mark.parametrize(
    ("keys", "sentences"),
    [
        ((), []),
        pytest.param(
            ("mode=explore", "cluster.ray_address=auto"),
            [f"{KEY}.enable is true in mode explore: bench alone measures"],
            marks=pytest.mark.extension("ray"),
        ),
        (
            (f"{KEY}.base_url_env=NO_URL", f"{KEY}.api_key_env=NO_KEY"),
            [
                f"{KEY}.base_url_env names NO_URL, which is not set: expected the API's address",
                f"{KEY}.api_key_env names NO_KEY, which is not set: expected the API's key",
            ],
        ),
        (("explorer.env_vars={THEIR_URL: host}",), [f"{KEY}.base_url_env names THEIR_URL, which"]),
        (
            ("explorer.bench_on_latest_checkpoint=true",),
            ["explorer.bench_on_latest_checkpoint is true, and"],
        ),
        (("model.lora_configs=[{lora_rank: 4}]",), ["model.lora_configs is set, and"]),
    ],
)
def test_what_an_api_lacks_or_cannot_do_is_said(
    config: Path, keys: tuple[str, ...], sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THEIR_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("THEIR_KEY", "the key")
    made = draft(load_config(config, keys))
    assert keys[:1] == ("mode=explore",) or not any("no GPU" in x for x in made.plans[0].notes)
    problems = [str(one) for one in made.problems]
    ours = [one for one in problems if "external_model" in one]
    assert len(ours) == len(sentences), problems
    assert all(one.startswith(sentence) for one, sentence in zip(ours, sentences, strict=True))


@pytest.mark.parametrize("text", ["", "plain", "grün → 数\n\t  end"])
def test_bytes_are_tokens(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
