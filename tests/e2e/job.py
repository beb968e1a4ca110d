"""A small job for end-to-end tests: model, data set and YAML, and the real command line on them."""

from __future__ import annotations

import atexit
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from tests.limits import HANG_S
from tests.tiny import make_model

ROOT = Path(__file__).parents[2]
IMPORTS = [
    "datasets",
    "sqlalchemy.dialects.sqlite",
    "torch.utils.tensorboard",
    "transformers.models.qwen3.modeling_qwen3",
    "trireme.cli.main",
    "trireme.cli.run",
    "trireme.launch.run",
    "trireme.ext.http.app",
]
"""What a run loads before it does anything: four seconds of a processor."""


def rows(count: int, first: int = 0) -> list[dict[str, str]]:
    """Sums in GSM8K's shape."""
    out = []
    for i in range(first, first + count):
        a, b = i % 7 + 1, i % 5 + 2
        answer = f"{a} + {b} = {a + b}.\n#### {a + b}"
        out.append({"question": f"What is {a} + {b}? ({i})", "answer": answer})
    return out


def write_jsonl(path: Path, data: list[dict[str, Any]]) -> Path:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in data))
    return path


def small_config(folder: Path) -> dict[str, Any]:
    """GRPO on a tiny model: 4 steps of 4 tasks x 4 rollouts of at most 8 tokens."""
    train = write_jsonl(folder / "data" / "train.jsonl", rows(16))
    test = write_jsonl(folder / "data" / "test.jsonl", rows(3, 100))
    columns = {"prompt_key": "question", "response_key": "answer"}
    return {
        "project": "tests",
        "name": "job",
        "checkpoint_root_dir": str(folder / "checkpoints"),
        "algorithm": {
            "algorithm_type": "grpo",
            "repeat_times": 4,
            "kl_loss_fn": "none",
            "optimizer": {"lr": 1e-3},
        },
        "model": {
            "model_path": str(make_model(folder / "model", max_len=256)),
            "max_response_tokens": 8,
            "max_model_len": 128,
        },
        "buffer": {
            "batch_size": 4,
            "total_steps": 4,
            "explorer_input": {
                "default_workflow_type": "simple_workflow",
                "default_reward_fn_type": "tests.e2e.job:length_reward",
                "taskset": {"name": "sums", "path": str(train), "format": columns},
                "eval_tasksets": [{"name": "held_out", "path": str(test), "format": columns}],
            },
        },
        "explorer": {"runner_per_model": 4, "eval_interval": 2},
        "trainer": {"save_interval": 2},
    }


def length_reward(task: Any, answer: str) -> dict[str, float]:
    """Differs from reply to reply, so that there is something to learn from random text."""
    return {"accuracy": (sum(map(ord, answer)) % 17) / 16}


def rare_reward(task: Any, answer: str) -> dict[str, float]:
    """1 for few replies, so that most groups have equal rewards."""
    return {"accuracy": float(sum(map(ord, answer)) % 17 == 0)}


def command(folder: Path, config: dict[str, Any], *overrides: str) -> list[str]:
    """`trireme run` on a configuration, as a list of words."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    program = "from trireme.cli.main import main; main()"
    return [sys.executable, "-c", program, "run", "--config", str(path), *overrides]


def environment() -> dict[str, str]:
    """One thread, no network, and the tests' own modules on the path."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


def forkserver() -> ForkServerContext:
    """What makes processes that begin with `IMPORTS` done, all of a session from one server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTS)
    with patch.dict(os.environ, environment()):
        ensure_running()
    return context


class Forked:
    """`trireme` as a process that begins with its imports done: many small runs in little time.

    It has its own exit code and output, and can be killed, as a `subprocess.Popen`, whose names it
    takes. All of a session have one hash seed: what may depend on the order of a set is for
    `run_fresh` to show.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        variables: Mapping[str, str] | None = None,
        prepare: Callable[[], object] | None = None,
    ) -> None:
        """`variables`: beside `environment()`; `prepare` is called in the process first."""
        self.words = list(words)
        (folder / "said").mkdir(exist_ok=True)
        number = next(_NUMBERS)
        self._out, self._err = (folder / "said" / f"{number}.{name}" for name in ("out", "err"))
        files = (self._out, self._err)
        variables = {**environment(), **(variables or {})}
        self._process = forkserver().Process(
            target=_command, args=(self.words, folder, files, variables, prepare)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float = HANG_S) -> int:
        """The exit code; an error if there is none in time."""
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            self.kill()
            raise AssertionError(f"no end in {timeout:g} s:\n{self.said()}")
        return code

    def communicate(self, timeout: float = HANG_S) -> tuple[str, str]:
        """What it printed on stdout and stderr, once it has ended."""
        self.wait(timeout)
        return _read(self._out), _read(self._err)

    def ends_well(self) -> None:
        """Exit code 0, or what it printed."""
        assert self.wait() == 0, self.said()

    def said(self) -> str:
        """What it printed so far."""
        return _read(self._out) + _read(self._err)

    def send_signal(self, number: int) -> None:
        """Nothing where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait for it."""
        self._process.kill()
        self._process.join()

    def kill_when(self, path: Path) -> None:
        """SIGKILL once that file is there; it must not have ended before."""
        deadline = time.monotonic() + HANG_S
        while not path.exists():
            ended = self.poll() is not None and not path.exists()
            assert not ended, f"it ended before {path} appeared:\n{self.said()}"
            assert time.monotonic() < deadline, f"{path} never appeared:\n{self.said()}"
            time.sleep(0.002)
        self.kill()


_NUMBERS = itertools.count()


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _command(
    words: list[str],
    folder: Path,
    files: tuple[Path, Path],
    variables: dict[str, str],
    prepare: Callable[[], object] | None,
) -> None:
    """In the child: what a new interpreter would begin with, and would do at its end."""
    from trireme.cli.main import main

    os.environ.clear()
    os.environ.update(variables)
    first = ["", *variables["PYTHONPATH"].split(os.pathsep)]
    sys.path[:] = [*first, *(path for path in sys.path if path not in first)]
    os.chdir(folder)
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    attended()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if prepare is not None:
        prepare()
    sys.argv = ["trireme", *words]
    try:
        main()
    finally:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()


def started(folder: Path, config: dict[str, Any], *overrides: str, **options: Any) -> Forked:
    """`trireme run` on a configuration, begun; `options` are Forked's."""
    words = command(folder, config, *overrides)
    return Forked(words[words.index("run") :], folder, **options)


def trireme(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command of the program in that folder, run to its end."""
    process = Forked(words, folder, variables)
    out, err = process.communicate()
    return subprocess.CompletedProcess(list(words), process.wait(), out, err)


def run(
    folder: Path, config: dict[str, Any], *overrides: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """`trireme run` on a configuration, to its end."""
    words = command(folder, config, *overrides)
    return trireme(folder, *words[words.index("run") :], **variables)


def run_fresh(
    folder: Path, config: dict[str, Any], *overrides: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The same by a new interpreter, as a user starts it, with a hash seed of its own: 4 s of
    imports.
    """
    return subprocess.run(
        command(folder, config, *overrides),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env=environment() | variables,
        cwd=folder,
    )


def weights(job: Path, step: int) -> bytes:
    """The exported model's bytes."""
    return (job / f"global_step_{step}" / "actor/huggingface/model.safetensors").read_bytes()


def wait_for(what: Callable[[], Any], *processes: subprocess.Popen[str] | Forked) -> Any:
    """What `what` finds, once it finds something; while all processes run."""
    deadline = time.monotonic() + HANG_S
    while not (found := what()):
        late = time.monotonic() > deadline
        for process in processes:
            if process.poll() is not None or late:
                process.kill()
                raise AssertionError("\n".join(map(str, process.communicate())))
        assert not late, f"what was waited for did not come in {HANG_S:g} s"
        time.sleep(0.05)
    return found


def attended() -> None:
    """In the child: signals as a terminal leaves them, also where these tests run under nohup."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
