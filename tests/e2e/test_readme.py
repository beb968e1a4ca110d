"""The README's three seams run as pasted: its Python blocks in one file, its YAML beside it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.e2e.job import ROOT, run, write_jsonl
from tests.tiny import make_model

SMALL = ("buffer.total_steps=2", "buffer.batch_size=2")
WITH_REWARD = (
    "buffer.explorer_input.default_workflow_type=simple_workflow",
    "buffer.explorer_input.default_reward_fn_type=boxed_and_brief",
)


@pytest.mark.timeout(400)  # some 10 s of work
@pytest.mark.parametrize("overrides", [(), WITH_REWARD], ids=["workflow", "reward"])
def test_the_seams_run_as_pasted(
    overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    seams = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    [config] = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "mine.py").write_text("\n".join(seams))
    write_jsonl(
        tmp_path / "numbers.jsonl",
        [{"question": "Guess a number from 1 to 9.", "answer": str(n)} for n in range(1, 10)],
    )
    monkeypatch.setenv("TRINITY_MODEL_PATH", str(make_model(tmp_path / "model")))
    done = run(tmp_path, yaml.safe_load(config), *SMALL, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
