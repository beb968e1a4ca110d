"""Program: `trireme` as a process with one fault built in, which notes what it learned.

Nothing of it is in the product: named functions are replaced here, before the command begins. A
process is forked from one that has loaded torch already, which saves seconds at each start.
"""

from __future__ import annotations

import errno
import functools
import importlib
import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trireme.trainer.optim import ScheduledOptimizer

LEARNED, FILLER, HIT = "learned.jsonl", "filler", "hit"
"""In the job's folder: what each train step learned from, what fills the disk, which points were
really reached.
"""

POINTS = {
    "train step": "trireme.trainer.trainer:Trainer._train_on",
    "checkpoint": "trireme.trainer.trainer:Trainer._save",
    "weights file": "trireme.checkpoint.export:SharedFiles.write",
    "optimizer file": "trireme.trainer.ranks:write_pt",
    "model files": "trireme.checkpoint.save:copy_model_files",
    "manifest": "trireme.checkpoint.save:write_manifest",
    "pointers": "trireme.checkpoint.save:_move_pointers",
    "old checkpoints": "trireme.checkpoint.save:set_aside",
    "resume": "trireme.launch.stage:load_checkpoint",
    "bring to disk": "trireme.files:sync",
    "explore step begins": "trireme.explorer.explorer:Explorer._begin_step",
    "explore step ends": "trireme.explorer.explorer:Explorer._finish_step",
    "evaluation": "trireme.explorer.explorer:Explorer.evaluate",
    "pull": "trireme.sync.synchronizer:Synchronizer.pull",
    "push": "trireme.sync.synchronizer:Synchronizer._publish",
    "queue put": "trireme.buffer.queue:QueueBuffer.put",
    "queue take": "trireme.buffer.queue:QueueBuffer.take",
    "queue state": "trireme.buffer.queue:QueueBuffer.state",
    "replay put": "trireme.ext.replay.replay:ReplayBuffer.put",
    "replay take": "trireme.ext.replay.replay:ReplayBuffer.take",
    "replay state": "trireme.ext.replay.replay:ReplayBuffer.state",
    "sql put": "trireme.ext.sql.buffer:SqlBuffer._try_put",
    "sql take": "trireme.ext.sql.buffer:SqlBuffer.take",
    "sql claim": "trireme.ext.sql.claims:Claims.claim",
    "sql seal": "trireme.ext.sql.buffer:SqlBuffer.state",
    "sql commit": "trireme.ext.sql.buffer:SqlBuffer.commit",
    "file take": "trireme.buffer.file:FileBuffer.take",
    "copy written": "trireme.buffer.record:Record._write",
    "copy rewound": "trireme.buffer.record:Record._rewind",
    "explorer state": "trireme.explorer.explorer:Explorer._keep_own_state",
    "published weights": "trireme.sync.checkpoint:CheckpointPush._write",
    "gradient": "trireme.trainer.optim:ScheduledOptimizer.step",
}


@dataclass(frozen=True)
class Blow:
    """What happens at the n-th time that a point is reached."""

    point: str
    when: str = "before"
    at: int = 1
    what: str = "KILL"
    """Names of signals, each sent to the process itself; of an errno, which is raised; FULL: the
    file system that the job lies on is filled; NAN: the gradients are no numbers.
    """


def start(folder: Path, words: Sequence[str], blow: Blow | None) -> int:
    """`trireme <words>` in `folder`, forked; its process id. Output goes to `output.txt`."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP):  # nohup ignores one
            signal.signal(number, signal.SIG_DFL)
        os.chdir(folder)
        output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.path.insert(0, str(folder))
        _note_what_is_learned(folder / LEARNED)
        if blow is not None:
            _build_in(blow)
        from trireme.cli.main import main

        sys.argv = ["trireme", *words]
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _build_in(blow: Blow) -> None:
    count = 0

    def reached(when: str, *args: Any) -> None:
        nonlocal count
        if when != blow.when:
            return None
        count += 1
        if count != blow.at:
            return None
        Path(HIT).touch()
        if blow.what == "FULL":
            return _fill(Path(FILLER))
        if blow.what == "NAN":
            optimizer: ScheduledOptimizer = args[0]  # as a type, so that a new name is seen
            for group in optimizer.inner.param_groups:
                group["params"][0].grad.mul_(float("nan"))
            return None
        for word in blow.what.split():
            if number := getattr(signal, f"SIG{word}", None):
                os.kill(os.getpid(), number)
            else:
                raise OSError(getattr(errno, word), os.strerror(getattr(errno, word)))

    _replace(POINTS[blow.point], lambda inner: _around(inner, reached))


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


def _around(inner: Callable[..., Any], reached: Callable[[str], None]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(inner):

        @functools.wraps(inner)
        async def waiting(*args: Any, **options: Any) -> Any:
            reached("before", *args)
            result = await inner(*args, **options)
            reached("after")
            return result

        return waiting

    @functools.wraps(inner)
    def plain(*args: Any, **options: Any) -> Any:
        reached("before", *args)
        result = inner(*args, **options)
        reached("after")
        return result

    return plain


def _note_what_is_learned(path: Path) -> None:
    """A line for each train step: of one that is made again after a resume the last one counts."""

    def noting(inner: Callable[..., Any]) -> Callable[..., Any]:
        def step(trainer: Any, experiences: Sequence[Any]) -> Any:
            result = inner(trainer, experiences)
            line = {"step": trainer.step, "eids": [e.eid.uid for e in experiences]}
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            return result

        return step

    _replace("trireme.trainer.trainer:Trainer._step", noting)


def _replace(path: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    module_name, _, name = path.partition(":")
    place: Any = importlib.import_module(module_name)
    *outer, last = name.split(".")
    for part in outer:
        place = getattr(place, part)
    setattr(place, last, change(getattr(place, last)))
