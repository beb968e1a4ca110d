"""Drift: over many templates and random conversations, what was sampled is what is trained.

Each sampled token has a log-probability that no other has, so that a trained token says which one
it is. The test keeps its own account of what was said, and of what was cut away.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model import templates
from tests.model.fake import FakeEngine, Say, make, user
from trireme.engines.engine import Completion, Sampling
from trireme.experience import Experience
from trireme.model.model import Model

TOKENIZER: Any = templates.headers_tokenizer()
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "F.", "parameters": {"a": "b"}}}
]


@dataclass(frozen=True)
class Shape:
    """A template, and what is true of it."""

    template: str
    end: str = "<|im_end|>"
    tools: bool = True
    keeps: bool = False
    """What it writes is what was said, and later turns leave it as it is."""


SHAPES = {
    "chatml": Shape(templates.CHATML, keeps=True),
    "generation": Shape(templates.GENERATION, keeps=True),
    "tool_turns": Shape(templates.TOOL_TURNS, keeps=True),
    "thinking": Shape(templates.THINKING),
    "tool_thinking": Shape(templates.TOOL_THINKING),
    "headers": Shape(templates.HEADERS, end="<|eot|>"),
    "header_tools": Shape(templates.HEADER_TOOLS, end="<|eot|>"),
    "strict": Shape(templates.STRICT, end="<|eot|>", tools=False),
}

# What is sampled and what is inserted share no character: where a cut went is never ambiguous.
SAID = st.tuples(
    st.sampled_from(["", "<think>", "<think>\n"]), st.text("ab \n", max_size=6)
).flatmap(
    lambda begun: st.builds(
        lambda closes, text: "".join(begun) + ("</think>" * closes if begun[0] else "") + text,
        st.booleans(),
        st.text("ab \n", min_size=1, max_size=6),
    )
)
REPLY = st.builds(
    lambda text, how: {
        "stop": Say(text),
        "length": Say(text, stop_reason="length"),
        "string": Say(text, stop="!", behind="!"),
    }[how],
    SAID,
    st.sampled_from(["stop", "stop", "length", "string"]),
)
ADDED = st.text("123", max_size=4)
NEXT = st.one_of(
    st.tuples(st.just("user"), st.text("QR ", min_size=1, max_size=5), st.just(0)),
    st.tuples(st.just("tool"), st.text("QR ", min_size=1, max_size=5), st.integers(1, 3)),
    st.tuples(st.just("inside"), ADDED, st.integers(0, 9)),
    st.tuples(st.just("edit"), ADDED, st.integers(0, 9)),
)
TALKS = st.tuples(REPLY, st.lists(st.tuples(NEXT, REPLY), max_size=5))


class Counting(FakeEngine):
    """Each token that it samples has a log-probability of its own."""

    def __init__(self, replies: Sequence[Say]) -> None:
        super().__init__(replies, TOKENIZER)
        self.numbers = itertools.count(1)
        self.last: list[tuple[str, int]] = []

    def _completion(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        completion = super()._completion(ids, sampling)
        numbers = [next(self.numbers) for _ in completion.ids]
        logprobs = [-number / 1024 for number in numbers]
        texts = [TOKENIZER.decode([i]) for i in completion.ids]
        self.last = list(zip(texts, numbers, strict=True))
        return Completion(
            completion.ids,
            logprobs,
            list(logprobs),
            completion.versions,
            completion.stop_reason,
            completion.stop,
            completion.text,
        )


@dataclass
class Account:
    """What was said, token by token: its text, and its number where it was sampled."""

    turns: list[list[tuple[str, int | None]]] = field(default_factory=list)

    def replace(self, content: str) -> None:
        """The last turn's reply is now `content`."""
        kept: list[tuple[str, int | None]] = []
        at = 0
        for text, number in self.turns[-1]:
            if not content.startswith(text, at):
                break
            kept.append((text, number))
            at += len(text)
        self.turns[-1] = kept + [(character, None) for character in content[at:]]

    @property
    def alive(self) -> dict[int, str]:
        """Number -> text of all that was sampled and not cut away."""
        return {number: text for turn in self.turns for text, number in turn if number is not None}


async def hold(model: Model, shape: Shape, talk: Any) -> tuple[Account, list[dict[str, Any]]]:
    """Hold a conversation."""
    _, following = talk
    engine: Any = model.engine
    account, tools = Account(), TOOLS if shape.tools else None
    messages: list[dict[str, Any]] = [user("Q?")]

    async def ask() -> None:
        goes_on = messages[-1]["role"] == "assistant"
        reply = await model.chat(messages, tools)
        if goes_on:
            messages.pop()
        else:
            account.turns.append([])
        messages.append(reply.message)
        account.turns[-1] += engine.last

    await ask()
    for (kind, text, number), _ in following:
        if kind in ("inside", "edit"):
            old = messages[-1]["content"]
            content = old[: max(len(old) - number, 0)] + text
            if kind == "inside":
                messages[-1] = {"role": "assistant", "content": content}
                account.replace(content)
            elif content != old:
                model.edit_reply(messages[:-1], content, tools=tools)
                messages[-1] = {"role": "assistant", "content": content}
                account.replace(content)
        if kind == "tool" and shape.tools:
            messages += [{"role": "tool", "content": f"{text}{n}"} for n in range(number)]
        elif kind != "inside":
            messages.append(user(text or "R"))
        await ask()
    model.recorder.drop_branches()
    return account, messages


def lived(shape: Shape, talk: Any) -> tuple[Model, Account, list[Any], list[Experience]]:
    first, following = talk
    replies = [first, *(reply for _, reply in following)]
    for say in replies:
        say.end = shape.end
    model = make([], template=shape.template, tokenizer=TOKENIZER, max_model_len=10**6)
    engine: Any = Counting(replies)
    model.engine = engine
    account, messages = asyncio.run(hold(model, shape, talk))
    return model, account, messages, model.experiences(reward=0.0)


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=40, deadline=None)
@given(talk=TALKS)
def test_what_was_sampled_and_not_cut_away_is_trained_once_as_it_was(name: str, talk: Any) -> None:
    _, account, _, found = lived(SHAPES[name], talk)
    trained: dict[int, str] = {}
    for experience in found:
        assert experience.logprobs is not None and experience.versions is not None
        tokens = zip(
            experience.tokens.tolist(),
            experience.mask.tolist(),
            experience.logprobs.tolist(),
            experience.versions.tolist(),
            strict=True,
        )
        for token, on, logprob, version in tokens:
            assert (version >= 0) == (logprob != 0)  # sampled, here or in another experience
            if on:
                number = round(-logprob * 1024)
                assert version == 3 and number not in trained
                trained[number] = TOKENIZER.decode([token])
    assert trained == account.alive


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.keeps])
@settings(max_examples=40, deadline=None)
@given(talk=TALKS)
def test_where_nothing_is_rewritten_the_tokens_are_the_rendered_conversation(
    name: str, talk: Any
) -> None:
    shape = SHAPES[name]
    for say in (talk[0], *(reply for _, reply in talk[1])):
        if say.stop is not None:
            say.stop, say.behind = None, ""  # a stop string is sampled, and in no message
    model, _, messages, [experience] = lived(shape, talk)
    assert experience.mask.tolist() == (experience.versions >= 0).tolist()  # pyright: ignore
    text = TOKENIZER.decode(experience.tokens.tolist())
    tools = TOOLS if shape.tools else None
    whole = model.chat_tokens.render(messages, tools, generate=False)
    # behind the last reply there is what the model has sampled
    assert whole.removesuffix("\n").removesuffix("<|im_end|>") == text.removesuffix("<|im_end|>")
