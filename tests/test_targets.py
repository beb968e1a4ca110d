"""What `make test` leaves out runs in another target that CI calls: each skip is required there,
by a word of its reason, but for those of machines without a GPU.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.whole

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
FILES = [path for path in sorted(TESTS.rglob("*.py")) if "node_modules" not in path.parts]


@dataclass
class Command:
    """A call of pytest: where it looks, what it selects, and which skips fail in it."""

    paths: list[Path]
    marks: str
    required: list[str]

    def runs(self, file: Path) -> bool:
        return not self.paths or any(file.is_relative_to(path) for path in self.paths)


def make(*words: str) -> str:
    """What make prints when a user calls it: not with the flags of a make that runs these tests."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    made = subprocess.run(["make", *words], cwd=ROOT, env=variables, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return made.stdout


@pytest.fixture(scope="module")
def commands() -> list[Command]:
    """Those of the targets that `.ci/run` calls, whatever time CI has left for them."""
    targets = re.findall(r"^make (\S+)$", (ROOT / ".ci/run").read_text(), re.M)
    lines = make("-n", "UNTIL=", *targets).replace("\\\n", " ").splitlines()
    return [command_of(line) for line in lines if " -m pytest " in line]


def command_of(line: str) -> Command:
    before, _, after = line.partition(" -m pytest ")
    required = re.search(r'TRIREME_REQUIRE=("[^"]*"|\S+)', before)
    words = [] if "$" in after else shlex.split(after)
    marks = next((words[i + 1] for i, word in enumerate(words) if word == "-m"), "")
    paths = [ROOT / word.partition("::")[0] for word in words if word.startswith("tests/")]
    return Command(paths, marks, required[1].strip('"').split(",") if required else [])


def text_of(node: ast.AST) -> str:
    """The constant parts of a string."""
    parts = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant))
    return "".join(part for part in parts if isinstance(part, str))


def reasons(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Each skip's reason, with the name that its mark is given, if it is given one."""
    nodes = list(ast.walk(tree))
    names = {n.value: n.targets[0] for n in nodes if isinstance(n, ast.Assign)}
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        named = [word.value for word in node.keywords if word.arg == "reason"]
        if called == "importorskip":
            said = named or [ast.Constant(f"could not import '{text_of(node.args[0])}'")]
        elif called == "skip":
            said = named or node.args
        else:
            said = named if called == "skipif" else []
        for reason in said:
            yield text_of(reason), ast.unparse(names[node]) if node in names else ""


@cache
def skips() -> frozenset[tuple[str, Path]]:
    """Each reason with each file of tests that has it."""
    return frozenset(_skips())


def _skips() -> Iterator[tuple[str, Path]]:
    texts = {path: path.read_text() for path in FILES}
    for path, text in texts.items():
        # most files have none, and walking the trees of all takes seconds
        if "skip" not in text:
            continue
        for reason, name in reasons(ast.parse(text)):
            if path.name.startswith("test_"):
                yield reason, path
                continue
            for other in FILES:
                uses = name and re.search(rf"import .*\b{name}\b", texts[other])
                if uses and other.name.startswith("test_"):
                    yield reason, other


@pytest.mark.parametrize(
    ("reason", "file"),
    [
        pytest.param(reason, file, id=f"{file.relative_to(TESTS)}-{reason}")
        for reason, file in sorted(skips())
        if "GPU" not in reason
    ],
)
def test_a_skip_fails_in_some_target_of_ci(
    reason: str, file: Path, commands: list[Command]
) -> None:
    required = [
        word
        for command in commands
        for word in command.required
        if command.runs(file) and word.lower() in reason.lower()
    ]
    assert required, f"no target of .ci/run requires that {file} is not skipped: {reason!r}"


@pytest.mark.parametrize(
    "file",
    [path for path in FILES if "mark.large" in path.read_text() and path != Path(__file__)],
    ids=lambda path: str(path.relative_to(TESTS)),
)
def test_what_is_large_runs_in_some_target_of_ci(file: Path, commands: list[Command]) -> None:
    assert [c for c in commands if c.paths and c.runs(file) and "not large" not in c.marks]


def test_extras_run_what_computes_with_the_kernels_of_other_processors() -> None:
    [line] = [x for x in make("-n", "test-avx2").replace("\\\n", " ").splitlines() if "pytest" in x]
    held = ("ATEN_CPU_CAPABILITY=avx2", "ONEDNN_MAX_CPU_ISA=AVX2", "TRIREME_NATIVE=x86-64-v3")
    assert all(variable in line.split() for variable in held)
    command = command_of(line)
    assert command.paths and all(path.exists() for path in command.paths)
    for file in ("trainer/test_step.py", "engines/test_torch_engine.py", "e2e/test_exact.py"):
        assert command.runs(TESTS / file)
    assert "in-time/test-avx2" in make("-n", "test-extras")


def test_every_skip_is_seen() -> None:
    found = {reason for reason, _ in skips()}
    assert {
        "TRIREME_VLLM_PYTHON names no environment",
        "could not import 'ray'",
        "bubblewrap is not installed",
        " is not installed: make test-trackers",
    } <= found


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = makefile[makefile.index(".PHONY:") :].split("\n\n")[0].replace("\\\n", " ").split()[1:]
    listed = [line.split()[1] for line in make("help").splitlines()]
    assert sorted(listed) == sorted(phony)


def test_the_public_workflow_runs_the_short_part_and_builds_what_a_release_has() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    run = [step["run"] for step in steps if "run" in step]
    assert ".ci/run quick" in run and "python -m build" in run
    [image] = [line for line in run if line.startswith("docker build")]
    assert (ROOT / image.split()[3]).is_file()
    assert "make lint docs test-quick" in (ROOT / ".ci/run").read_text(encoding="utf-8")
    for form in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        assert yaml.safe_load(form.read_text(encoding="utf-8"))
