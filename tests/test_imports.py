"""What is light stays light: no torch for `import trireme`, the configuration and `--help`."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

HEAVY = ("torch", "transformers", "datasets", "ray", "vllm", "peft", "pandas")


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "module",
    [
        "trireme",
        "trinity",
        "trireme.config",
        "trireme.cli.main",
        "trireme.cli.check",
        "trireme.log",
        "trireme.registry",
        "trireme.task",
        "trireme.monitor.console",
        "trireme.monitor.monitor",
    ],
)
def test_importing_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*[m for m in {HEAVY} if m in sys.modules])"
    assert run_python(code).split() == []


def best_time(code: str) -> float:
    """The shortest of five runs: what else the machine does only makes them longer."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        run_python(code)
        times.append(time.perf_counter() - start)
    return min(times)


def test_import_trireme_costs_less_than_twice_the_bare_interpreter() -> None:
    assert best_time("import trireme") < 2 * best_time("import logging, importlib.metadata")


def test_help_costs_less_than_twice_what_its_parser_costs() -> None:
    ours = best_time(
        "import sys; sys.argv = ['trireme', '--help']\n"
        "from trireme.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass"
    )
    assert ours < 2 * best_time("import typer, typer.main")
