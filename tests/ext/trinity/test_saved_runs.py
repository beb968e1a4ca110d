"""A configuration that Trinity-RFT saved runs to its end."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.job import ROOT, rows, trireme, write_jsonl
from tests.tiny import make_model


def test_a_configuration_that_trinity_saved_runs(tmp_path: Path) -> None:
    env = {
        "TRINITY_MODEL_PATH": str(make_model(tmp_path / "model", max_len=512)),
        "TRINITY_TASKSET_PATH": str(write_jsonl(tmp_path / "tasks.jsonl", rows(8))),
        "TRINITY_CHECKPOINT_ROOT_DIR": str(tmp_path / "checkpoints"),
    }
    saved = str(ROOT / "tests/ext/trinity/trinity_saved.yaml")
    done = trireme(tmp_path, "run", "--config", saved, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "saved by Trinity-RFT: 48 keys" in done.stdout + done.stderr
    assert (tmp_path / "checkpoints/P/saved/global_step_2/actor").is_dir()
