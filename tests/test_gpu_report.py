"""The report on a GPU, on a CPU: every line is measured, and what cannot run says why."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from scripts import gpu_report
from scripts.gpu_report import CPU, LINES, Machine, Row

SCRIPT = Path(gpu_report.__file__)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_line_is_measured_on_a_cpu(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--json", str(file)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())
    assert {row["line"] for row in rows} == {line.__name__ for line in LINES}
    for row in rows:
        assert row["what"] and row["value"] and row["passed"] is not False, row
        assert not row["value"].startswith(("skipped", "failed")), row
        assert f"| {row['value']} |" in done.stdout
    marks = [row["mark"] for row in rows if row["line"] != "versions"]
    assert all(marks)


def test_a_line_that_cannot_run_says_why_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacking(_: Machine) -> Iterator[Row]:
        yield Row("lacking", "first", "1 s")
        raise ModuleNotFoundError("No module named 'pydantic'", name="pydantic")

    def short(_: Machine) -> Iterator[Row]:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    def broken(_: Machine) -> Iterator[Row]:
        raise RuntimeError("CUDA error: an illegal instruction\nCompile with TORCH_USE_CUDA_DSA")

    def good(_: Machine) -> Iterator[Row]:
        yield Row("good", "all", "2 s", "at most 3 s", passed=True)

    machine = Machine(torch.device("cpu"), CPU, tmp_path)
    rows = gpu_report.report(machine, [lacking, short, broken, good])
    assert [(row.value, row.passed) for row in rows] == [
        ("1 s", None),
        ("skipped: this interpreter has no pydantic", None),
        ("skipped: it needs more memory than the GPU has free", None),
        ("failed: RuntimeError: CUDA error: an illegal instruction", False),
        ("2 s", True),
    ]
    assert "| good | all | 2 s | at most 3 s | pass |" in capsys.readouterr().out


def test_a_machine_without_a_gpu_and_an_unknown_line_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, said in (
        ([], "sees no GPU"),
        (["--device", "cpu", "--lines", "steps"], "--lines has no 'steps'. It has: versions, "),
    ):
        monkeypatch.setattr(sys, "argv", ["gpu_report", *words])
        with pytest.raises(SystemExit, match=said):
            gpu_report.main()


def test_a_gpu_is_named_with_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert gpu_report.chosen_device(None) == torch.device("cuda:0")
    assert gpu_report.chosen_device("cuda:3") == torch.device("cuda:3")
    assert chosen == [torch.device("cuda:0"), torch.device("cuda:3")]
