"""Scripts: benchmarks, examples and scripts can be imported, and benchmarks run on little work.

`--quick` judges no figure that depends on the machine, so that here a benchmark fails where it does
not run, or where what it proves is not so.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.e2e.job import forkserver
from trireme.registry import ADVANTAGES, ALGORITHMS, POLICY_LOSSES

pytestmark = pytest.mark.whole

ROOT = Path(__file__).parent.parent
FOLDERS = ("benchmarks", "examples", "scripts")
ELSEWHERE = ("rl_in_one_file.py", "agents/with_*.py", "agents/tool_agent.py")
"""Run where they are imported, or need the SDK of an agent: they have tests of their own."""
FILES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if not any(path.match(pattern) for pattern in ELSEWHERE)
)
QUICK = (
    "against_peers",
    "async_rollout",
    "decoding",
    "explorer_overhead",
    "fsdp2",
    "generation",
    "memory",
    "overlap",
    "prefix_sharing",
    "scale_parts",
    "weight_sync",
)
# beside other tests the seconds of real commands say nothing: start_up is only imported


def _load(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module; its neighbours can be imported, as where it is run."""
    monkeypatch.syspath_prepend(path.parent)
    monkeypatch.delitem(sys.modules, path.stem, raising=False)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)  # processes that it starts find it by name
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_can_be_imported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (ADVANTAGES, POLICY_LOSSES, ALGORITHMS):
        monkeypatch.setattr(registry, "_registered", {})  # other tests take the same names
    assert _load(path, monkeypatch).__doc__


@pytest.mark.large
@pytest.mark.parametrize("name", QUICK)
def test_a_benchmark_runs_on_little_work(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forkserver()  # with what a benchmark's processes need, too
    module = _load(ROOT / "benchmarks" / f"{name}.py", monkeypatch)
    monkeypatch.setattr(sys, "argv", [name, "--quick"])
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "benchmarks"))
    assert module.main() == 0
    assert ": asked at " in capsys.readouterr().out


def test_a_missed_number_is_said_and_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = _load(ROOT / "benchmarks" / "target.py", monkeypatch)
    low, unknown = target.Target("speed", 0.5, 0.7), target.Target("vLLM", None, 1.2)
    fast = target.Target("seconds", 1.0, 2.0, at_most=True)
    assert target.judge(low, fast) == 1 and target.judge(fast, unknown) == 0
    assert target.judge(low, quick=True) == 0
    said = capsys.readouterr().out
    assert "speed: asked at least 0.7, reached 0.5: MISSED" in said
    assert "vLLM: asked at least 1.2, NOT MEASURED" in said


def test_the_performance_page_shows_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    script = _load(ROOT / "scripts" / "performance_page.py", monkeypatch)
    measured = json.loads(script.DATA.read_text(encoding="utf-8"))
    assert script.document(measured) in script.PAGE.read_text(encoding="utf-8")
    drawn = ElementTree.fromstring(
        script.picture({"tasks": [(4, 1.0), (8, 2.0)], "reply": [(8, 1)]})
    )
    lines = [node.get("points") for node in drawn.iter() if node.tag.endswith("polyline")]
    assert lines == ["130.0,95.0 214.0,46.0", "214.0,46.0"]


def test_a_part_that_is_measured_again_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    script = _load(ROOT / "scripts" / "performance_page.py", monkeypatch)
    found = json.loads(script.DATA.read_text(encoding="utf-8"))
    before = json.loads(json.dumps(found))
    said = "lateness: asked at most 0.5, reached 0.2\nvLLM: asked at least 1, NOT MEASURED\n"

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[Any]:
        out: Any = b"1234567\n" if command[0] == "git" else said
        return subprocess.CompletedProcess(command, 0, stdout=out)

    monkeypatch.setattr(script.subprocess, "run", run)
    options = Namespace(trl=None, vllm=None, only=None, rounds=1, threads=None, quick=False)
    script.measure(options, found, "overlap")
    new = found["targets"].pop("lateness")
    assert (new["asked"], new["reached"], new["commit"]) == ("at most 0.5", "0.2", "1234567")
    assert {**found, "cores": 0, "python": ""} == {**before, "cores": 0, "python": ""}
