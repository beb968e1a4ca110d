"""The demo's task is learned by models of other families too, without another change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GptOssConfig

from tests.e2e.job import trireme
from trireme.demo import YAML
from trireme.demo.prepare import INITIALIZER_RANGE, prepare


def make_gpt_oss(folder: Path, tokenizer: Any, *, seed: int, width: int = 128) -> None:
    """A tiny gpt_oss with the demo's tokenizer: a layer that sees 32 tokens, and one that sees all;
    four experts, of which a token takes two.
    """
    config = GptOssConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width // 2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=width // 4,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=32,
        max_position_embeddings=256,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.large
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_tiny_gpt_oss_learns_the_demo(tmp_path: Path, seed: int) -> None:
    data = prepare(tmp_path / "data", seed)
    make_gpt_oss(tmp_path / "model", AutoTokenizer.from_pretrained(data / "model"), seed=seed)
    variables = {
        "TRINITY_MODEL_PATH": str(tmp_path / "model"),
        "TRINITY_TASKSET_PATH": str(data),
        "TRINITY_CHECKPOINT_ROOT_DIR": str(tmp_path / "out"),
    }
    done = trireme(tmp_path, "run", "--config", str(YAML), f"seed={seed}", **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "out/Trireme-demo/arithmetic/grpo/monitor/metrics.jsonl").read_text()
    rows = [json.loads(line)["metrics"] for line in lines.splitlines()]
    right = [row[name] for row in rows if (name := "eval/held_out/accuracy/mean@1") in row]
    gaps = [row[name] for row in rows if (name := "rollout/logprob_diff_max") in row]
    print(f"gpt_oss, seed {seed}: {right[0]:.1%} -> {right[-1]:.1%}, {max(gaps):.2g} nats at most")
    assert max(gaps) < 1e-4 and right[-1] > right[0] + 0.1
