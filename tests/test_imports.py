"""What is light stays light: no torch for `import trireme`, the configuration and `--help`."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tests.limits import HANG_S

HEAVY = ("torch", "transformers", "datasets", "ray", "vllm", "peft", "pandas")


def run_python(code: str) -> str:
    # a user's Python writes and reads bytecode; without it our modules are compiled each time, and
    # those of other packages, which pip has compiled, are not
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "module",
    [
        "trireme",
        pytest.param("trinity", marks=pytest.mark.extension("trinity")),
        "trireme.config",
        "trireme.cli.main",
        "trireme.cli.check",
        "trireme.log",
        "trireme.registry",
        "trireme.task",
        "trireme.monitor.console",
        "trireme.monitor.monitor",
        pytest.param("trireme.ext.memory.estimate", marks=pytest.mark.extension("memory")),
    ],
)
def test_importing_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*[m for m in {HEAVY} if m in sys.modules])"
    assert run_python(code).split() == []


def costs_less_than_twice(ours: str, theirs: str) -> bool:
    """By the shortest runs of each, in turns: what else the machine does only makes them longer."""
    times: dict[str, list[float]] = {ours: [], theirs: []}
    for _ in range(20):
        for code, found in times.items():
            start = time.perf_counter()
            run_python(code)
            found.append(time.perf_counter() - start)
        if len(times[ours]) >= 3 and min(times[ours]) < 2 * min(times[theirs]):
            return True
    return False


def test_import_trireme_costs_less_than_twice_the_bare_interpreter() -> None:
    assert costs_less_than_twice("import trireme", "import logging, importlib.metadata")


def test_help_costs_less_than_twice_what_its_parser_costs() -> None:
    ours = (
        "import sys; sys.argv = ['trireme', '--help']\n"
        "from trireme.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass"
    )
    assert costs_less_than_twice(ours, "import typer, typer.main")


def test_a_command_looks_at_all_that_it_has_imported_not_once() -> None:
    code = (
        "import gc, sys; sys.argv = ['trireme', 'check', 'missing.yaml']\n"
        "full = []\n"
        "gc.callbacks.append(lambda phase, info: full.append(info['generation'] == 2))\n"
        "from trireme.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "frozen = gc.get_freeze_count() > 100_000\n"
        "print(sum(full), 'torch' in sys.modules, frozen != ('triton' in sys.modules))"
    )
    assert run_python(code).split()[-3:] == ["0", "True", "True"]


def test_a_command_freezes_nothing_at_its_end_if_triton_is_loaded() -> None:
    """Triton reports what the last collection does not free: 600 lines with torch 2.15."""
    code = (
        "import gc, sys; sys.argv = ['trireme', 'check', 'missing.yaml']\n"
        "sys.modules['triton'] = type(sys)('triton')\n"
        "gc.freeze()  # as a run does\n"
        "from trireme.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(gc.get_freeze_count())"
    )
    assert int(run_python(code).split()[-1]) < 1_000


@pytest.mark.whole
def test_an_import_does_not_ask_for_gpus() -> None:
    """CUDA, once asked how many there are, is lost to the processes that are forked afterwards."""
    code = (
        "import torch\n"
        "def asked(): raise AssertionError('an import asks CUDA')\n"
        "torch.cuda.is_available = torch.cuda.device_count = asked\n"
        "from importlib import import_module\n"
        "from tests.e2e.job import IMPORTS\n"
        "for name in IMPORTS: import_module(name)"
    )
    run_python(code)
