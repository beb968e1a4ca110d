"""The demo's model is made offline from a seed, and its tokenizer gives text back exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trireme.demo.problems import make_problems
from trireme.demo.tiny_model import make_tiny_model, make_tokenizer

PROBLEMS = make_problems(300, seed=0)
TEXTS = [text for problem in PROBLEMS for text in problem.values()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), TEXTS, seed=0)


def test_text_comes_back_exactly(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_number_is_one_token_and_pieces_decode_apart_as_together(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode("Anna has 12 + 7 = 19.")
    assert len(ids) == len(["Anna", "has", "12", "+", "7", "=", "19", "."])
    assert "".join(tokenizer.decode([token]) for token in ids) == tokenizer.decode(ids)


def test_the_chat_template_ends_a_message_with_the_end_token(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "Anna has 2."}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert asked == "<|user|>Anna has 2.<|end|><|assistant|>"
    chat.append({"role": "assistant", "content": "#### 2"})
    assert tokenizer.apply_chat_template(chat, tokenize=False) == f"{asked}#### 2<|end|>"
    assert tokenizer.eos_token == "<|end|>"


def test_the_seed_decides_the_weights(folder: Path, tmp_path: Path) -> None:
    first, again, other = (
        torch.as_tensor(AutoModelForCausalLM.from_pretrained(path).get_input_embeddings().weight)
        for path in (
            folder,
            make_tiny_model(tmp_path / "again", TEXTS, seed=0),
            make_tiny_model(tmp_path / "other", TEXTS, seed=1),
        )
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert other.numel() and not other.isnan().any()


def test_brackets_that_an_environment_shows_come_back() -> None:
    tokenizer = make_tokenizer(["[S]FFF\nFHFH"])
    assert tokenizer.decode(tokenizer.encode("[S]FFF\nFHFH")) == "[S]FFF\nFHFH"


def test_digits_without_a_space_before_them_come_back() -> None:
    tokenizer = make_tokenizer(["r1c2=3 and 4"], largest=9)
    ids = tokenizer.encode("r1c2=3 and 4")
    assert tokenizer.unk_token_id not in ids and tokenizer.decode(ids) == "r1c2=3 and 4"
