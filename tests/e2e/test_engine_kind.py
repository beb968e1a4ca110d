"""A plug-in's kind of engine is checked and runs as ours do, with no edit elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.job import command, small_config
from tests.e2e.job import trireme as commanded

PLUGIN = Path(__file__).with_name("made_up_engine.py")


def trireme(folder: Path, what: str, **engine: Any) -> tuple[int, str]:
    """The exit code and the output of a command on a job with this engine."""
    config: Any = {**small_config(folder), "plugins": [str(PLUGIN)]}
    config["buffer"] |= {"total_steps": 2}
    config["explorer"]["rollout_model"] = {"engine_type": "made_up", **engine}
    words = command(folder, config)
    done = commanded(folder, what, *words[words.index("run") + 1 :])
    return done.returncode, done.stdout + done.stderr


def test_check_shows_what_a_plugins_kind_of_engine_says(tmp_path: Path) -> None:
    noted = str(tmp_path / "noted")
    code, output = trireme(tmp_path, "check", extra_engine_args={"noted_in": noted}, engine_num=2)
    assert code == 0, output
    assert "on 2 made_up engines" in output
    assert "explorer.rollout_model.engine_type (made_up): it dreams on 0 GPUs" in output
    assert "without effect here" not in output  # the kind gets extra_engine_args
    code, output = trireme(tmp_path, "check", extra_engine_args={"max_num_seqs": 4})
    assert code != 0
    assert "extra_engine_args.max_num_seqs is no argument of a dream" in output


def test_a_misspelt_kind_of_engine_is_named_with_the_nearest(tmp_path: Path) -> None:
    _, output = trireme(tmp_path, "check", engine_type="made_upp")
    expected = "expected one of torch, vllm, sglang, made_up, remote, external, tinker"
    assert f"engine_type is 'made_upp': {expected}; did you mean 'made_up'?" in output


@pytest.mark.parametrize(
    "embedded", [True, pytest.param(False, marks=pytest.mark.extension("remote"))]
)
def test_a_plugins_kind_of_engine_generates_here_or_in_a_process(
    tmp_path: Path, embedded: bool
) -> None:
    noted = tmp_path / "noted"
    options = {"noted_in": str(noted), "embedded": embedded}
    code, output = trireme(tmp_path, "run", extra_engine_args=options)
    assert code == 0, output
    pushes = ["pushed 1", "pushed 2"]  # by the push that the embedded engine names
    assert noted.read_text().splitlines() == (["here", *pushes] if embedded else ["in a process"])
    assert (tmp_path / "checkpoints/tests/job/global_step_2").is_dir()
