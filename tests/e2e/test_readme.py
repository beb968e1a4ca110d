"""README's three seams run as pasted: its Python blocks in one file, each YAML beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.job import ROOT, run, write_jsonl
from tests.tiny import make_model
from tests.workflows.test_workflow import call
from trireme import Task
from trireme.registry import ADVANTAGES, ALGORITHMS, REWARDS, WORKFLOWS

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
SEAMS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
YAMLS = re.findall(r"^```yaml\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
SMALL = ("buffer.total_steps=2", "buffer.batch_size=2", "model.max_response_tokens=8")
GSM8K = {"question": "What is 6 * 7?", "answer": "6 * 7 = 42\n#### 42"}


@pytest.mark.parametrize("number", range(len(YAMLS)))
def test_the_seams_run_as_pasted(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("\n".join(SEAMS))
    guesses = [{"prompt": "Guess a number from 1 to 9.", "response": n} for n in range(1, 10)]
    write_jsonl(tmp_path / "numbers.jsonl", guesses)
    data = write_jsonl(tmp_path / "gsm8k" / "main" / "train.jsonl", [GSM8K] * 4)
    monkeypatch.setenv("TRIREME_MODEL_PATH", str(make_model(tmp_path / "model", max_len=1024)))
    monkeypatch.setenv("TRIREME_TASKSET_PATH", str(data.parent))
    done = run(tmp_path, yaml.safe_load(YAMLS[number]), *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def seams(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What README's Python blocks define, forgotten afterwards."""
    for registry in (REWARDS, WORKFLOWS, ADVANTAGES, ALGORITHMS):
        names = ("guess_the_number", "boxed_and_brief", "rank", "rank_rl")
        kept = {k: v for k, v in registry._registered.items() if k not in names}
        monkeypatch.setattr(registry, "_registered", kept)
    names = {"__name__": "readme"}
    exec("\n".join(SEAMS), names)
    yield names


def test_a_right_guess_earns_more_than_nothing(seams: dict[str, Any]) -> None:
    [experience] = call(seams["guess_the_number"], ["5", " 7"])
    assert experience.reward == 0.5


@pytest.mark.parametrize(("answer", "parts"), [
    ("so it is \\boxed{42}", {"correct": 1.0, "brief": 0.1}),
    ("so it is \\boxed{41}", {"correct": 0.0, "brief": 0.0}),
])  # fmt: skip
def test_a_right_answer_of_gsm8k_earns_more_than_nothing(
    answer: str, parts: dict[str, float], seams: dict[str, Any]
) -> None:
    config = yaml.safe_load(YAMLS[-1])["buffer"]["explorer_input"]["taskset"]
    task = Task(raw_task=GSM8K, format_args=config["format"])
    assert seams["boxed_and_brief"](task, answer) == parts
