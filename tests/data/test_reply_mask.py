"""Masks over templates of the shapes that models have: what is trained is what a reply is."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

from tests.model import templates
from tests.tiny import SPECIAL, make_tokenizer
from trireme.data.formats import SftFormat
from trireme.data.reply_mask import Rendered, render_conversation
from trireme.data.rows import Rows
from trireme.experience import EID

PLAIN = {name: getattr(templates, name) for name in ("CHATML", "GENERATION", "TOOL_TURNS")}
HEADERS = {name: getattr(templates, name) for name in ("HEADERS", "STRICT", "HEADER_TOOLS")}
FORGETFUL = {name: getattr(templates, name) for name in ("THINKING", "TOOL_THINKING")}
ALL = PLAIN | HEADERS | FORGETFUL
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
# the same as THINKING with the model's part marked
THINKING_BLOCKS = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' %}{%- set text = m.content %}"
    "{%- if not loop.last %}{%- set text = m.content.split('</think>')[-1] %}{%- endif %}"
    "{% generation %}{{- text }}{% endgeneration %}{%- else %}{{- m.content }}{%- endif %}"
    "{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def bpe() -> PreTrainedTokenizerFast:
    """A small byte-level BPE, whose tokens reach over the borders of words."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = ByteLevel()
    texts = ["user\nassistant\nWhat is 1 + 1? It is two.\n", "<think>\nhm, so\n</think>\n\nfour"]
    special = [*SPECIAL, "<|begin|>", "<|head|>", "<|tail|>", "<|eot|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(texts * 10, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    made.add_special_tokens({"additional_special_tokens": special[1:2] + special[3:]})
    return made


def tokenizer_for(name: str, kind: str) -> Any:
    if kind == "bpe":
        return bpe()
    return templates.headers_tokenizer() if name in HEADERS else make_tokenizer()


def conversation(seed: int, *, thinking: bool = False) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    words = ["It is", "two", "four?", "1 + 1", "no", " x", "So,\nwell", "a  b"]

    def text() -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, 5))).strip()

    messages = [{"role": "system", "content": text()}] if draw.random() < 0.5 else []
    for _ in range(draw.randint(1, 4)):
        reply = f"<think>\n{text()}\n</think>\n\n{text()}" if thinking else text()
        messages += [
            {"role": "user", "content": text()},
            {"role": "assistant", "content": reply},
        ]
    return messages


def render(name: str, tokenizer: Any, messages: Any, **options: Any) -> Rendered:
    ends = [tokenizer.eos_token_id]
    if name in HEADERS:
        ends.append(tokenizer.convert_tokens_to_ids("<|eot|>"))
    return render_conversation(tokenizer, messages, end_ids=ends, template=ALL.get(name), **options)


def spans(tokenizer: Any, found: Rendered) -> list[str]:
    """Texts of the runs of trained ids."""
    out: list[list[int]] = []
    before = False
    for token, flag in zip(found.ids, found.mask, strict=True):
        if flag:
            out = [*out, []] if not before else out
            out[-1].append(token)
        before = flag
    return [tokenizer.decode(ids) for ids in out]


@pytest.mark.parametrize("kind", ["characters", "bpe"])
@pytest.mark.parametrize("name", [n for n in ALL if n != "TOOL_THINKING"])
def test_all_turns_are_the_replies_with_their_ends_and_nothing_else(name: str, kind: str) -> None:
    tokenizer = tokenizer_for(name, kind)
    end = "<|eot|>" if name in HEADERS else "<|im_end|>"
    for seed in range(12):
        messages = conversation(seed)
        found = render(name, tokenizer, messages, all_turns=True)
        replies = [m["content"] for m in messages if m["role"] == "assistant"]
        trained = [text.lstrip() for text in spans(tokenizer, found)]
        assert trained == [reply + end for reply in replies]
        assert found.rewritten == 0


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("kind", ["characters", "bpe"])
@pytest.mark.parametrize("name", ALL)
def test_ids_are_those_of_the_whole_conversation(name: str, kind: str, tools: Any) -> None:
    tokenizer = tokenizer_for(name, kind)
    for seed in range(12):
        messages = conversation(seed, thinking=seed % 2 == 0)
        found = render(name, tokenizer, messages, all_turns=seed % 3 > 0, tools=tools)
        text = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, chat_template=ALL[name]
        )
        assert text.startswith(tokenizer.decode(found.ids))
        whole = tokenizer.encode(text, add_special_tokens=False)
        assert found.ids == whole[: len(found.ids)]
        assert not tokenizer.decode(whole[len(found.ids) :]).strip()


@pytest.mark.parametrize("name", FORGETFUL)
def test_of_a_template_that_drops_thinking_only_what_it_leaves_is_trained(name: str) -> None:
    tokenizer = make_tokenizer()
    for seed in range(12):
        messages = conversation(seed, thinking=True)
        found = render(name, tokenizer, messages, all_turns=True)
        replies = [m["content"] for m in messages if m["role"] == "assistant"]
        assert spans(tokenizer, found) == [replies[-1] + "<|im_end|>"]
        assert found.rewritten == len(replies) - 1


def test_a_thinking_block_that_stands_only_in_the_last_reply_is_trained_there_alone() -> None:
    messages = conversation(0)
    found = render("TOOL_THINKING", make_tokenizer(), messages, all_turns=True)
    last = f"<think>\n\n</think>\n\n{messages[-1]['content']}<|im_end|>"
    assert spans(make_tokenizer(), found) == [last]
    assert found.rewritten == sum(m["role"] == "assistant" for m in messages) - 1 > 0


def test_the_same_where_the_template_marks_the_replies() -> None:
    tokenizer: Any = make_tokenizer(THINKING_BLOCKS)
    messages = conversation(3, thinking=True)
    found = render_conversation(
        tokenizer, messages, all_turns=True, end_ids=[tokenizer.eos_token_id]
    )
    replies = [m["content"] for m in messages if m["role"] == "assistant"]
    assert len(replies) > 1
    assert spans(tokenizer, found) == [replies[-1] + "<|im_end|>"]
    assert found.rewritten == len(replies) - 1


@pytest.mark.parametrize("key", ["weight", "loss_scale"])
@pytest.mark.parametrize("name", [*PLAIN, *HEADERS])
def test_a_message_s_weight_goes_before_the_default(name: str, key: str) -> None:
    tokenizer = tokenizer_for(name, "characters")
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "one", key: 0.5},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "three", "loss": False},
    ]
    for all_turns, expected in ((False, {0.5: "one"}), (True, {0.5: "one", 1.0: "two"})):
        found = render(name, tokenizer, messages, all_turns=all_turns)
        for weight, text in expected.items():
            own = [t for t, w in zip(found.ids, found.weights, strict=True) if w == weight]
            assert tokenizer.decode(own).strip().startswith(text)
        assert {*found.weights} == {0.0, *expected}
        assert [w > 0 for w in found.weights] == found.mask
        assert "three" not in tokenizer.decode(found.ids)


def test_nothing_is_rendered_where_nothing_is_trained() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "weight": 0},
    ]
    assert render("CHATML", make_tokenizer(), messages).ids == []


def test_weights_reach_the_experience() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "weight": 2},
    ]
    sft = SftFormat(Rows("x", [{"messages": messages}], ["messages"]), make_tokenizer(),
                    max_model_len=64)  # fmt: skip
    e = sft(0, eid=EID(0, 0))
    assert e is not None and e.loss_weight is not None
    assert e.loss_weight.tolist() == [2.0 * flag for flag in e.mask.tolist()]


def test_a_tool_call_whose_arguments_are_json_text_is_not_quoted_twice() -> None:
    template = (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content }}"
        "{%- for call in m.tool_calls or [] %}{{- call.function.arguments | tojson }}{%- endfor %}"
        "{{- '<|im_end|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": json.dumps({"x": 1})}}
    row = {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
    }
    tokenizer = make_tokenizer(template)
    e = SftFormat(Rows("x", [row], ["messages"]), tokenizer, max_model_len=64)(0, eid=EID(0, 0))
    assert e is not None
    assert tokenizer.decode(e.tokens[e.mask].tolist()) == '{"x": 1}<|im_end|>'


def test_messages_that_the_template_refuses_are_said() -> None:
    messages = [{"role": "assistant", "content": "x"}, {"role": "assistant", "content": "y"}]
    with pytest.raises(ValueError, match="refuses a conversation of assistant, assistant: roles"):
        render("STRICT", templates.headers_tokenizer(), messages)
