"""The example of an extension: installed as a package of its own, it runs, and it is short."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.job import environment, small_config
from tests.limits import HANG_S

FOLDER = Path(__file__).parents[2] / "examples" / "extension"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip has installed the package."""
    folder = tmp_path_factory.mktemp("site")
    copy = tmp_path_factory.mktemp("sources")  # building writes beside the sources
    for file in FOLDER.rglob("*.*"):
        (copy / file.relative_to(FOLDER)).parent.mkdir(exist_ok=True)
        (copy / file.relative_to(FOLDER)).write_bytes(file.read_bytes())
    options = "--quiet --no-deps --no-index --no-build-isolation --disable-pip-version-check"
    command = [sys.executable, "-m", "pip", "install", *options.split(), "--target", str(folder)]
    done = subprocess.run([*command, str(copy)], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def trireme(site: Path, folder: Path, *words: str) -> tuple[int, str]:
    """The exit code and the output of a command where the package is installed."""
    path = os.pathsep.join([str(site), *filter(None, [environment().get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "trireme", *words],
        env={**environment(), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        cwd=folder,
    )
    return done.returncode, done.stdout + done.stderr


def config_in(folder: Path, **engine: Any) -> str:
    """The path of the small job with what the example's YAML asks for."""
    ours = yaml.safe_load((FOLDER / "logbook.yaml").read_text())
    config = small_config(folder)
    config["explorer"]["rollout_model"] = {**ours["explorer"]["rollout_model"], **engine}
    config["buffer"] |= {"total_steps": 2, "trainer_input": ours["buffer"]["trainer_input"]}
    config["buffer"]["explorer_input"]["eval_tasksets"] = []
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return str(folder / "config.yaml")


def test_its_engine_store_listener_and_command_work(site: Path, tmp_path: Path) -> None:
    code, listed = trireme(site, tmp_path, "extensions")
    assert code == 0 and "An engine that logs its replies" in listed
    code, output = trireme(site, tmp_path, "run", "--config", config_in(tmp_path))
    assert code == 0, output
    job = tmp_path / "checkpoints/tests/job"
    assert json.loads((job / "tally.json").read_text()) == {"explorer": 2, "trainer": 2}
    generated = [json.loads(line) for line in (tmp_path / "replies.jsonl").open()]
    put = [json.loads(line) for line in (job / "buffer/experience_buffer.jsonl").open()]
    assert len(put) == 32 and {row["response"] for row in put} <= {*generated}
    for step in (put[:16], put[16:]):
        rewards = [row["reward"] for row in step]
        assert rewards == sorted(rewards, reverse=True)
    assert trireme(site, tmp_path, "tally", str(job)) == (0, '{"explorer": 2, "trainer": 2}\n')


def test_what_is_wrong_with_its_section_is_said_by_check(site: Path, tmp_path: Path) -> None:
    wrong = config_in(tmp_path, extra_engine_args={})
    code, output = trireme(site, tmp_path, "check", "--config", wrong)
    assert code != 0
    assert "explorer.rollout_model has no extra_engine_args.file" in output


def test_it_is_short() -> None:
    tree = ast.parse((FOLDER / "trireme_logbook" / "parts.py").read_text())
    assert len(ast.unparse(tree).replace("\n\n", "\n").splitlines()) <= 60
