from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from tests.model import templates
from tests.model.fake import TOKENIZER, Say, assistant, engine_of, make, user
from trireme.model.chat_tokens import DROPS_TOOLS, ChatTokens, Recorded
from trireme.model.model import Model

SYSTEM = {"role": "system", "content": "Be brief."}
KINDS: dict[str, tuple[str, Any, str]] = {
    "chatml": (templates.CHATML, TOKENIZER, "<|im_end|>"),
    "thinking": (templates.THINKING, TOKENIZER, "<|im_end|>"),
    "headers": (templates.HEADERS, templates.headers_tokenizer(), "<|eot|>"),
    "strict": (templates.STRICT, templates.headers_tokenizer(), "<|eot|>"),
    "generation": (templates.GENERATION, TOKENIZER, "<|im_end|>"),
}


def talk(model: Model, turns: list[str], first: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ask, append the reply, ask again; the whole conversation."""

    async def run() -> list[dict[str, Any]]:
        chat = list(first)
        for turn in turns:
            chat.append(user(turn))
            chat.append((await model.chat(chat)).message)
        return chat

    return asyncio.run(run())


def one_go(model: Model, chat: list[dict[str, Any]]) -> list[int]:
    """The conversation rendered and encoded as a whole, up to the end of the last reply."""
    tokens = model.chat_tokens
    text = tokens.render(chat, generate=False)
    return tokens.encode(text.rstrip("\n"))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "strict"])
@pytest.mark.parametrize("system", [True, False])
def test_a_conversation_has_the_ids_of_the_template_rendered_in_one_go(
    kind: str, system: bool
) -> None:
    template, tokenizer, end = KINDS[kind]
    replies = [Say(f"Reply {i}.", end=end) for i in range(8)]
    model = make(replies, template=template, tokenizer=tokenizer)
    chat = talk(model, [f"Turn {i}?" for i in range(8)], [SYSTEM] if system else [])
    (experience,) = model.experiences(reward=1.0)
    assert experience.tokens.tolist() == one_go(model, chat)
    assert experience.metrics["conversation/splits"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_is_what_the_engine_sampled(kind: str) -> None:
    template, tokenizer, end = KINDS[kind]
    said = ["One.", "<think>\nHm.\n</think>\n\nTwo.", "  Three  ", "Four."]
    model = make([Say(s, end=end) for s in said], template=template, tokenizer=tokenizer)
    talk(model, ["a", "b", "c", "d"], [])
    sampled = [tokenizer.encode(s + end, add_special_tokens=False) for s in said]
    found = []
    for e in model.experiences():
        assert e.versions is not None and e.logprobs is not None
        assert (e.versions[e.mask] == 3).all()
        assert (e.logprobs[e.mask] < 0).all() and (e.logprobs[e.versions < 0] == 0).all()
        found += e.tokens[e.mask].tolist()
    assert found == [token for ids in sampled for token in ids]


def test_white_space_that_a_template_puts_before_a_reply_splits_nothing() -> None:
    template, tokenizer, end = KINDS["strict"]
    model = make([Say("a", end=end), Say("b", end=end)], template=template, tokenizer=tokenizer)
    talk(model, ["1", "2"], [SYSTEM])
    (experience,) = model.experiences()
    text = tokenizer.decode(experience.tokens)
    assert text == "[INST] Be brief.\n1 [/INST]a<|eot|>[INST] 2 [/INST]b<|eot|>"


def test_a_template_that_drops_thinking_splits_the_conversation() -> None:
    said = ["<think>\nA\n</think>\n\nYes.", "<think>\nB\n</think>\n\nNo."]
    model = make(said, template=templates.THINKING)
    talk(model, ["first", "second"], [])
    one, two = model.experiences()
    assert "<think>\nA" in TOKENIZER.decode(one.tokens)
    assert "A" not in TOKENIZER.decode(two.tokens) and "Yes." in TOKENIZER.decode(two.tokens)
    assert one.metrics["conversation/splits"] == 1
    prompt = model.chat_tokens.render([user("first"), assistant(said[0]), user("second")])
    assert two.tokens.tolist() == model.chat_tokens.encode(prompt + said[1] + "<|im_end|>")


def test_thinking_stays_while_tools_answer() -> None:
    said = ["<think>\nA\n</think>\n\ncall", "<think>\nB\n</think>\n\ndone"]
    model = make(said, template=templates.THINKING)

    async def run() -> list[dict[str, Any]]:
        chat = [user("go")]
        chat += [(await model.chat(chat)).message, {"role": "tool", "content": "42"}]
        return [*chat, (await model.chat(chat)).message]

    chat = asyncio.run(run())
    (experience,) = model.experiences()
    assert experience.tokens.tolist() == one_go(model, chat)


def test_an_empty_thinking_block_in_the_prompt_is_rewritten_history() -> None:
    model = make(["a", "b"], template=templates.THINKING, enable_thinking=False)
    talk(model, ["1", "2"], [])
    assert len(model.experiences()) == 2
    assert model.recorder.splits == 1


@pytest.mark.parametrize(
    ("say", "sampled"),
    [
        (Say("cut", stop_reason="length"), "cut"),
        (Say("it", stop_reason="stop", stop="END", behind="END"), "itEND"),
        (Say("all"), "all<|im_end|>"),
    ],
)
def test_missing_ends_of_turns_are_inserted_untrained_and_sampled_ones_not_doubled(
    say: Say, sampled: str
) -> None:
    model = make([say, "next"], template=templates.CHATML)
    talk(model, ["a", "b"], [])
    (experience,) = model.experiences()
    text = TOKENIZER.decode(experience.tokens)
    end = "" if sampled.endswith("<|im_end|>") else "<|im_end|>"
    assert f"assistant\n{sampled}{end}\n<|im_start|>user\nb<|im_end|>" in text
    trained = TOKENIZER.decode(experience.tokens[experience.mask])
    assert trained == f"{sampled}next<|im_end|>"


def test_another_end_token_than_the_template_s_stands_for_it() -> None:
    tokenizer = templates.headers_tokenizer()
    model = make([Say("a"), Say("b")], template=templates.HEADERS, tokenizer=tokenizer)
    talk(model, ["1", "2"], [])
    (experience,) = model.experiences()
    assert "a<|im_end|><|head|>user" in tokenizer.decode(experience.tokens)


def test_a_last_message_of_the_assistant_s_is_gone_on_with() -> None:
    model = make(["42</answer>", "yes"], template=templates.CHATML)

    async def run() -> None:
        reply = await model.chat([user("q"), assistant("<answer>")])
        assert reply.text == "42</answer>" and reply.message["content"] == "<answer>42</answer>"
        await model.chat([user("q"), reply.message, user("sure?")])

    asyncio.run(run())
    assert TOKENIZER.decode(engine_of(model).prompts[0]).endswith("assistant\n<answer>")
    (experience,) = model.experiences()
    assert TOKENIZER.decode(experience.tokens[experience.mask]).startswith("42</answer>")


def test_a_cut_reply_can_be_gone_on_with_in_the_same_turn() -> None:
    model = make([Say("half ", stop_reason="length"), "whole"], template=templates.CHATML)

    async def run() -> None:
        reply = await model.chat([user("q")])
        reply = await model.chat([user("q"), reply.message])
        assert reply.message["content"] == "half whole"

    asyncio.run(run())
    (experience,) = model.experiences()
    assert TOKENIZER.decode(experience.tokens).endswith("assistant\nhalf whole<|im_end|>")


def test_tools_reach_the_template_and_a_change_of_tools_begins_anew() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    model = make(["a", "b", "c"], template=templates.CHATML)

    async def run() -> None:
        chat = [user("1")]
        chat += [(await model.chat(chat, tools)).message, user("2")]
        chat += [(await model.chat(chat, tools)).message, user("3")]
        await model.chat(chat)

    asyncio.run(run())
    first, second = model.experiences()
    assert "look" in TOKENIZER.decode(first.tokens) and first.tools == tools
    assert "look" not in TOKENIZER.decode(second.tokens) and second.tools is None


def test_a_template_without_tools_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    model = make(["a", "b"], template=templates.HEADERS)

    async def run() -> None:
        for _ in range(2):
            await model.chat([user("1")], tools)

    asyncio.run(run())
    assert caplog.messages == [DROPS_TOOLS]


class Counting:
    """A tokenizer that counts the characters that it renders and encodes."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.encoded = 0
        self.rendered = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode(self, text: str, **options: Any) -> list[int]:
        self.encoded += len(text)
        return self._inner.encode(text, **options)

    def apply_chat_template(self, *args: Any, **options: Any) -> str:
        text = self._inner.apply_chat_template(*args, **options)
        self.rendered += len(text)
        return text


def test_a_later_turn_costs_what_is_new() -> None:
    tokenizer = Counting(TOKENIZER)
    model = make(
        lambda _: "y" * 300, template=templates.CHATML, tokenizer=tokenizer, max_model_len=10**6
    )
    costs = []

    async def run() -> None:
        chat = [user("x" * 3000)]
        for _ in range(30):
            before = tokenizer.encoded + tokenizer.rendered
            reply = await model.chat(chat)
            # what the fake engine itself encodes is not the model's cost
            costs.append(tokenizer.encoded + tokenizer.rendered - before - 310)
            chat += [reply.message, user("z" * 50)]

    asyncio.run(run())
    (experience,) = model.experiences()
    assert len(experience.tokens) > 12000
    assert max(costs[1:]) < 3000  # templates are tried on placeholders, which are short


def test_a_long_pattern_is_shortened_where_the_same_roles_meet() -> None:
    from trireme.model.chat_tokens import _shortened

    roles = ("system", *("user", "assistant") * 40)
    short = _shortened(roles)
    assert len(short) <= 13 and short[-8:] == roles[-8:]
    assert set(pairwise(short)) <= set(pairwise(roles))


def test_no_template_is_a_clear_error() -> None:
    tokenizer = make_without_template()
    with pytest.raises(ValueError, match="no chat template"):
        ChatTokens(tokenizer).prompt([user("hi")])


def make_without_template() -> Any:
    from tests.tiny import make_tokenizer

    return make_tokenizer(template=None)


def test_a_template_s_refusal_names_the_roles() -> None:
    chat = ChatTokens(templates.headers_tokenizer(), chat_template=templates.STRICT)
    with pytest.raises(ValueError, match=r"refuses a conversation of user, user: roles must"):
        chat.prompt([user("a"), user("b")])


def test_tail_is_what_follows_without_a_prompt_for_more() -> None:
    chat = ChatTokens(TOKENIZER, chat_template=templates.CHATML)
    old = [user("a"), assistant("b")]
    recorded = Recorded(old, TOKENIZER.encode("b<|im_end|>"), ended=True)
    ids = chat.tail([*old, user("c")], None, recorded)
    assert ids is not None
    assert TOKENIZER.decode(ids) == "\n<|im_start|>user\nc<|im_end|>\n"
