"""The demo's task is learned by models of other families too, without another change."""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.e2e.job import trireme
from tests.tested import DEMO, TESTED
from trireme.demo import YAML
from trireme.demo.prepare import INITIALIZER_RANGE, prepare

WIDTH = 128
GIVEN = os.environ.get("TRIREME_SEEDS")
SEEDS = [int(seed) for seed in (GIVEN or "0").split(",")]
"""Each takes minutes; docs/models.md has the figures of 0,1,2."""
STEPS = [] if GIVEN else ["stages.1.buffer.total_steps=40"]
"""A third of the demo's steps shows that it learns; with seeds that are given all of them run."""
FAMILIES: dict[str, dict[str, Any]] = {
    # a layer that sees 32 tokens, and one that sees all; a token takes two of four experts
    "gpt_oss": {
        "intermediate_size": 3 * WIDTH // 2,
        "num_key_value_heads": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    # a layer with a state, and one that attends
    "qwen3_5_text": {
        "intermediate_size": 3 * WIDTH,
        "num_key_value_heads": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
}
MIXTURES = {family for family, about in FAMILIES.items() if "num_local_experts" in about}


def make_family(folder: Path, family: str, tokenizer: Any, *, seed: int) -> None:
    """A tiny model of a family, with two layers and the demo's tokenizer."""
    config = AutoConfig.for_model(
        family,
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=WIDTH // 4,
        max_position_embeddings=256,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        **FAMILIES[family],
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.large
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", TESTED[DEMO])
def test_a_tiny_model_learns_the_demo(tmp_path: Path, family: str, seed: int) -> None:
    data = prepare(tmp_path / "data", seed)
    tokenizer = AutoTokenizer.from_pretrained(data / "model")
    make_family(tmp_path / "model", family, tokenizer, seed=seed)
    variables = {
        "TRIREME_MODEL_PATH": str(tmp_path / "model"),
        "TRIREME_TASKSET_PATH": str(data),
        "TRIREME_CHECKPOINT_ROOT_DIR": str(tmp_path / "out"),
    }
    done = trireme(tmp_path, "run", "--config", str(YAML), f"seed={seed}", *STEPS, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "out/Trireme-demo/arithmetic/grpo/monitor/metrics.jsonl").read_text()
    rows = [json.loads(line)["metrics"] for line in lines.splitlines()]
    right = [row[name] for row in rows if (name := "eval/held_out/accuracy/mean@1") in row]
    means = [row[name] for row in rows if (name := "rollout/logprob_diff_mean") in row]
    gaps = [row[name] for row in rows if (name := "rollout/logprob_diff_max") in row]
    print(
        f"{family}, seed {seed}: {right[0]:.1%} -> {right[-1]:.1%}, "
        f"{max(gaps):.2g} nats at most, {max(means):.2g} in the mean of a step"
    )
    # Where two experts are equally probable to within rounding, sampler and trainer may choose
    # another one: such a token is up to 0.15 nats apart, once in some hundred steps.
    gap = statistics.median(gaps) if family in MIXTURES else max(gaps)
    assert gap < 1e-4 and max(means) < 1e-4
    assert right[-1] > right[0] + 0.1
