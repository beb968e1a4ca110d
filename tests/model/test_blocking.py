from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import numpy
import pytest
import torch

from tests.model.fake import TOKENIZER, assistant, make, user
from trireme.batch import flatten
from trireme.engines.engine import Completion
from trireme.experience import Experience
from trireme.model.blocking import BlockingModel
from trireme.model.conversation import of_call
from trireme.model.recorder import Call

T = TypeVar("T")


def in_thread(replies: Any, work: Callable[[BlockingModel], T], **options: Any) -> T:
    """`work` in a thread, with a model whose engine lives on an event loop."""

    async def run() -> T:
        return await asyncio.to_thread(work, make(replies, **options).blocking())

    return asyncio.run(run())


def test_chat_gives_n_experiences_with_ids_of_their_runs() -> None:
    found = in_thread(["a", "b"], lambda m: m.chat([user("1")], n=2), key=(0, 0, 4))
    assert [e.response_text for e in found] == ["a", "b"]
    assert [e.eid.run for e in found] == [4, 5]
    one = found[0]
    assert TOKENIZER.decode(one.tokens[one.prompt_length :]) == "a<|im_end|>"
    assert one.logprobs is not None and len(one.logprobs) == len(one.tokens)


def test_generate_takes_one_prompt_or_several() -> None:
    found = in_thread(["a", "b", "c"], lambda m: m.generate("x") + m.generate(["y", [5, 6]]))
    assert [e.response_text for e in found] == ["a", "b", "c"]


@pytest.mark.parametrize("made", [numpy.array, torch.tensor])
def test_generate_takes_ids_of_numpy_and_torch(made: Any) -> None:
    found = in_thread(
        ["a", "b", "c", "d"],
        lambda m: m.generate(made([5, 6])) + m.generate([made([7, 8]), *made([[5], [6]])]),
    )
    assert [e.response_text for e in found] == ["a", "b", "c", "d"]
    starts = [e.tokens[: e.prompt_length].tolist() for e in found]
    assert starts == [[5, 6], [7, 8], [5], [6]]


def test_logprobs_have_one_entry_a_token() -> None:
    found = in_thread([], lambda m: m.logprobs([1, 2, 3]))
    assert found.tolist() == [0.0, -1.0, -1.0]


def test_blocking_on_the_engine_s_own_loop_is_an_error_and_no_hang() -> None:
    async def run() -> None:
        with pytest.raises(RuntimeError, match="chat would block the event loop"):
            make(["a"]).blocking().chat([user("1")])

    asyncio.run(run())


def test_the_async_twins_work_on_the_engine_s_loop_and_on_another() -> None:
    async def here() -> str | None:
        return (await make(["a"]).blocking().chat_async([user("1")]))[0].response_text

    assert asyncio.run(here()) == "a"

    def elsewhere(model: BlockingModel) -> str | None:
        return asyncio.run(model.chat_async([user("1")]))[0].response_text

    assert in_thread(["a"], elsewhere) == "a"


def test_history_is_given_out_step_by_step_and_conversations_still_go_on() -> None:
    def work(model: BlockingModel) -> None:
        model.chat([user("1")])
        (first,) = model.extract_experience_from_history()
        model.chat([user("1"), assistant("a"), user("2")])
        assert len(model.extract_experience_from_history(clear_history=False)) == 1
        (second,) = model.extract_experience_from_history()
        assert model.extract_experience_from_history() == []
        assert second.tokens[: len(first.tokens)].tolist() == first.tokens.tolist()
        assert TOKENIZER.decode(second.tokens[second.mask]) == "b<|im_end|>"

    in_thread(["a", "b"], work)


def test_a_dialogue_becomes_an_experience_with_the_ids_that_were_sampled() -> None:
    def work(model: BlockingModel) -> None:
        chat = [user("1")]
        for text in ("2", "3"):
            chat += [assistant(str(model.chat(chat)[0].response_text)), user(text)]
        e = model.convert_messages_to_experience(chat)
        assert TOKENIZER.decode(e.tokens[e.mask]) == " a<|im_end|>b<|im_end|>"
        assert TOKENIZER.decode(e.tokens).endswith("<|im_start|>user\n3<|im_end|>\n")
        assert e.metrics["conversation/unmatched"] == 0
        assert e.logprobs is not None and (e.logprobs[e.mask] < 0).all()
        chat[3] = assistant("edited")
        e = model.convert_messages_to_experience(chat)
        assert TOKENIZER.decode(e.tokens[e.mask]) == " a<|im_end|>"
        assert "edited" in TOKENIZER.decode(e.tokens) and e.metrics["conversation/unmatched"] == 1

    in_thread([" a", "b"], work)


def test_a_dialogue_that_no_call_gave_is_not_trained() -> None:
    def work(model: BlockingModel) -> None:
        e = model.convert_messages_to_experience([user("1"), assistant("x")], temperature=0.5)
        assert not e.mask.any() and e.temperature == 0.5
        assert e.logprobs is not None and not e.logprobs.any() and e.version == -1
        trained = Experience([1, 2], prompt_length=1, logprobs=[-1.0], versions=[0])
        assert "old_logprobs" in flatten([trained, e]).fields  # it spoils no batch
        assert e.metrics["conversation/unmatched"] == 1

    in_thread([], work)


def test_a_dialogue_that_is_too_long_is_cut() -> None:
    def work(model: BlockingModel) -> None:
        e = model.convert_messages_to_experience([user("x" * 300), assistant("x")])
        assert len(e.tokens) == 50 and e.truncate_status == "response_truncated"

    in_thread([], work, max_model_len=50)


@pytest.mark.parametrize("length", [500, 30])
def test_a_dialogue_with_weighted_replies_has_their_weights_also_where_it_is_longer_or_cut(
    length: int,
) -> None:
    def work(model: BlockingModel) -> None:
        chat = [user("1")]
        text = str(model.chat(chat)[0].response_text)
        (call,) = model.model.recorder
        weights = [0.25] * len(call.completion.ids)
        model.model.edit_reply(chat, text, list(call.completion.ids), weights)
        e = model.convert_messages_to_experience([*chat, assistant(text), user("2")])
        assert len(e.tokens) == min(34, length) and e.loss_weight is not None
        assert len(e.loss_weight) == len(e.tokens)
        assert e.loss_weight[e.mask].tolist() == [0.25] * int(e.mask.sum())
        assert flatten([e]).fields["loss_weight"].sum() == 0.25 * e.mask.sum() > 0

    in_thread([" a"], work, max_model_len=length)


def test_a_clone_has_a_history_of_its_own() -> None:
    def work(model: BlockingModel) -> None:
        clone = model.clone_with_isolated_history()
        clone.chat([user("1")])
        assert model.extract_experience_from_history() == []
        assert len(clone.extract_experience_from_history()) == 1

    in_thread(["a"], work)


def test_what_is_known_of_the_model() -> None:
    def work(model: BlockingModel) -> None:
        assert (model.model_path, model.model_name, model.model_version) == ("/m/tiny", "tiny", 3)
        assert model.get_message_token_len([user("abc")]) == len("Xuser\nabcX\nXassistant\n")

    in_thread([], work, model_path="/m/tiny")


def test_a_wait_that_gets_no_answer_says_for_what() -> None:
    from trireme.model.blocking import wait_for

    async def run() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(TimeoutError, match=r"chat got no answer from the engine in 0\.01 s"):
            await asyncio.to_thread(wait_for, loop, asyncio.sleep(5), "chat", 0.01)

    asyncio.run(run())


def test_a_thread_that_outlives_the_run_gets_an_error() -> None:
    async def main() -> Any:
        return make(["hi"]).blocking()

    model = asyncio.run(main())
    with pytest.raises(RuntimeError, match="Event loop is closed"):
        model.chat([user("still there?")])


@pytest.mark.parametrize("weights", [None, [0.0, 1.0, 1.0]])
def test_a_call_keeps_nothing_of_what_was_sampled_before_its_first_trained_token(
    weights: list[float] | None,
) -> None:
    reply = Completion([5, 6, 7], [-0.5, -1.0, -2.0], [-0.4, -0.9, -1.9], [3, 3, 4], "stop")
    first = Call(None, [1, 2], reply, 1.0, weights=weights)
    begin = 2 if weights is None else 3
    one = of_call(first, str, run=6)
    assert one.logprobs is not None and one.versions is not None
    assert one.prompt_length == begin and one.eid.run == 6
    assert one.logprobs.tolist() == [0.0, 0.0, -0.5 if weights is None else 0.0, -1.0, -2.0]
    assert one.versions.tolist() == [-1, -1, 3 if weights is None else -1, 3, 4]
    second = of_call(Call(first, [8], reply, 1.0), str)
    assert second.logprobs is not None and second.sampler_logprobs is not None
    assert second.prompt_length == 6 and not second.logprobs[:6].any()
    assert not second.sampler_logprobs[:6].any()
    assert second.versions is not None and second.versions.tolist() == [-1] * 6 + [3, 3, 4]
