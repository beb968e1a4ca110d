"""A launcher of a third party's package is checked and runs as Ray does, with no edit elsewhere."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from tests.e2e.job import command, environment, small_config
from tests.limits import HANG_S
from tests.test_extensions import install

CODE = Path(__file__).with_name("made_up_launcher.py")
MANIFEST = 'about = "Threads."\n[launcher]\nthreads = "things:Threads"\n'


def trireme(folder: Path, what: str, *overrides: str, **cluster: Any) -> tuple[int, str]:
    """The exit code and the output of a command on a job with this section `cluster`."""
    if not (folder / "package_threads").exists():
        install(folder, "threads", MANIFEST, CODE.read_text())
        (folder / "package_threads" / "__init__.py").write_text("")
    config: Any = {**small_config(folder), "cluster": {"launcher": "threads", **cluster}}
    config["buffer"] |= {"total_steps": 2}
    config["synchronizer"] = {**config.get("synchronizer", {}), "sync_method": "memory"}
    words = [what if word == "run" else word for word in command(folder, config, *overrides)]
    path = os.pathsep.join([str(folder), *filter(None, [environment().get("PYTHONPATH")])])
    extra = {"PYTHONPATH": path, "NOTED": str(folder / "noted")}
    done = subprocess.run(
        words,
        env={**environment(), **extra},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        cwd=folder,
    )
    return done.returncode, done.stdout + done.stderr


def test_check_shows_what_a_packages_launcher_says(tmp_path: Path) -> None:
    code, output = trireme(tmp_path, "check")
    assert code == 0, output
    assert "cluster.launcher (threads): on 0 GPUs" in output
    assert "1 for engines (1 x 1), 1 for the trainer" in output
    code, output = trireme(tmp_path, "check", node_num=2)
    assert code != 0
    assert "cluster.node_num is too many for threads: expected 1" in output
    code, output = trireme(tmp_path, "check", launcher="threds")
    assert code != 0
    assert "cluster.launcher is 'threds': expected one of auto, local, " in output
    assert "threads; did you mean 'threads'?" in output


def test_a_packages_launcher_runs_a_stage(tmp_path: Path) -> None:
    code, output = trireme(tmp_path, "run", launcher="Threads")
    assert code == 0, output
    assert (tmp_path / "checkpoints/tests/job/global_step_2").is_dir()
    assert (tmp_path / "noted").read_text() == "ran in a thread\n"
