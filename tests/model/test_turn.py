"""Turn: replies that are cut back, added to and gone on with keep what was sampled, id for id."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.fake import TOKENIZER, Say, assistant, engine_of, make, user
from trireme.experience import Experience

ASK = [user("2+2?")]


def spans(experience: Experience) -> list[tuple[bool, str]]:
    """Trained and untrained stretches as text."""
    out: list[tuple[bool, str]] = []
    for token, trained in zip(experience.tokens.tolist(), experience.mask.tolist(), strict=True):
        text = TOKENIZER.decode([token])
        if out and out[-1][0] == trained:
            out[-1] = (trained, out[-1][1] + text)
        else:
            out.append((trained, text))
    return out


def test_a_reply_goes_on_behind_inserted_text() -> None:
    model = make(["I say 5.", " No: 4."])

    async def talk() -> None:
        await model.chat(ASK)
        await model.chat([*ASK, assistant("I say 5. But wait,")])

    asyncio.run(talk())
    [experience] = model.experiences(reward=1.0)
    assert [part for part in spans(experience)[1:]] == [
        (True, "I say 5."),
        (False, " But wait,"),
        (True, " No: 4.<|im_end|>"),
    ]
    assert experience.messages == [*ASK, assistant("I say 5. But wait, No: 4.")]
    assert experience.logprobs is not None
    trained = experience.logprobs[experience.mask].tolist()
    assert trained[:8] == pytest.approx([-0.5 - 0.01 * i for i in range(8)])
    assert trained[8:10] == pytest.approx([-0.5, -0.51])


def test_a_reply_that_is_cut_back_keeps_its_first_tokens_and_loses_the_rest() -> None:
    model = make(["<think>five</think>5", " no, four</think>4"])

    async def talk() -> None:
        await model.chat(ASK)
        await model.chat([*ASK, assistant("<think>five, wait")])

    asyncio.run(talk())
    [experience] = model.experiences(reward=1.0)
    assert spans(experience)[1:] == [
        (True, "<think>five"),
        (False, ", wait"),
        (True, " no, four</think>4<|im_end|>"),
    ]
    assert experience.metrics["conversation/orphans"] == 1
    assert len(engine_of(model).prompts[1]) == experience.mask.tolist().index(True) + 11 + 6


def test_a_reply_that_was_replaced_from_its_beginning_trains_nothing_of_it() -> None:
    model = make(["five", "four"])

    async def talk() -> None:
        await model.chat(ASK)
        await model.chat([*ASK, assistant("The answer: ")])

    asyncio.run(talk())
    [experience] = model.experiences(reward=1.0)
    assert spans(experience)[1:] == [(True, "four<|im_end|>")]


def test_a_new_turn_follows_a_turn_of_several_segments() -> None:
    model = make(["one", "two", "three"])

    async def talk() -> None:
        await model.chat(ASK)
        reply = await model.chat([*ASK, assistant("one, ")])
        await model.chat([*ASK, reply.message, user("and?")])

    asyncio.run(talk())
    [experience] = model.experiences(reward=1.0)
    assert [text for trained, text in spans(experience) if trained] == [
        "one",
        "two<|im_end|>",
        "three<|im_end|>",
    ]
    assert TOKENIZER.decode(experience.tokens.tolist()).count("<|im_end|>") == 4


def test_two_branches_from_one_reply_train_its_beginning_once() -> None:
    model = make(["abcdef", "XY", "UV"])

    async def talk() -> None:
        await model.chat(ASK)
        await model.chat([*ASK, assistant("abcdef+")])
        await model.chat([*ASK, assistant("abcdef-")])

    asyncio.run(talk())
    trained = [
        [text for on, text in spans(experience) if on]
        for experience in model.experiences(reward=1.0)
    ]
    assert [text for texts in trained for text in texts].count("abcdef") == 1
    assert {text for texts in trained for text in texts} == {
        "abcdef",
        "XY<|im_end|>",
        "UV<|im_end|>",
    }


def test_branches_that_begin_at_once_train_what_they_share_once() -> None:
    model = make(["abcdef", "XY", "UV", "ST"])

    async def talk() -> None:
        await model.chat(ASK)
        begun = ("abc", "abcd", "ab")
        await asyncio.gather(*(model.chat([*ASK, assistant(text)]) for text in begun))

    asyncio.run(talk())
    found = [text for e in model.experiences(reward=1.0) for on, text in spans(e) if on]
    assert found == ["abcXY<|im_end|>", "dUV<|im_end|>", "ST<|im_end|>"]


def test_edited_ids_keep_their_weights() -> None:
    model = make(["look it up", "so it is 4"])
    ids = [*TOKENIZER.encode("look it"), *TOKENIZER.encode(" = [4]")]

    async def talk() -> None:
        await model.chat(ASK)
        weights = [1.0] * 4 + [0.0] * 3 + [0.0] * (len(ids) - 7)
        model.edit_reply(ASK, "look it = [4]", ids, weights)
        await model.chat([*ASK, assistant("look it = [4]")])

    asyncio.run(talk())
    [experience] = model.experiences(reward=1.0)
    assert spans(experience)[1:] == [
        (True, "look"),
        (False, " it = [4]"),
        (True, "so it is 4<|im_end|>"),
    ]


def test_ids_that_were_not_sampled_have_no_weight() -> None:
    model = make(["look"])
    ids = TOKENIZER.encode("loot")

    async def talk() -> None:
        await model.chat(ASK)
        model.edit_reply(ASK, "loot", ids, [1.0] * 4)

    with pytest.raises(ValueError, match="token 3 of 4 was not sampled"):
        asyncio.run(talk())


def test_weights_between_zero_and_one_scale_the_loss() -> None:
    model = make(["abcd"])

    async def talk() -> None:
        reply = await model.chat(ASK)
        reply.call.weights = [2.0, 0.0, 0.5, 1.0, 1.0]

    asyncio.run(talk())
    [experience] = model.experiences(reward=1.0)
    assert experience.loss_weight is not None
    assert experience.loss_weight[experience.mask].tolist() == [2.0, 0.5, 1.0, 1.0]


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(
        st.tuples(st.text("ab <>\n", min_size=1, max_size=8), st.integers(0, 9), st.text("xy ,")),
        min_size=1,
        max_size=4,
    )
)
def test_whatever_is_cut_and_inserted_the_trained_tokens_are_sampled_ones(
    parts: list[tuple[str, int, str]],
) -> None:
    """Property: text of the reply = text of its tokens, and every trained id was sampled there."""
    model = make([Say(text) for text, _, _ in parts] + [Say("end")])

    async def talk() -> str:
        content = (await model.chat(ASK)).message["content"]
        for _, count, more in parts:
            content = content[: max(len(content) - count, 0)] + more
            content = (await model.chat([*ASK, assistant(content)])).message["content"]
        return content

    content = asyncio.run(talk())
    model.recorder.drop_branches()
    [experience] = model.experiences(reward=0.0)
    prompt = len(engine_of(model).prompts[0])
    assert TOKENIZER.decode(experience.tokens[prompt:].tolist()) == content + "<|im_end|>"
    assert experience.versions is not None and experience.logprobs is not None
    assert (experience.versions >= 0).tolist() == experience.mask.tolist()
    assert (experience.logprobs != 0).tolist() == experience.mask.tolist()


def test_an_edit_that_cuts_a_continued_reply_away_comes_after_its_continuation() -> None:
    model = make(["a", "b", "c"])

    async def talk() -> None:
        await model.chat(ASK)
        await model.chat([*ASK, assistant("a")])
        model.edit_reply(ASK, "")
        await model.chat([*ASK, assistant(""), user("R")])

    asyncio.run(talk())
    model.recorder.drop_branches()
    [experience] = model.experiences(reward=1.0)
    assert [text for on, text in spans(experience) if on] == ["c<|im_end|>"]
