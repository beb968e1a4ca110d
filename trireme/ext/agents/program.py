"""Program: runs a program in its own process group, with limits, and stores its output.

The group is killed when the program has ended, for whatever reason, and when this process has: no
process of a rollout outlives it, except those that have left the group.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Annotated

from pydantic import BaseModel, ConfigDict, Field

from trireme.ext.sandbox.programs import wall
from trireme.files import remove
from trireme.log import FILE_ONLY, get_logger
from trireme.model.model import Model
from trireme.processes import signal_name
from trireme.usercode import Refused

logger = get_logger("explorer")

OUTER = 4
"""Processes of bubblewrap and of the shell before it."""
TAIL = 4000
"""Characters of a program's output in the log and the experience."""
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
"""A shell script: sets limits up to `--`, unless there are tighter ones, on the command after it,
which replaces the shell."""
ENTER = 'echo $$ > "$1" || exit 126; shift; exec "$@"'
"""A shell script: joins the group whose file it is given, then is replaced by the rest of its
arguments."""
NAMED = 'echo +$$ >&0; exec "$@" </dev/null'
"""A shell script: names its process group to `WATCH`, which has the other end of its input, then
is replaced by its arguments. A group that is named by itself has no moment without a name."""
WATCH = """
groups=
while read -r line; do
    case $line in
    +*) groups="$groups ${line#+}" ;;
    -*)
        left=
        for group in $groups; do
            [ "$group" = "${line#-}" ] || left="$left $group"
        done
        groups=$left
        ;;
    esac
done
for group in $groups; do kill -9 -"$group"; done
[ -n "$1" ] || exit 0
for try in 1 2 3 4 5 6 7 8 9 10; do
    rm -rf -- "$1" && exit 0
    chmod -R u+rwX -- "$1"
    sleep 0.3
done
"""
"""A shell script: when its input ends, it kills the process groups that a line `+GROUP` named and
no later `-GROUP` took back, and deletes a folder; more than once, since a process that is being
killed may still write."""


class ProgramFailed(Refused):
    """A program did not end as it should; a retry may succeed."""

    lasting = False


class Limits(BaseModel):
    """The limits of each process of a program."""

    model_config = ConfigDict(extra="forbid")

    memory_mb: Annotated[int, Field(gt=0)] | None = None
    """Address space of each process."""
    cpu_seconds: Annotated[int, Field(gt=0)] | None = None
    """Processor time of each process."""
    file_mb: Annotated[int, Field(gt=0)] = 1024
    """Size of each file that it writes, its output included."""

    def before(self, words: Sequence[str], *more: str) -> list[str]:
        """Return the command behind a shell that sets its limits, and `more` in the form of
        `ulimit`.
        """
        limits = ["-f", str(self.file_mb * 2048), *more]
        if self.cpu_seconds is not None:
            limits += ["-t", str(self.cpu_seconds)]
        if self.memory_mb is not None:
            limits += ["-v", str(self.memory_mb * 1024)]
        return ["/bin/sh", "-c", LIMITED, "sh", *limits, "--", *words]


@cache
def groups() -> Path | None:
    """Return the folder in which this process may make control groups that limit processes, or
    None.
    """
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    places: list[Path] = []
    for _, kinds, path in (line.split(":", 2) for line in lines):
        if "pids" in kinds.split(","):  # the first version: any group may have its own below it
            places.append(Path("/sys/fs/cgroup/pids", path.lstrip("/")))
        elif not kinds:  # the second: one whose groups are limited already, and that has this one
            own = Path("/sys/fs/cgroup", path.lstrip("/"))
            places += [up for up in own.parents if (up / "cgroup.subtree_control").is_file()]
    for place in places:
        with suppress(OSError):
            for old in place.glob("trireme-*-*"):  # of a run that was killed
                if not Path("/proc", old.name.split("-")[1]).exists():
                    old.rmdir()
            with _group(place, 2) as group:
                words = ["/bin/sh", "-c", ENTER, "sh", str(group / "cgroup.procs"), "true"]
                if subprocess.run(words, capture_output=True, check=False).returncode == 0:
                    return place
    return None


_NUMBERS = itertools.count()


@contextmanager
def _group(place: Path, processes: int) -> Iterator[Path]:
    """Make a control group; processes that are left in it at its end are killed."""
    group = place / f"trireme-{os.getpid()}-{next(_NUMBERS)}"
    group.mkdir()
    try:
        (group / "pids.max").write_text(str(processes))
        yield group
    finally:
        for _ in range(1000):
            with suppress(OSError):
                group.rmdir()
                break
            for pid in _members(group):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


def _members(group: Path) -> list[int]:
    with suppress(OSError):
        return [int(line) for line in (group / "cgroup.procs").read_text().split()]
    return []


@cache
def counted_apart() -> bool:
    """Return whether the kernel counts the processes behind bubblewrap separately from the user's
    others, so that a shell's limit holds for them: since Linux 5.14, and never for root's.
    """
    if not wall() or os.geteuid() == 0:
        return False
    words = [*wall(), "bash", "-c", "ulimit -u 4 && (true & true & wait)"]
    path = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(words, env=path, capture_output=True, check=False, timeout=60)
    return done.returncode == 0 and not done.stderr


def limited_processes(words: Sequence[str], processes: int) -> list[str]:
    """Return the command of a program behind bubblewrap with a limit of processes, if the kernel
    counts them.
    """
    if not counted_apart():
        return list(words)
    return ["bash", "-c", LIMITED, "bash", "-u", str(processes), "--", *words]


@asynccontextmanager
async def at_most(processes: int, *, sandbox: bool) -> AsyncIterator[list[str]]:
    """Yield words before a program's that limit it, and everything that it starts, to this many
    processes; none if `limited_processes` does it, or if this machine cannot.
    """
    if sandbox and counted_apart():
        yield []
        return
    place = await asyncio.to_thread(groups)
    if place is None:
        _say_unlimited()
        yield []
        return
    with ExitStack() as held:
        group = held.enter_context(_group(place, processes + OUTER))
        try:
            yield ["/bin/sh", "-c", ENTER, "sh", str(group / "cgroup.procs")]
        finally:
            await asyncio.to_thread(held.close)


@cache
def _say_unlimited() -> None:
    logger.warning(
        "the number of processes of task programs is not limited here: that needs Linux 5.14 or "
        "later and a user other than root, or writable control groups (pids)"
    )


@dataclass(frozen=True)
class Ended:
    """The end of a program, and its output."""

    code: int | None
    """Its exit code, -N if signal N killed it; None: it took too long."""
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
    """Run a program to its end, or for `timeout` seconds. Its output goes to files in `logs`."""
    begun = time.monotonic()
    paths = [logs / file for file in ("stdout.txt", "stderr.txt")]
    files = [path.open("wb") for path in paths]
    try:
        process = await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", NAMED, "sh", *words),
            cwd=cwd,
            env=dict(environment),
            stdin=watch,
            stdout=files[0],
            stderr=files[1],
            start_new_session=True,
        )
    finally:
        for file in files:
            file.close()
    code: int | None = None
    try:
        code = await asyncio.wait_for(process.wait(), timeout)
    except TimeoutError:
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        watch.write(b"-%d\n" % process.pid)  # the number may be another group's from now on
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
    """Start a process that outlives this one, however it ends, and then cleans up: it has the end
    of a pipe and sees it close. Yields the pipe, which takes the lines of `WATCH`.
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
            process.kill()  # before its pipe closes: there is nothing left to clean up


@asynccontextmanager
async def rollout_folder(name: str, keep: str | None) -> AsyncIterator[tuple[Path, IO[bytes]]]:
    """Make a rollout's own folder, whose name begins with `name`; also yields the pipe of
    `watching`.

    It is in the folder `keep` and stays there; None: it is deleted, even if this process dies.
    """
    parent = None if keep is None else Path(keep).expanduser()
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    folder = Path(parent or tempfile.gettempdir(), f"{name}-{secrets.token_hex(4)}").absolute()
    with watching(folder if parent is None else None) as watch:
        folder.mkdir(mode=0o700)  # after the one that deletes it: this process may be killed here
        try:
            yield folder, watch
        finally:
            if parent is None:
                try:
                    await asyncio.to_thread(remove, folder)
                except OSError as error:
                    logger.warning("%s", error)


def refuse_unasked(model: Model, program: str, ended: Ended) -> None:
    """Raise ProgramFailed if a program has ended without a request to the model."""
    if not len(model.recorder):
        raise ProgramFailed(
            f"{program} never called the model: expected requests to its OPENAI_BASE_URL (or "
            f"ANTHROPIC_BASE_URL); {shown(ended.output)}"
        )


def how(code: int | None, timeout: float | None, limit: str) -> str | None:
    """Describe how a program ended that did not end well."""
    if code is None:
        return f"took longer than {limit} ({timeout:g} s) and was killed"
    if code == 0:
        return None
    if code > 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal_name(-code)}"


def shown(output: str) -> str:
    """Return the last line of an output, and below it the end of the whole."""
    text = output.strip()
    last = text.rpartition("\n")[2]
    return f"it said: {last:.200}\n{text[-TAIL:]}" if text else "it said nothing"


def middle_out(text: str) -> str:
    """Return the part of an output that the model sees: all of it, or its two ends in
    equal parts.
    """
    if len(text) <= LONGEST:
        return text
    half, gone = LONGEST // 2, len(text) - LONGEST
    return f"{text[:half]}\n... ({gone} characters are left out)\n{text[-half:]}"


def _text(path: Path) -> str:
    """Return a file's text: only its end, if it is long."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2**20))
        return file.read().decode("utf-8", "replace")
