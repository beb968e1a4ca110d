"""Program: runs a program in a process group of its own, with limits, and keeps what it prints.

The group is killed when the program has ended, however that was, and when this process has: nothing
of a rollout outlives it, except what has left the group.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

from pydantic import BaseModel, ConfigDict, Field

from trireme.log import FILE_ONLY, get_logger
from trireme.model.model import Model
from trireme.usercode import Refused

logger = get_logger("explorer")

TAIL = 4000
"""Characters of a program's output that the log and the experience keep."""
LONGEST = 4000
"""Characters of an output that the model sees: half from each end."""
LIMITED = """
while [ "$1" != -- ]; do
    hard=$(ulimit -H "$1")
    [ "$hard" != unlimited ] && [ "$hard" -le "$2" ] || ulimit "$1" "$2" || exit 126
    shift 2
done
shift
exec "$@"
"""
"""A shell's: limits up to `--`, unless there are tighter ones already, on what follows, which
replaces the shell."""
WATCH = """
while read -r line; do group=$line; done
[ -z "$group" ] || kill -9 -"$group"
[ -z "$1" ] || rm -rf -- "$1"
"""
"""A shell's: when its input ends, so does the process group named last in it, and a folder goes."""


class ProgramFailed(Refused):
    """A program did not end as it should; another try may."""

    lasting = False


class Limits(BaseModel):
    """What each process of a program may take."""

    model_config = ConfigDict(extra="forbid")

    memory_mb: Annotated[int, Field(gt=0)] | None = None
    """Address space of each process."""
    cpu_seconds: Annotated[int, Field(gt=0)] | None = None
    """Processor time of each process."""
    file_mb: Annotated[int, Field(gt=0)] = 1024
    """Size of each file that it writes, its output included."""

    def before(self, words: Sequence[str]) -> list[str]:
        """The command behind a shell that sets its limits."""
        limits = ["-f", str(self.file_mb * 2048)]
        if self.cpu_seconds is not None:
            limits += ["-t", str(self.cpu_seconds)]
        if self.memory_mb is not None:
            limits += ["-v", str(self.memory_mb * 1024)]
        return ["/bin/sh", "-c", LIMITED, "sh", *limits, "--", *words]


@dataclass(frozen=True)
class Ended:
    """How a program ended, and what it printed."""

    code: int | None
    """Its exit code, -N where signal N killed it; None: it took too long."""
    output: str
    errors: str


async def run_program(
    words: Sequence[str],
    *,
    name: str,
    logs: Path,
    cwd: str | Path,
    environment: Mapping[str, str],
    timeout: float | None,
    watch: IO[bytes],
) -> Ended:
    """Run it to its end, or for `timeout` seconds. What it prints goes to files in `logs`."""
    begun = time.monotonic()
    paths = [logs / file for file in ("stdout.txt", "stderr.txt")]
    files = [path.open("wb") for path in paths]
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            cwd=cwd,
            env=dict(environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=files[0],
            stderr=files[1],
            start_new_session=True,
        )
    finally:
        for file in files:
            file.close()
    code: int | None = None
    try:
        with _ended_with_us(process.pid, watch):
            code = await asyncio.wait_for(process.wait(), timeout)
    except TimeoutError:
        pass
    finally:
        await process.wait()
    ended = Ended(code, *map(_text, paths))
    logger.info(
        "%s %s after %.1f s\n%s%s",
        *(name, how(code, timeout, "its time-out") or "has ended", time.monotonic() - begun),
        *(ended.output[-TAIL:], ended.errors[-TAIL:]),
        extra=FILE_ONLY,
    )
    return ended


@contextmanager
def watching(folder: Path | None) -> Iterator[IO[bytes]]:
    """A process that outlives this one, whatever ends it, and then clears up: it has the end of a
    pipe and sees it close. Yields the pipe, which takes the number of a process group.
    """
    with subprocess.Popen(
        ["/bin/sh", "-c", WATCH, "sh", str(folder or "")],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        try:
            yield process.stdin
        finally:
            process.kill()  # before its pipe closes: there is nothing left to clear up


@asynccontextmanager
async def rollout_folder(name: str, keep: str | None) -> AsyncIterator[tuple[Path, IO[bytes]]]:
    """A rollout's own folder, whose name begins with `name`, and the pipe that `watching` yields.

    It lies in the folder `keep` and stays there; None: it is deleted, also where this process dies.
    """
    parent = None if keep is None else Path(keep).expanduser()
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent)).absolute()
    with watching(folder if parent is None else None) as watch:
        try:
            yield folder, watch
        finally:
            if parent is None:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def refuse_unasked(model: Model, program: str, ended: Ended) -> None:
    """Raise ProgramFailed where a program has ended without a request to the model."""
    if not len(model.recorder):
        raise ProgramFailed(
            f"{program} never asked the model: expected requests to its OPENAI_BASE_URL (or "
            f"ANTHROPIC_BASE_URL); {shown(ended.output)}"
        )


@contextmanager
def _ended_with_us(group: int, watch: IO[bytes]) -> Iterator[None]:
    """A process group that ends with the block, and with this process."""
    try:
        watch.write(f"{group}\n".encode())
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        watch.write(b"\n")  # the group's number may be another's from now on


def how(code: int | None, timeout: float | None, limit: str) -> str | None:
    """How a program ended that did not end well."""
    if code is None:
        return f"took longer than {limit} ({timeout:g} s) and was killed"
    if code == 0:
        return None
    if code > 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal.Signals(-code).name}"


def shown(output: str) -> str:
    """The last line of an output, and below it the end of the whole."""
    text = output.strip()
    last = text.rpartition("\n")[2]
    return f"it said: {last:.200}\n{text[-TAIL:]}" if text else "it said nothing"


def middle_out(text: str) -> str:
    """What the model sees of an output: all of it, or as much from each end."""
    if len(text) <= LONGEST:
        return text
    half, gone = LONGEST // 2, len(text) - LONGEST
    return f"{text[:half]}\n... ({gone} characters are left out)\n{text[-half:]}"


def _text(path: Path) -> str:
    """A file's text: its end, where it is long."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2**20))
        return file.read().decode("utf-8", "replace")
