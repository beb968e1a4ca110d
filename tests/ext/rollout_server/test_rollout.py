"""`trireme rollout`: its options, and flags that it shares with training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.composites import make_composite
from trireme.cli.main import app
from trireme.ext.multi_turn.gym_scheduler import GymScheduler
from trireme.ext.rollout_server.rollout import RolloutOptions, _spec
from trireme.registry import MULTI_TURNS


@pytest.mark.extension("swift")
def test_the_rollout_server_takes_flags_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        "trireme.ext.rollout_server.rollout.rollout", lambda options: seen.append(options) or 0
    )
    words = (
        "rollout --model m --vllm_max_model_len 512 --vllm_gpu_memory_utilization=0.5 "
        "--vllm_enforce_eager --vllm_enable_lora --tool-call-parser hermes"
    )
    done = CliRunner().invoke(app, words.split())
    [options] = seen
    assert (options.max_model_len, options.tool_call_parser) == (512, "hermes")
    assert options.engine_options == {"gpu_memory_utilization": 0.5, "enforce_eager": True}
    assert "--vllm_enable_lora has no effect here" in done.output


@pytest.mark.extension("swift")
def test_a_rollout_server_takes_the_environment_and_the_template_of_ms_swift(
    monkeypatch: pytest.MonkeyPatch, tiny_dir: Path, tmp_path: Path
) -> None:
    plugin = tmp_path / "guess_env.py"
    plugin.write_text("from trireme import Env, gym_envs\ngym_envs['guess_of_flags'] = Env\n")
    served: list[Any] = []

    async def serve(options: Any, listener: Any) -> int:
        served.append(_spec(options)[0])
        return 0

    monkeypatch.setattr("trireme.ext.rollout_server.rollout._serve", serve)

    def call(words: str) -> str:
        given = f"rollout --model {tiny_dir} --port 0 --external_plugins {plugin} {words}"
        return " ".join(CliRunner().invoke(app, given.split()).output.split())

    said = call(
        "--multi_turn_scheduler gym_scheduler --gym_env guess_of_flags --use_gym_env true "
        "--enable_thinking false --max_length 4096 --max_turns 3"
    )
    [spec] = served
    assert spec.scheduler == {"scheduler": "gym_scheduler", "max_turns": 3, "env": "guess_of_flags"}
    assert spec.enable_thinking is False
    assert "--max_length has no effect here" in said
    assert "--enable_thinking maybe: expected true or false" in call("--enable_thinking maybe")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gym_env": "guess"}, "--gym_env guess has no effect by itself"),
        (
            {"gym_env": "gues", "multi_turn_scheduler": "gym_scheduler"},
            "--gym_env: unknown environment 'gues'",
        ),
        (
            {"gym_env": "g", "multi_turn_scheduler": "gym_schedule"},
            "--multi_turn_scheduler: unknown multi-turn scheduler 'gym_schedule'",
        ),
        (
            {"multi_turn_scheduler": "no_such"},
            "--multi_turn_scheduler: unknown multi-turn scheduler 'no_such'",
        ),
        (
            {"gym_env": "g", "multi_turn_scheduler": "math_tip_trick"},
            "--gym_env g has no effect on --multi_turn_scheduler math_tip_trick",
        ),
        (
            {"gym_env": "g", "multi_turn_scheduler": "openenv_scheduler"},
            "whose constructor has no argument env: expected gym_scheduler",
        ),
    ],
)
def test_an_environment_that_no_scheduler_plays_is_refused(
    given: dict[str, Any], message: str, tiny_dir: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        _spec(RolloutOptions(str(tiny_dir), **given))


def test_an_environment_reaches_a_scheduler_that_hands_it_to_its_base(tiny_dir: Path) -> None:
    class Own(GymScheduler):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)

    given: dict[str, Any] = {"gym_env": "no_such", "multi_turn_scheduler": "own_of_flags"}
    MULTI_TURNS["own_of_flags"] = Own
    with pytest.raises(ValueError, match="unknown environment 'no_such'"):
        _spec(RolloutOptions(str(tiny_dir), **given))


def test_a_model_that_sees_has_its_length_in_the_configuration_of_its_text(tmp_path: Path) -> None:
    folder = make_composite(tmp_path / "seeing", "gemma3")
    assert _spec(RolloutOptions(str(folder)))[0].max_model_len == 512
    mamba = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2}  # has no length
    (folder / "config.json").write_text(json.dumps(mamba))
    with pytest.raises(ValueError, match="--max-model-len is not given, and the configuration of"):
        _spec(RolloutOptions(str(folder)))
    assert _spec(RolloutOptions(str(folder), max_model_len=99))[0].max_model_len == 99


def test_a_length_at_which_replies_depend_on_each_other_is_said(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(tiny_dir, tmp_path / "long")
    file = folder / "config.json"
    config = json.loads(file.read_text())
    half = config["head_dim"] // 2
    config["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * half,
        "long_factor": [2.0] * half,
        "original_max_position_embeddings": 64,
    }
    file.write_text(json.dumps(config))
    for length, said in ((65, True), (64, False)):
        _spec(RolloutOptions(str(folder), max_model_len=length))
        assert ("note: up to 64 tokens each reply" in capsys.readouterr().err) == said
