"""Flags with ms-swift's names become the keys of the YAML; a YAML is a plain word."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trireme.cli import flags
from trireme.cli.main import app
from trireme.config import load_config

YAML = """
buffer:
  explorer_input:
    taskset: {path: tasks.jsonl}
    eval_tasksets: [{path: a.jsonl}, {path: b.jsonl}]
"""
PAGE = Path(__file__).parents[2] / "docs" / "ms_swift.md"


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs `trireme check` with these words; the configuration that it got, or what it said."""
    (tmp_path / "run.yaml").write_text(YAML)
    (tmp_path / "plugin.py").touch()
    monkeypatch.chdir(tmp_path)
    seen: list[Any] = []
    monkeypatch.setattr("trireme.cli.check.check", lambda *given: seen.append(given) or 0)

    def call(*words: str) -> Any:
        done = CliRunner().invoke(app, ["check", *words])
        if not seen:
            return " ".join(done.output.split())
        path, given = seen.pop()
        return load_config(path, given), done.output

    return call


def test_flags_reach_every_taskset(keys: Any, tmp_path: Path) -> None:
    config, said = keys(
        *("run.yaml", "--multi_turn_scheduler", "math_tip_trick", "--max_turns", "3"),
        *("--loss_scale=last_round", "--reward_funcs", "accuracy", "format"),
        *("--reward_weights", "1", "0.5", "--external_plugins", "plugin.py", "seed=7"),
        *("--vllm_server_host", "127.0.0.1", "10.0.0.2", "--vllm_server_port", "8000", "8001"),
        *("--num_generations", "8", "--top_k", "-1", "--vllm_mode", "server"),
        *("--vllm_gpu_memory_utilization", "0.5"),
    )
    inputs = config.buffer.explorer_input
    assert inputs.default_workflow_type == "multi_turn_scheduler"
    assert inputs.taskset is not None
    for taskset in (inputs.taskset, *inputs.eval_tasksets):
        assert taskset.workflow_args == {
            "scheduler": "math_tip_trick",
            "max_turns": 3,
            "loss_scale": "last_round",
        }
        assert taskset.reward_fn_args == {"funcs": ["accuracy", "format"], "weights": [1.0, 0.5]}
    assert config.plugins == [str(tmp_path / "plugin.py")]
    engine = config.explorer.rollout_model
    assert engine.engine_type == "remote"
    assert engine.base_urls == ["http://127.0.0.1:8000", "http://10.0.0.2:8001"]
    assert engine.gpu_memory_utilization == 0.5
    assert (config.seed, config.algorithm.repeat_times, config.model.top_k) == (7, 8, -1)
    assert "--vllm_mode is without effect here" in said


def test_a_list_behind_one_flag_ends_where_the_yaml_or_a_key_begins(keys: Any) -> None:
    for words in (("accuracy", "format", "run.yaml"), ("accuracy", "format", "seed=1", "run.yaml")):
        config, _ = keys("--reward_funcs", *words)
        assert config.buffer.explorer_input.taskset.reward_fn_args == {
            "funcs": ["accuracy", "format"]
        }


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("run.yaml", "--trainer.grad_clip", "0.5"), "as KEY=VALUE: trainer.grad_clip=0.5"),
        (("run.yaml", "--trainer.grad_clip=0.5"), "as KEY=VALUE: trainer.grad_clip=0.5"),
        (("run.yaml", "--beta", "0.1"), "no such option: --beta. Set algorithm.kl_loss_fn_args"),
        (("run.yaml", "--max_turns", "two"), "--max_turns two: expected a whole number"),
        (("run.yaml", "--reward_funcs"), "--reward_funcs needs a value"),
        (("run.yaml", "seed"), "seed: expected KEY=VALUE, or a YAML"),
        (("run.yaml", "other.yaml"), "other.yaml: expected KEY=VALUE; the YAML is run.yaml"),
        (("run.yaml", "--vllm_server_port", "1", "2"), "--vllm_server_port has 2 values"),
        ((), "expected a YAML: trireme check my.yaml"),
        (("run.yaml", "--rewards", "x"), "No such option: --rewards"),
    ],
)
def test_what_a_word_should_have_been_is_said(
    keys: Any, words: tuple[str, ...], sentence: str
) -> None:
    assert sentence in re.sub(r"[│╭╮╰╯─]", "", keys(*words))


def test_the_page_on_ms_swift_lists_every_flag() -> None:
    listed = set(re.findall(r"`--(\w+)`", PAGE.read_text(encoding="utf-8")))
    tables = (flags.KEYS, flags.IDLE, flags.ELSEWHERE, flags._TASKSETS)
    assert {name for table in tables for name in table} <= listed
