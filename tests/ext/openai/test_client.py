from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.model.fake import TOKENIZER, FakeEngine, Say, make, user
from tests.model.templates import CHATML
from trireme.engines.engine import Completion
from trireme.model.blocking import WAIT_S
from trireme.model.chat_tokens import ChatTokens
from trireme.model.model import Model, Revoked


def test_a_conversation_through_the_client_is_recorded_token_for_token() -> None:
    model = make([" a ", "b"], model_path="tiny")

    async def run() -> None:
        client = model.openai
        assert client.model_path == "tiny"  # type: ignore[attr-defined]
        chat: list[Any] = [user("1")]
        for text in ("2", "3"):
            done = await client.chat.completions.create(model="any", messages=chat, max_tokens=9)
            chat += [done.choices[0].message.model_dump(), user(text)]
            assert done.choices[0].finish_reason == "stop"

    asyncio.run(run())
    (experience,) = model.experiences(reward=1.0)
    assert TOKENIZER.decode(experience.tokens[experience.mask]) == " a <|im_end|>b<|im_end|>"
    assert isinstance(model.engine, FakeEngine) and model.engine.samplings[0].max_tokens == 9


def test_n_stop_logprobs_usage_and_length_are_served() -> None:
    model = make([Say("ab", stop_reason="length"), "c"])

    async def run() -> None:
        done = await model.openai.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "1"}], n=2, stop=["X"], logprobs=True,
            extra_body={"top_k": 5},
        )  # fmt: skip
        first, second = done.choices
        assert (first.message.content, first.finish_reason) == ("ab", "length")
        assert second.message.content == "c"
        assert first.logprobs and first.logprobs.content
        assert [t.token for t in first.logprobs.content] == ["a", "b"]
        assert [t.logprob for t in first.logprobs.content] == [-0.5, -0.51]
        assert done.usage and done.usage.completion_tokens == 4

    asyncio.run(run())
    assert isinstance(model.engine, FakeEngine)
    (sampling,) = model.engine.samplings
    assert (sampling.n, sampling.stop, sampling.top_k) == (2, ("X",), 5)


SYSTEM_ALONE = CHATML.replace("messages %}", "messages if m.role != 'developer' %}")
REFUSES = CHATML.replace("messages %}", "messages %}{{- OTHER[m.role] + '' }}")
REFUSES = REFUSES.replace("OTHER", str(dict.fromkeys(("system", "user", "assistant"), "")))


@pytest.mark.parametrize(
    ("template", "role"), [(CHATML, "developer"), (SYSTEM_ALONE, "system"), (REFUSES, "system")]
)
def test_a_developer_s_message_is_the_system_s_if_the_template_does_not_write_it(
    template: str, role: str
) -> None:
    model = make(["a", "b"], template=template)
    chat: Any = [{"role": "developer", "content": "Be brief."}, user("1")]

    async def run() -> None:
        for _ in range(2):
            done = await model.openai.chat.completions.create(model="m", messages=chat)
            chat.append({"role": "assistant", "content": done.choices[0].message.content})
            chat.append(user("2"))

    asyncio.run(run())
    assert isinstance(model.engine, FakeEngine)
    first = TOKENIZER.decode(model.engine.prompts[0])
    assert first.startswith(f"<|im_start|>{role}\nBe brief.<|im_end|>\n<|im_start|>user\n1")
    assert len(model.experiences(1.0)) == 1  # the second turn goes on from the recorded one


def test_a_developer_s_message_continues_the_system_s() -> None:
    chat = make([], template=SYSTEM_ALONE).chat_tokens
    system, developer = ({"role": role, "content": role[0]} for role in ("system", "developer"))
    one = {"role": "system", "content": "s\n\nd"}
    assert chat.in_known_roles([system, developer, user("1")]) == [one, user("1")]
    parts = {"role": "developer", "content": [{"type": "text", "text": "d"}]}
    [first] = chat.in_known_roles([system, parts])
    assert [part["text"] for part in first["content"]] == ["s", "\n\n", "d"]
    apart = chat.in_known_roles([user("1"), developer])
    assert [message["role"] for message in apart] == ["user", "system"]
    assert make([]).chat_tokens.in_known_roles([system, developer]) == [system, developer]


def test_streams_are_served() -> None:
    model = make(["hello"])

    async def run() -> str:
        stream = await model.openai.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "1"}], stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage is not None
        return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)

    assert asyncio.run(run()) == "hello"
    assert len(model.experiences()) == 1


def test_the_model_is_found_by_its_name() -> None:
    model = make([])
    model.model_path = "models/qwen"

    async def run() -> None:
        [listed] = (await model.openai.models.list()).data
        assert listed.id == model.model_path
        assert await model.openai.models.retrieve(listed.id) == listed

    asyncio.run(run())


def test_text_completions_are_served() -> None:
    model = make(["bc"])
    done = asyncio.run(_complete(model))
    assert done.choices[0].text == "bc"
    assert done.choices[0].logprobs and done.choices[0].logprobs.tokens[:2] == ["b", "c"]


async def _complete(model: Any) -> Any:
    return await model.openai.completions.create(model="m", prompt="a", logprobs=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"presence_penalty": 1.0}, "'presence_penalty' is not supported"),
        ({"top_logprobs": 2}, "'top_logprobs' is 2: expected 'logprobs' to be true with it"),
        (
            {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
            "'chat_template_kwargs' is not supported: leave it out; thinking is switched for all",
        ),
        ({"extra_body": {"temprature": 1}}, "unknown key 'temprature': did you mean 'temperature'"),
        ({"top_p": 3.0}, "top_p is 3.0: expected a number above 0"),
    ],
)
def test_what_is_not_served_is_a_bad_request(options: dict[str, Any], message: str) -> None:
    async def run() -> None:
        await make(["a"]).openai.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "1"}], **options
        )

    with pytest.raises(openai.BadRequestError, match=message):
        asyncio.run(run())


def test_a_revoked_model_is_the_cause_of_the_client_s_error() -> None:
    model = make(["a"])
    model.revoke()

    async def run() -> None:
        await model.openai.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "1"}]
        )

    with pytest.raises((Revoked, openai.APIConnectionError)) as caught:
        asyncio.run(run())
    assert isinstance(caught.value.__cause__ or caught.value, Revoked)


def test_the_blocking_client_works_in_a_thread_and_refuses_the_engine_s_loop() -> None:
    async def run() -> None:
        model = make(["a", "b"])
        client = model.get_openai_client()
        messages: Any = [user("1")]

        def call() -> str | None:
            done = client.chat.completions.create(model="m", messages=messages)
            return done.choices[0].message.content

        assert await asyncio.to_thread(call) == "a"
        with pytest.raises((RuntimeError, openai.APIConnectionError)) as caught:
            call()
        assert "would block the event loop" in str(caught.value.__cause__ or caught.value)

    asyncio.run(run())


def test_the_blocking_client_times_out() -> None:
    async def run() -> None:
        client = make(["a"], wait=5).get_openai_client()
        messages: Any = [user("1")]

        def call() -> None:
            client.with_options(timeout=0.02).chat.completions.create(model="m", messages=messages)

        with pytest.raises(openai.APITimeoutError):
            await asyncio.to_thread(call)

    asyncio.run(run())


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_the_async_client_times_out_and_ends_the_generation(elsewhere: bool, streams: bool) -> None:
    ended: list[str] = []

    class Waits(FakeEngine):
        async def generate(self, *args: Any, **named: Any) -> list[Completion]:
            try:
                return await super().generate(*args, **named)
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise

    async def run() -> None:
        engine = Waits(["a"], wait=5)
        client = Model(engine, ChatTokens(TOKENIZER), max_model_len=4000).get_openai_async_client()
        messages: Any = [user("1")]

        async def call() -> None:
            with pytest.raises(openai.APITimeoutError):
                await client.chat.completions.create(
                    model="m", messages=messages, timeout=0.02, stream=streams
                )

        await (asyncio.to_thread(asyncio.run, call()) if elsewhere else call())
        await asyncio.sleep(0.05)
        assert ended == ["cancelled"]

    asyncio.run(run())


def test_clients_without_a_time_out_wait_longer_than_the_library_s_ten_minutes() -> None:
    async def run() -> None:
        model = make(["a"])
        for client in (model.get_openai_client(), model.get_openai_async_client()):
            assert client.timeout == WAIT_S

    asyncio.run(run())


def test_the_async_client_works_on_another_event_loop() -> None:
    async def run() -> None:
        model = make(["a"])
        client = model.get_openai_async_client()
        messages: Any = [user("1")]

        def call() -> str | None:
            done = asyncio.run(client.chat.completions.create(model="m", messages=messages))
            return done.choices[0].message.content

        assert await asyncio.to_thread(call) == "a"

    asyncio.run(run())
