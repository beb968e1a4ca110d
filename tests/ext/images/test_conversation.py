"""Conversations with pictures: recorded token for token, over turns, in whatever form they come."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.ext.images.seeing import make_seeing, picture, png, reader_for
from trireme.batch import flatten
from trireme.data.formats import SftFormat
from trireme.data.rows import Rows
from trireme.engines.device import Device
from trireme.engines.engine import Sampling
from trireme.engines.scripted import ScriptedEngine
from trireme.engines.torch.engine import TorchEngine
from trireme.engines.torch.shell import TorchSettings
from trireme.experience import EID
from trireme.explorer.runner import scored
from trireme.model.chat_tokens import ChatTokens, conversation_of
from trireme.model.model import Model
from trireme.pictures import BEGIN, with_placeholders
from trireme.serialize import experience_of_wire
from trireme.task import Task
from trireme.trainer.model import load_model, token_logprobs


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_5", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing(tmp_path_factory.mktemp(request.param), request.param)


def shows(*parts: Any) -> dict[str, Any]:
    """A user's message of texts and pictures."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part}
        for part in parts
    ]
    return {"role": "user", "content": content}


def placeholder(folder: Path) -> str:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return tokenizer.decode([reader_for(folder).placeholder])


def with_model(folder: Path, talk: Callable[[Model], Awaitable[Any]]) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder)

    async def run() -> Any:
        settings = TorchSettings(max_model_len=400)
        engine = TorchEngine(folder, tokenizer=tokenizer, device=Device(), settings=settings)
        chat = ChatTokens(tokenizer, reader=reader_for(folder))
        sampling = Sampling(max_tokens=7, temperature=0.8)
        try:
            return await talk(Model(engine, chat, sampling=sampling, max_model_len=400))
        finally:
            await engine.close()

    return asyncio.run(run())


def test_a_picture_of_a_later_turn_is_seen_in_the_turns_after_it(folder: Path) -> None:
    red, blue = picture("red"), picture("blue", (120, 150))

    async def talk(model: Model) -> Any:
        chat = [shows("What is this?", red)]
        for further in ("Sure?", ("And ", blue, " this?"), "Which is larger?"):
            reply = await model.chat(chat)
            message = shows(*further) if isinstance(further, tuple) else shows(further)
            chat += [reply.message, message]
        await model.chat(chat)
        assert model.recorder.splits == 0
        [experience] = model.experiences(reward=1.0)
        return experience, len(model.recorder)

    experience, calls = with_model(folder, talk)
    assert calls == 4 and len(experience.pictures) == 2
    tokens = experience.tokens.tolist()
    for each in experience.pictures:
        begin = tokens.index(each.first)
        assert tokens[begin : begin + each.tokens] == list(each.ids)
    # the trainer, on the experience alone, computes what the engine has sampled from
    with torch.no_grad():
        scored, _ = token_logprobs(load_model(folder, device="cpu"), flatten([experience]))
    sampled = experience.logprobs[experience.mask]
    assert float((scored - sampled).abs().max()) < 1e-4
    named = [
        part["image"]
        for message in experience.messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image"
    ]
    assert named == [f"sha256:{each.digest}" for each in experience.pictures]
    assert experience.prompt_text.count(placeholder(folder)) == 1


def test_ids_are_those_of_the_rendered_text_with_pictures_in_their_places(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    reader = reader_for(folder)
    chat = ChatTokens(tokenizer, reader=reader)
    red, blue = picture("red"), picture("blue")
    messages = chat.plain([shows(red, "and", blue, "?")])
    prompt = chat.prompt(messages)
    text = chat.render(messages)
    assert with_placeholders(prompt.ids, reader.placeholder) == chat.encode(text)
    assert chat.decode(prompt.ids) == chat.decode(chat.encode(text))
    assert len(chat.ids_of_text(text, messages)) == len(prompt.ids)
    assert sum(token >= BEGIN for token in prompt.ids) == 2 * reader.read(red).tokens


@pytest.mark.parametrize("form", ["image_url", "input_image", "image"])
def test_forms_of_parts(folder: Path, form: str) -> None:
    url = "data:image/png;base64," + base64.b64encode(png(picture("red"))).decode()
    parts = {
        "image_url": {"type": "image_url", "image_url": {"url": url}},
        "input_image": {"type": "input_image", "image_url": url},
        "image": {"type": "image", "url": url},
    }
    chat = ChatTokens(AutoTokenizer.from_pretrained(folder), reader=reader_for(folder))
    [message] = chat.plain([{"role": "user", "content": [parts[form]]}])
    assert message["content"][0]["image"].data == png(picture("red"))


def test_several_samples_share_a_prompt_and_its_picture(folder: Path) -> None:
    async def talk(model: Model) -> Any:
        replies = await model.chat_samples([shows("What?", picture("red"))], n=3)
        return [model.experience(reply.call) for reply in replies]

    made = with_model(folder, talk)
    assert len({id(e.pictures[0]) for e in made}) == 1
    assert len({tuple(e.tokens[: e.prompt_length].tolist()) for e in made}) == 1


def test_ids_that_show_a_recorded_picture_go_on_and_begin_again(folder: Path) -> None:
    """Plain ids come without their pictures, which the record of the rollout has."""

    async def talk(model: Model) -> Any:
        first = (await model.chat([shows("What?", picture("red"))])).call
        longer = await model.generate([*first.ids, *model.chat_tokens.encode(" more")])
        again = await model.generate(first.inserted)
        unknown = [token + (1 << 20) if token >= BEGIN else token for token in first.inserted]
        with pytest.raises(ValueError, match="shows a picture that did not come with it"):
            await model.generate(unknown)
        return [model.experience(reply.call) for reply in (longer, again)]

    for experience in with_model(folder, talk):
        assert len(experience.pictures) == 1 and experience.trained_tokens == 7
        flatten([experience])  # as a trainer reads it


def test_a_text_that_contains_the_placeholder_is_refused_beside_a_picture(folder: Path) -> None:
    async def talk(model: Model) -> Any:
        with pytest.raises(ValueError, match="has 1 pictures, and its text has 2 places for one"):
            await model.chat([shows(f"What is {placeholder(folder)}?", picture("red"))])

    with_model(folder, talk)


def test_a_reply_that_goes_on_shows_no_picture(folder: Path) -> None:
    """Neither one of the record nor one that the record does not have."""

    async def talk(model: Model) -> Any:
        asked = shows("What?")
        for known in (False, True):
            begun = [asked, {**shows("It is ", picture("red")), "role": "assistant"}]
            for call in (model.chat, model.prompt_tokens):
                with pytest.raises(ValueError, match="shows a picture: expected text alone"):
                    await call(begun)
            if not known:
                await model.chat([asked])

    with_model(folder, talk)


def test_a_supervised_row_whose_template_leaves_out_a_picture_is_refused(folder: Path) -> None:
    """The next picture's place would get the one that was left out."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    deaf = tokenizer.chat_template.replace(
        "{%- if part['type'] == 'image' %}",
        "{%- if message['role'] == 'system' %}{%- elif part['type'] == 'image' %}",
    )
    row = {
        "messages": [
            {"role": "system", "content": "You see <image>."},
            {"role": "user", "content": "<image> What?"},
            {"role": "assistant", "content": "blue"},
            {"role": "user", "content": "And <image>?"},
            {"role": "assistant", "content": "green", "weight": 0},
        ],
        "images": [png(picture(colour)) for colour in ("red", "blue", "green")],
    }
    row["messages"][2]["weight"] = 1
    rows, reader = Rows("data", [row], row.keys()), reader_for(folder)
    options: dict[str, Any] = {"max_model_len": 400, "reader": reader}
    whole = SftFormat(rows, tokenizer, **options)(0, eid=EID())
    assert whole is not None
    seen = [each.data for each in whole.pictures]
    assert seen == row["images"][:2]  # what follows the last trained reply is left out
    with pytest.raises(ValueError, match=r"row 0: .* has 2 pictures, and its text has 1 places"):
        SftFormat(rows, tokenizer, chat_template=deaf, **options)(0, eid=EID())


def test_an_engine_that_sees_nothing_says_so(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = ChatTokens(tokenizer, reader=reader_for(folder))
    model = Model(ScriptedEngine(["red"], tokenizer=tokenizer), chat, max_model_len=200)
    with pytest.raises(ValueError, match="the engine reads text alone"):
        asyncio.run(model.chat([shows(picture("red"))]))


def test_a_model_that_sees_nothing_says_so(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    engine = ScriptedEngine(["red"], tokenizer=tokenizer)
    model = Model(engine, ChatTokens(tokenizer), max_model_len=200)
    with pytest.raises(ValueError, match="this model takes text alone"):
        asyncio.run(model.chat([shows(picture("red"))]))


def test_a_prompt_that_is_too_long_is_cut_in_a_picture_and_not_trained(folder: Path) -> None:
    async def talk(model: Model) -> Any:
        model.max_prompt_tokens = 16  # in the middle of it
        await model.chat([shows("What?", picture("red", (300, 300)))])
        [experience] = model.experiences(reward=1.0)
        return experience

    experience = with_model(folder, talk)
    assert experience.truncate_status == "prompt_truncated"
    assert experience.tokens[-1] >= BEGIN and flatten([experience]).num_tokens == 0


def test_rows_show_their_pictures_where_their_tags_are() -> None:
    row = {"question": "Is <image> left of <image>?", "images": ["a.png", "b.png"]}
    task = Task(raw_task=row, format_args={"prompt_key": "question"})
    [message] = conversation_of(task, task.prompt, None)
    assert [part.get("image", part.get("text")) for part in message["content"]] == [
        *("Is ", "a.png", " left of ", "b.png", "?")
    ]
    with pytest.raises(ValueError, match="2 tags <image>, and its row 1 pictures"):
        conversation_of(
            Task(raw_task=row | {"images": ["a.png"]}, format_args={"prompt_key": "question"}),
            task.prompt,
            None,
        )
    parts = [{"type": "image"}, {"type": "text", "text": "?"}]
    row = {"question": [{"role": "user", "content": parts}], "images": ["a.png"]}
    task = Task(raw_task=row, format_args={"prompt_key": "question"})
    [message] = conversation_of(task, task.prompt, None)
    assert message["content"][0] == {"type": "image", "image": "a.png"}
    blank = Task(
        raw_task={"question": "<image>?", "image": None},
        format_args={"prompt_key": "question", "image_key": "image"},
    )
    with pytest.raises(ValueError, match="1 tags <image>, and its row 0 pictures"):
        conversation_of(blank, blank.prompt, None)


@pytest.mark.extension("openai")
def test_openais_client_sends_pictures(folder: Path) -> None:
    data = png(picture("red"))
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    parts = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": url}}]

    async def talk(model: Model) -> Any:
        ask: Any = model.openai.chat.completions.create
        more = {"return_token_ids": True}
        answer = await ask(model="", messages=[{"role": "user", "content": parts}], extra_body=more)
        [experience] = model.experiences(reward=1.0)
        ids, prompt = answer.prompt_token_ids, experience.tokens[: experience.prompt_length]
        shown = model.chat_tokens.outside(prompt.tolist())
        assert ids == shown and max(ids) < BEGIN
        bad = [{"type": "image_url", "image_url": {"url": "/etc/hostname"}}]
        with pytest.raises(Exception, match="expected a data URL"):
            await ask(model="", messages=[{"role": "user", "content": bad}])
        return experience

    experience = with_model(folder, talk)
    assert [each.data for each in experience.pictures] == [data]


@pytest.mark.extension("rollout_server")
def test_trainers_endpoints_take_pictures_that_a_request_brings(folder: Path) -> None:
    """And give them back with the experience; a path would be read on the server."""
    from tests.ext.http.made import client_of, torch_rollouts

    data, reader = png(picture("red")), reader_for(folder)
    (folder / "red.png").write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()

    async def ask(path: str, source: str) -> Any:
        parts = [{"type": "image", "image": source}, {"type": "text", "text": "What?"}]
        chat = [{"role": "user", "content": parts}]
        body: dict[str, Any] = {"messages": [chat], "max_tokens": 3}
        if path == "/infer/":
            body = {"infer_requests": [{"messages": chat}], "request_config": {"max_tokens": 3}}
        async with torch_rollouts(folder) as rollouts:
            rollouts.chat = ChatTokens(rollouts.chat.tokenizer, reader=reader)
            rollouts.max_text = 100  # a picture is no text
            async with client_of(rollouts) as client:
                return await client.post(path, json=body)

    for path in ("/infer/", "/chat/"):
        answer = asyncio.run(ask(path, url))
        assert answer.status_code == 200, answer.text
        if path == "/infer/":
            experience = experience_of_wire(answer.json()[0]["experience"])
            assert [each.data for each in experience.pictures] == [data]
            flatten([experience])  # as a trainer reads it
        else:  # ids that a program which is not ours knows
            [ids] = answer.json()["prompt_ids"]
            assert max(ids) < BEGIN and ids.count(reader.placeholder) == reader.read(data).tokens
        answer = asyncio.run(ask(path, str(folder / "red.png")))
        assert answer.status_code in (400, 422) and "expected a data URL" in answer.text


@pytest.mark.extension("http")
def test_all_apis_say_the_same_of_a_picture() -> None:
    from trireme.ext.http import messages, responses

    data = base64.b64encode(b"png").decode()
    expected = [
        {"type": "text", "text": "What?"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
    ]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    block = {"type": "image", "source": source}
    text = {"type": "text", "text": "What?"}
    asked = messages.chat_body({"messages": [{"role": "user", "content": [text, block]}]})
    assert asked["messages"] == [{"role": "user", "content": expected}]
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text, block]}
    asked = messages.chat_body({"messages": [{"role": "user", "content": [result]}]})
    assert asked["messages"] == [{"role": "tool", "tool_call_id": "a", "content": expected}]
    parts = [
        {"type": "input_text", "text": "What?"},
        {"type": "input_image", "image_url": f"data:image/png;base64,{data}"},
    ]
    asked = responses.chat_body({"input": [{"role": "user", "content": parts}]}, [])
    assert asked["messages"] == [{"role": "user", "content": expected}]
    with pytest.raises(ValueError, match="source is 'url': expected base64"):
        bad = {"type": "image", "source": {"type": "url", "url": "http://x"}}
        messages.chat_body({"messages": [{"role": "user", "content": [bad]}]})


def test_a_teacher_scores_what_was_seen(folder: Path) -> None:
    """As distillation asks it: the experience's ids, with its pictures."""

    async def talk(model: Model) -> Any:
        await model.chat([shows("What?", picture("red"))], temperature=1.0)
        [e] = model.experiences(reward=1.0)
        scored = await model.logprobs(e.tokens.tolist(), 1.0, e.pictures)
        blocking, ids = model.blocking(), e.tokens.tolist()
        for told in (
            await blocking.logprobs_async(ids, 1.0, e.pictures),
            await asyncio.to_thread(blocking.logprobs, ids, 1.0, pictures=e.pictures),
        ):
            assert told.tolist() == pytest.approx(scored)
        return e, torch.tensor(scored)

    e, scored = with_model(folder, talk)
    assert float((scored - e.logprobs)[e.mask].abs().max()) < 1e-4
    assert not scored[e.tokens >= BEGIN].any()


def test_a_teacher_s_prompt_shows_the_pictures_of_the_message_that_it_replaces(
    folder: Path,
) -> None:
    red = picture("red")

    async def talk(model: Model) -> Any:
        await model.chat([shows(red, "What?")], temperature=1.0)
        [e] = model.experiences(reward=1.0)
        for text, asked in (
            ("A disc?", shows(red, "A disc?")),
            ("A disc: <image>?", shows("A disc: ", red, "?")),
        ):
            e.teacher_logprobs = None
            await scored([e], model, model, text)
            prompt = model.chat_tokens.prompt(model.chat_tokens.plain([asked]))
            ids = [*prompt.ids, *e.tokens[e.prompt_length :].tolist()]
            expected = await model.logprobs(ids, 1.0, e.pictures)
            told: Any = e.teacher_logprobs
            assert told[e.prompt_length :].tolist() == expected[len(prompt.ids) :]
        with pytest.raises(ValueError, match="2 tags <image>, and its row 1 pictures"):
            e.teacher_logprobs = None
            await scored([e], model, model, "<image> or <image>?")

    with_model(folder, talk)
