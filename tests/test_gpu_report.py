"""The report on a GPU, on a CPU: every line is measured, and what cannot run says why."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from scripts import gpu_report
from scripts.gpu_report import CPU, LINES, Machine, Row
from tests.limits import HANG_S

SCRIPT = Path(gpu_report.__file__)


@pytest.mark.large
def test_every_line_is_measured_on_a_cpu(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--json", str(file)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"\n{len(LINES)} measured, 0 not; 0 of " in done.stdout
    rows = json.loads(file.read_text())
    assert {row["line"] for row in rows} == {line.__name__ for line in LINES}
    for row in rows:
        assert row["what"] and row["value"] and row["passed"] is not False, row
        assert not row["value"].startswith(("skipped", "failed")), row
        assert f"| {row['value']} |" in done.stdout
    marks = [row["mark"] for row in rows if row["line"] != "versions"]
    assert all(marks)


def test_a_line_that_cannot_run_says_why_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
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
    monkeypatch.setattr(Machine, "most_held", lambda _: 3 * gpu_report.GIB)
    monkeypatch.setattr(Machine, "memory", lambda _: 24 * gpu_report.GIB)
    file = tmp_path / "report.json"
    rows = gpu_report.report(machine, [lacking, short, broken, good], file, isolated=False)
    assert [row["value"] for row in json.loads(file.read_text())] == [row.value for row in rows]
    assert [(row.value, row.passed) for row in rows] == [
        ("1 s", None),
        ("skipped: this interpreter has no pydantic", None),
        ("failed: out of memory, 3.00 GiB at most, of 24.00", False),
        ("failed: RuntimeError: CUDA error: an illegal instruction", False),
        ("2 s", True),
    ]
    assert "| good | all | 2 s | at most 3 s | pass |" in capsys.readouterr().out


BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pydantic", "annotated_types"):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)

sys.meta_path.insert(0, Blocked())
"""


def test_a_report_without_a_package_names_it_first_and_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--apart", "--lines"]
    done = subprocess.run(
        [*command, "versions,ranks"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    said = done.stdout.splitlines()
    assert "lacks packages" in said[0] and "-m pip install pydantic==" in said[1]
    assert " annotated-types==" in said[1] and "torch" not in said[1]
    assert re.search(
        r"\| ranks \|  \| skipped: this interpreter has no \w+ \|.*not measured", done.stdout
    )
    assert said[-1].startswith("1 measured, 1 not (ranks); 0 of 4 rows missed their mark")


def test_a_step_that_runs_out_of_memory_fails_with_its_plan_and_one_too_large_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*_: object, **__: object) -> float:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    machine = Machine(torch.device("cpu"), CPU, tmp_path)
    monkeypatch.setattr(Machine, "seconds", short)
    monkeypatch.setattr(Machine, "most", lambda _: (1e12, "of a double"))
    (row,) = gpu_report.step(machine)
    assert row.passed is False
    said = r"failed: out of memory, \d\.\d\d GiB at most, planned 0\.5\d"
    assert re.fullmatch(said, row.value), row.value
    monkeypatch.setattr(Machine, "memory", lambda _: 2**28)
    rows = list(gpu_report.step(machine))
    assert len(rows) == 4 and all(row.skipped and row.passed is None for row in rows)
    assert re.fullmatch(r"skipped: the plan has 0\.5\d GiB, the GPU 0\.25", rows[0].value)


def test_no_line_of_a_half_begins_without_the_time_to_end(tmp_path: Path) -> None:
    assert {*gpu_report.HALVES[0], *gpu_report.HALVES[1]} == {*LINES}
    machine = Machine(torch.device("cpu"), CPU, tmp_path)
    rows = gpu_report.report(
        machine, [gpu_report.step], tmp_path / "report.json", isolated=True, limit=59
    )
    assert [(row.line, row.skipped) for row in rows] == [("step", True)]
    assert rows[0].value.startswith("skipped: no time left")


def test_a_line_has_a_process_of_its_own_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a line does to CUDA, or a hang, ends that line alone."""
    file = tmp_path / "report.json"
    words = ["--device", "cpu", "--apart", "--lines", "versions", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["gpu_report", *words])
    assert gpu_report.main() == 0
    assert [row["what"] for row in json.loads(file.read_text())][:2] == ["software", "device"]


CHILD = """
import ctypes, faulthandler, pathlib, sys, threading
sys.path.insert(0, sys.argv[1])
from scripts import gpu_report
from scripts.gpu_report import Row
def hangs(machine):
    yield Row("hangs", "first", "1 s")
    threading.Event().wait()
def crashes(machine):
    yield Row("crashes", "first", "1 s")
    ctypes.string_at(0)
machine = gpu_report.Machine("cpu", gpu_report.CPU, pathlib.Path("."))
gpu_report.say_rows(machine, [globals()[sys.argv[2]]], 1)
"""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("hangs", r"failed: it did not end in 1 s; File \"scripts/gpu_report.py\", line \d+ in"),
        ("crashes", r"failed: its process ended by SIGSEGV; File \"scripts/gpu_report.py\", line"),
    ],
)
def test_a_line_that_hangs_or_crashes_is_told_with_its_place(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_report, "LIMIT_S", 1)
    begin = subprocess.Popen

    def popen(command: list[str], **given: object) -> object:
        return begin([sys.executable, "-c", CHILD, str(gpu_report.ROOT), line], **given)  # type: ignore[call-overload]

    def named(_: Machine) -> Iterator[Row]:
        raise AssertionError("it is measured elsewhere")
        yield

    named.__name__ = line
    monkeypatch.setattr(subprocess, "Popen", popen)
    first, last = gpu_report.apart(Machine(torch.device("cpu"), CPU, tmp_path), named)
    assert (first.line, first.value, first.passed) == (line, "1 s", None)
    assert last.passed is False and re.match(said, last.value), last.value


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
