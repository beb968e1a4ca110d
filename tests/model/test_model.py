from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.model.fake import TOKENIZER, Say, assistant, engine_of, make, user
from trireme import extensions
from trireme.extensions import names_of
from trireme.model.model import Model, PromptTooLong, Revoked
from trireme.registry import CLIENTS


def ask(model: Model, *chats: list[dict[str, Any]], **options: Any) -> list[Any]:
    async def run() -> list[Any]:
        return [await model.chat(chat, **options) for chat in chats]

    return asyncio.run(run())


def trained(experience: Any) -> str:
    return TOKENIZER.decode(experience.tokens[experience.mask])


def test_a_reply_has_text_message_tokens_and_logprobs() -> None:
    model = make(["Hello"])
    (reply,) = ask(model, [user("hi")])
    assert reply.text == "Hello" and reply.message == assistant("Hello")
    assert TOKENIZER.decode(reply.tokens) == "Hello<|im_end|>"
    assert len(reply.logprobs) == len(reply.tokens) == len(reply.versions)
    assert not reply.truncated
    assert reply.prompt_tokens == len(engine_of(model).prompts[0])


def test_text_in_place_of_messages_is_refused_with_the_message_that_it_would_be() -> None:
    model = make(["a"])
    with pytest.raises(ValueError, match=r"not text: expected \[\{'role': 'user', 'content': 'Hi'"):
        asyncio.run(model.chat("Hi"))  # pyright: ignore[reportArgumentType]


def test_one_experience_a_conversation_with_reward_and_metrics() -> None:
    model = make(["a", "b", "c"], key=(1, 2, 3))
    chat = [user("1"), assistant("a"), user("2")]
    ask(model, chat[:1], chat, [user("other")])
    one, other = model.experiences(reward=0.5, turns=2)
    assert trained(one) == "a<|im_end|>b<|im_end|>" and trained(other) == "c<|im_end|>"
    assert one.reward == other.reward == 0.5
    assert one.metrics["turns"] == 2.0
    assert one.messages == [*chat, assistant("b")]
    assert (
        one.response_text
        == "a<|im_end|>\n<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\nb<|im_end|>"
    )
    assert other.response_text == "c" and other.prompt_text is not None
    assert one.prompt_length == len(engine_of(model).prompts[0])
    assert engine_of(model).keys == [(1, 2, 3, 0), (1, 2, 3, 1), (1, 2, 3, 2)]


@pytest.mark.parametrize("per_call", [False, True])
def test_each_token_keeps_the_version_that_sampled_it(per_call: bool) -> None:
    model = make([Say("ab", versions=(0, 0, 1)), Say("c", versions=(1, 2))])
    chat = [user("1"), assistant("ab"), user("2")]
    ask(model, chat[:1], chat)
    reward: Any = [0.0, 1.0] if per_call else 1.0
    sampled = [
        e.versions[e.mask].tolist()
        for e in model.experiences(reward=reward)
        if e.versions is not None
    ]
    assert sampled == ([[0, 0, 1], [1, 2]] if per_call else [[0, 0, 1, 1, 2]])


def test_a_list_of_rewards_gives_one_experience_a_call() -> None:
    model = make(["a", "b"])
    ask(model, [user("1")], [user("1"), assistant("a"), user("2")])
    one, two = model.experiences(reward=[0.25, 1.0])
    assert (one.reward, two.reward) == (0.25, 1.0)
    assert trained(one) == "a<|im_end|>" and trained(two) == "b<|im_end|>"
    assert two.versions is not None and (two.versions >= 0).equal(two.mask)
    with pytest.raises(ValueError, match=r"has 1 numbers: expected 2, one for each reply"):
        model.experiences(reward=[1.0])


@pytest.mark.parametrize(
    ("reward", "what"),
    [
        ("1", "'1': expected a number"),
        (b"1", "b'1': expected a number"),
        ({"right": 1.0}, r"{'right': 1.0}: expected a number"),
        (float("nan"), "nan: expected a finite number"),
        ([1.0, None], "None: expected a number"),
        (["1", 1.0], "'1': expected a number"),
    ],
)
def test_rewards_that_are_no_numbers_are_refused_by_name(reward: Any, what: str) -> None:
    model = make(["a", "b"])
    ask(model, [user("1")], [user("1"), assistant("a"), user("2")])
    with pytest.raises(ValueError, match=rf"experiences\(reward=...\) has {what}"):
        model.experiences(reward=reward)


def test_per_call_needs_no_list() -> None:
    model = make(["a", "b"])
    ask(model, [user("1")], [user("1"), assistant("a"), user("2")])
    assert [e.reward for e in model.experiences(reward=2, per_call=True)] == [2.0, 2.0]
    assert [e.reward for e in model.experiences(per_call=True)] == [None, None]


def test_sampler_logprobs_are_kept_where_they_differ() -> None:
    model = make(["a", "b"])

    async def run() -> None:
        await model.chat([user("1")])
        await model.chat([user("2")], top_p=0.5)

    asyncio.run(run())
    one, two = model.experiences()
    assert one.sampler_logprobs is None
    assert two.sampler_logprobs is not None and (two.sampler_logprobs == 0).all()


def test_a_retried_call_that_nothing_continues_is_left_out_and_counted() -> None:
    model = make(["lost", "kept", "end"])
    ask(model, [user("1")], [user("1")], [user("1"), assistant("kept"), user("2")])
    (experience,) = model.experiences()
    assert trained(experience) == "kept<|im_end|>end<|im_end|>"
    assert experience.metrics["conversation/orphans"] == 1


def test_two_samples_that_nothing_continues_are_both_kept() -> None:
    model = make(["a", "b"])
    replies = asyncio.run(model.chat_samples([user("1")], n=2))
    assert [r.text for r in replies] == ["a", "b"]
    assert [trained(e) for e in model.experiences()] == ["a<|im_end|>", "b<|im_end|>"]


def test_a_shared_beginning_is_trained_once() -> None:
    model = make(["a", "b", "c"])
    first = [user("1"), assistant("a")]
    ask(model, [user("1")], [*first, user("left")], [*first, user("right")])
    left, right = model.experiences()
    assert trained(left) == "a<|im_end|>b<|im_end|>" and trained(right) == "c<|im_end|>"
    assert right.versions is not None  # what the other trains was sampled all the same
    assert int((right.versions >= 0).sum()) == int(left.mask.sum())


def test_calls_at_several_temperatures_are_separate_experiences_of_the_same_ids() -> None:
    model = make(["a", "b", "c"])
    first = [user("1"), assistant("a")]

    async def run() -> None:
        await model.chat([user("1")])
        await model.chat([*first, user("2")], temperature=0.5)
        await model.chat([*first, user("2"), assistant("b"), user("3")])

    asyncio.run(run())
    one, half = model.experiences(reward=1)
    assert (one.temperature, half.temperature) == (1.0, 0.5)
    assert trained(one) == "a<|im_end|>c<|im_end|>" and trained(half) == "b<|im_end|>"
    assert one.tokens[: len(half.tokens)].tolist() == half.tokens.tolist()


def test_an_edited_reply_is_not_trained() -> None:
    model = make(["bad words", "b"])
    ask(model, [user("1")], [user("1"), assistant("good words"), user("2")])
    one, two = model.experiences()
    assert trained(one) == "bad words<|im_end|>" and trained(two) == "b<|im_end|>"
    assert "good words" in TOKENIZER.decode(two.tokens)


def test_white_space_around_a_reply_does_not_matter() -> None:
    model = make([" a ", "b"])
    ask(model, [user("1")], [user("1"), assistant("a"), user("2")])
    (experience,) = model.experiences()
    assert trained(experience) == " a <|im_end|>b<|im_end|>"


def test_a_name_that_a_client_gives_the_speaker_does_not_matter() -> None:
    model = make(["yes", "no"])
    named = {**assistant("yes"), "name": "solver"}
    ask(model, [user("q")], [user("q"), named, user("r")])
    assert [trained(e) for e in model.experiences(reward=1.0)] == ["yes<|im_end|>no<|im_end|>"]


def test_generate_continues_what_was_generated() -> None:
    model = make([Say("b", stop_reason="length"), "d"])

    async def run() -> None:
        reply = await model.generate("a")
        assert reply.text == "b"
        await model.generate("abc", max_tokens=5)

    asyncio.run(run())
    (experience,) = model.experiences()
    assert TOKENIZER.decode(experience.tokens) == "abcd<|im_end|>"
    assert trained(experience) == "bd<|im_end|>"
    assert engine_of(model).samplings[1].max_tokens == 5


def test_a_prompt_that_is_too_long_is_data() -> None:
    model = make([], max_prompt_tokens=30)
    (reply,) = ask(model, [user("x" * 100)])
    assert reply.truncated and reply.text == "" and engine_of(model).prompts == []
    (experience,) = model.experiences(reward=1.0)
    assert experience.truncate_status == "prompt_truncated" and experience.reward == 0.0
    assert len(experience.tokens) == 31 and experience.prompt_length == 30
    assert not experience.mask.any()
    assert experience.logprobs is not None and experience.logprobs.tolist() == [0.0] * 31


@pytest.mark.parametrize("per_call", [False, True])
def test_a_prompt_that_is_too_long_beside_others_has_the_rollouts_reward(per_call: bool) -> None:
    """Several experiences of a rollout have one reward, which counts once in its group."""
    model = make(["a"], max_prompt_tokens=30)
    ask(model, [user("1")], [user("x" * 100)])
    found = model.experiences(reward=0.7, per_call=per_call)
    assert [e.truncate_status for e in found] == [None, "prompt_truncated"]
    assert [e.reward for e in found] == [0.7, 0.7]
    assert [e.reward for e in model.experiences(reward=[0.7, 0.5])] == [0.7, 0.0]


def test_a_prompt_that_is_too_long_is_an_error_where_truncation_is_off() -> None:
    model = make([], max_prompt_tokens=30, enable_prompt_truncation=False)
    with pytest.raises(PromptTooLong, match=r"context length: expected at most 30 \(model"):
        ask(model, [user("x" * 100)])


def test_a_conversation_may_outgrow_the_prompt_but_not_the_model() -> None:
    model = make(["a" * 30, "b"], max_prompt_tokens=40, max_model_len=120)
    chat = [user("1"), assistant("a" * 30), user("2")]
    replies = ask(model, chat[:1], chat, [*chat, assistant("b"), user("x" * 60)])
    assert [r.truncated for r in replies] == [False, False, True]
    (experience,) = model.experiences(reward=0.7)
    assert experience.truncate_status == "prompt_truncated" and experience.reward == 0.7
    assert trained(experience).endswith("b<|im_end|>") and len(experience.tokens) < 120


def test_a_revoked_model_takes_no_more_calls() -> None:
    model = make(["a"], key=(4, 0, 1))
    twin = model.fork()
    model.revoke()
    for gone in (model, twin):
        with pytest.raises(Revoked, match="rollout 4/0/1 is over"):
            ask(gone, [user("1")])
    with pytest.raises(Revoked):
        asyncio.run(model.logprobs([1, 2]))


def test_the_time_in_the_engine_is_that_of_the_forks_too() -> None:
    model = make(["a", "b"], wait=0.05)
    for one in (model, model.fork()):
        ask(one, [user("1")])
    assert model.seconds > 0.09


def test_a_model_that_is_revoked_while_it_waits_says_so() -> None:
    model = make(["a"], wait=0.02)

    async def run() -> None:
        call = asyncio.ensure_future(model.chat([user("1")]))
        await asyncio.sleep(0)
        model.revoke()
        with pytest.raises(Revoked):
            await call

    asyncio.run(run())
    assert model.experiences() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temprature": 1}, "no option 'temprature': did you mean 'temperature'"),
        ({"top_p": 0}, "sampling top_p is 0: expected a number above 0, at most 1"),
        ({"max_tokens": 0}, "max_tokens is 0: expected an integer from 1"),
        ({"n": 2}, "n=2 gives several replies: call chat_samples"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask(make(["a", "b"]), [user("1")], **options)


def test_none_leaves_an_option_as_the_task_has_it() -> None:
    model = make(["a"])
    ask(model, [user("1")], temperature=None, stop="X")
    (sampling,) = engine_of(model).samplings
    assert sampling.temperature == 1.0 and sampling.stop == ("X",)


@pytest.mark.parametrize(
    "message",
    [
        "hi",
        {"content": "a"},
        {"role": "user", "content": 3},
        {"role": "user", "content": [{"type": "image"}]},
    ],
)
def test_what_is_no_message_is_refused(message: Any) -> None:
    with pytest.raises(ValueError, match="message"):
        ask(make(["a"]), [message])


def test_logprobs_come_from_the_engine() -> None:
    assert asyncio.run(make([]).logprobs([1, 2, 3], temperature=2.0)) == [0.0, -2.0, -2.0]


@pytest.mark.parametrize("form", ["openai", "openai_async"])
def test_a_client_whose_extension_is_not_here_is_refused_with_its_name(
    monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(extensions, "extensions", dict)
    monkeypatch.setattr(CLIENTS, "_registered", {})
    names_of.cache_clear()
    model = make(["a"])
    try:
        with pytest.raises(ValueError) as caught:
            model.get_openai_client() if form == "openai" else model.get_openai_async_client()
    finally:
        names_of.cache_clear()
    assert str(caught.value) == (
        f"client '{form}' needs the extension 'openai', which is not here: `trireme extensions` "
        "lists what is"
    )
