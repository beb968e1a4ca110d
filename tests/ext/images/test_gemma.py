"""Gemma 3: a picture stands between lines of its own, whatever its chat template writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, Gemma3Processor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from tests.ext.images.seeing import make_seeing, picture, reader_for
from trireme.config.lookup import model_config
from trireme.data.reply_mask import render_conversation
from trireme.ext.images.reader import make_reader, reader_of
from trireme.model.chat_tokens import ChatTokens
from trireme.pictures import BEGIN

SHOWN = [
    {"type": "text", "text": "See:"},
    {"type": "image", "image": None},
    {"type": "text", "text": "and"},
    {"type": "image", "image": None},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing(tmp_path_factory.mktemp("gemma3"), "gemma3")


def test_ids_are_those_of_transformers_own_processor(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    images = [picture("red"), picture("blue", (200, 90))]
    shown = [{**part, "image": images[n // 2]} if n % 2 else part for n, part in enumerate(SHOWN)]
    chat = ChatTokens(tokenizer, reader=reader_for(folder))
    ours = chat.prompt(chat.plain([{"role": "user", "content": shown}])).ids
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": SHOWN}], tokenize=False, add_generation_prompt=True
    )
    processor: Any = Gemma3Processor(
        Gemma3ImageProcessorPil.from_pretrained(folder), tokenizer, image_seq_length=4
    )
    theirs = processor(images=images, text=text, add_special_tokens=False)["input_ids"][0]
    soft = tokenizer.image_token_id
    assert [soft if token >= BEGIN else token for token in ours] == list(theirs)
    assert sum(token >= BEGIN for token in ours) == 8


def test_supervised_rows_have_the_same_lines_around_a_picture(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    reader = reader_for(folder)
    chat = ChatTokens(tokenizer, reader=reader)
    red = reader.read(picture("red"))
    messages = [
        {"role": "user", "content": [{"type": "image", "image": red}]},
        {"role": "assistant", "content": "a disc"},
    ]
    rendered = render_conversation(
        tokenizer, messages, end_ids=[2], template=reader.template(tokenizer.chat_template)
    ).show([red], reader.placeholder)
    assert rendered.ids == chat.ids_of(messages)[: len(rendered.ids)]
    assert "\n\n<start_of_image><image_soft_token><end_of_image>\n\n" in chat.decode(rendered.ids)


def test_a_template_is_changed_once_and_one_without_pictures_never(folder: Path) -> None:
    reader = reader_for(folder)
    own = AutoTokenizer.from_pretrained(folder).chat_template
    changed = reader.template(own)
    assert changed != own and reader.template(changed) == changed
    plain = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert reader.template(plain) == plain


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"size": {"height": 70, "width": 70}}, r"pictures of 70 x 70 pixels: expected 56 x 56"),
        ({"do_pan_and_scan": True}, r"has do_pan_and_scan: .* expected false"),
    ],
)
def test_a_processor_that_does_not_fit_is_refused(
    changed: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    folder = make_seeing(tmp_path, "gemma3")
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    with pytest.raises(ValueError, match=sentence):
        make_reader(str(folder), model_config(str(folder)))
    reader_of.cache_clear()
