"""Command: runs a program for every rollout, which asks the rollout's model over HTTP.

Invariants:
- The program knows the model by its address alone, in variables that clients of OpenAI and
  Anthropic read. What it asked is what is trained, id for id.
- It runs in a process group of its own, which is killed when the program has ended, however that
  was, and when this process has: nothing of a rollout outlives it, except what has left the group.
- A program that fails, is killed, or says no reward where it has to is a failed rollout, and never
  one with reward 0.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from trireme.experience import Experience
from trireme.log import FILE_ONLY, get_logger
from trireme.model.openai_client import Address
from trireme.registry import did_you_mean, workflow
from trireme.rewards.grouped import Judges, is_grouped, judge_of, reward_group
from trireme.rewards.reward import examine_columns, number, resolve, score
from trireme.task import Task, as_text
from trireme.usercode import Refused
from trireme.workflows.classes import Workflow

logger = get_logger("explorer")

TAIL = 4000
"""Characters of a program's output that the log and the experience keep."""
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
_HOLE = re.compile(r"\{\{(\w+)\}\}|\{(\w+)\}")


class ProgramFailed(Refused):
    """A program did not end as it should; another try may."""

    lasting = False


def _words(command: Any) -> Any:
    """A text split into words, and numbers as text; the type is checked after this."""
    if isinstance(command, str):
        return shlex.split(command)
    if not isinstance(command, list):
        return command
    return [str(word) if type(word) in (int, float) else word for word in command]


class Settings(BaseModel):
    """`workflow_args`."""

    model_config = ConfigDict(extra="forbid")

    command: Annotated[list[str], BeforeValidator(_words)]
    """The program with its arguments: a list, or a text that is split like a shell's line. No shell
    runs it."""
    cwd: str = "."
    """Where it runs; `{workdir}`: in the rollout's own folder."""
    env: dict[str, str | int | float] = {}
    """Further variables."""
    timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds; not given: `explorer.max_timeout` alone."""
    keep: str | None = None
    """The folder in which the rollouts' own folders stay; not given: each is deleted."""
    sampling: Literal["run", "program"] = "run"
    """`run`: temperature and the like are the run's; `program`: what the program asks for."""
    memory_mb: Annotated[int, Field(gt=0)] | None = None
    """Address space of each process."""
    cpu_seconds: Annotated[int, Field(gt=0)] | None = None
    """Processor time of each process."""
    file_mb: Annotated[int, Field(gt=0)] = 1024
    """Size of each file that it writes, its output included."""


@workflow("command_workflow")
class CommandWorkflow(Workflow):
    """A program that asks the model over HTTP, one process for every rollout.

    The answer that a reward judges is what the program prints. Without a reward its last line is
    one: a number, or JSON with `reward` and further numbers, which become metrics.
    """

    one_at_a_time = True
    reward_parts = True
    judges: ClassVar[Judges] = Judges()

    async def run(self) -> list[Experience]:
        """Start it, wait for its end, and judge what it did."""
        settings, address = settings_of(self.task), self.model.address
        model = self.model.model
        model.keeps_sampling = settings.sampling == "run"
        name = address.base_url.split("/")[-2]
        parent = None if settings.keep is None else Path(settings.keep).expanduser()
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        prefix = f"trireme-{name}-" if parent is None else f"{name}-"
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent)).absolute()
        with _watch(folder if parent is None else None) as watch:
            try:
                output = await self._run(settings, address, folder, watch)
                if not len(model.recorder):
                    raise ProgramFailed(
                        "the program never asked the model: expected requests to its "
                        f"OPENAI_BASE_URL (or ANTHROPIC_BASE_URL); {_shown(output)}"
                    )
                return await self._judged(output, str(folder))
            finally:
                if parent is None:
                    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    @classmethod
    def examine(cls, task: Task) -> None:
        """Raise ValueError for a command that cannot run, and for a reward that there is not."""
        settings = settings_of(task)
        _fill(settings, _holes(task, NOWHERE, Path("workdir")), NOWHERE)
        cwd = Path("." if settings.cwd == "{workdir}" else settings.cwd).expanduser()
        if not cwd.is_dir():
            raise ValueError(f"workflow_args.cwd is '{settings.cwd}': there is no such folder")
        program = settings.command[0]
        path = str(cwd / program) if os.sep in program else program
        if "{" not in program and shutil.which(path) is None:
            raise ValueError(f"workflow_args.command: there is no program '{program}'")
        script = Path(settings.command[1] if len(settings.command) > 1 else "{")
        named = script.suffix in (".py", ".sh", ".js", ".mjs") and "{" not in f"{script}"
        if named and settings.cwd != "{workdir}" and not (cwd / script).exists():
            raise ValueError(
                f"workflow_args.command: there is no '{script}' in '{settings.cwd}' "
                "(workflow_args.cwd)"
            )
        reward = task.reward_fn
        if is_grouped(reward, task.reward_fn_args):
            judge_of(reward, task.reward_fn_args).examine(task)
        elif (made := resolve(reward, task.reward_fn_args)) is not None:
            examine_columns(task, made)

    @classmethod
    async def judge(
        cls, task: Task, experiences: Sequence[Experience], models: Sequence[Any]
    ) -> None:
        """Give all rollouts of a task their rewards, where they are given together."""
        if is_grouped(task.reward_fn, task.reward_fn_args):
            await reward_group(cls.judges.of(task), task, experiences, models)
            for experience in experiences:  # the rewards have seen all of it
                experience.info["completion"] = str(experience.info["completion"])[-TAIL:]

    async def _run(
        self, settings: Settings, address: Address, folder: Path, watch: IO[bytes]
    ) -> str:
        """What the program printed. Raises ProgramFailed where it did not end with 0."""
        holes = _holes(self.task, address, folder, self.model.model_path)
        words, environment, cwd = _fill(settings, holes, address)
        (folder / "task.json").write_text(_task_json(self.task), encoding="utf-8")
        begun = time.monotonic()
        files = [(folder / name).open("wb") for name in ("stdout.txt", "stderr.txt")]
        try:
            process = await asyncio.create_subprocess_exec(
                *_limited(settings, words),
                cwd=cwd,
                env=environment,
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
                code = await asyncio.wait_for(process.wait(), settings.timeout)
        except TimeoutError:
            pass
        finally:
            await process.wait()
        output, errors = (_text(folder / name) for name in ("stdout.txt", "stderr.txt"))
        seconds = time.monotonic() - begun
        end = _how(code, settings.timeout)
        logger.info(
            "the program of %s %s after %.1f s\n%s%s",
            *(folder.name, end or "has ended", seconds, output[-TAIL:], errors[-TAIL:]),
            extra=FILE_ONLY,
        )
        if end is not None:
            raise ProgramFailed(f"the program {end}; {_shown(errors or output)}")
        return output

    async def _judged(self, output: str, folder: str) -> list[Experience]:
        """The experiences, with their reward where each rollout gets one by itself."""
        task, answer = self.task, output.strip()
        grouped = is_grouped(task.reward_fn, task.reward_fn_args)
        reward = None if grouped else resolve(task.reward_fn, task.reward_fn_args)
        parts: dict[str, float] = {}
        compared: dict[str, float] = {}
        total: float | None = None
        if reward is not None:
            models = self.auxiliary_model_wrappers
            compared = await score(task, answer, reward, (), models, folder, notes=parts)
            total = sum(compared.values())
            parts |= compared
        elif not grouped:
            total, parts = reward_of(answer)
            compared = {"reward": total}
        experiences = self.model.experiences(total)
        for experience in experiences:
            experience.metrics.update(parts)
            said = answer if grouped else answer[-TAIL:]
            experience.info |= {"completion": said, "request_id": Path(folder).name}
            if compared:
                experience.info["reward_parts"] = {k: (v, 1.0) for k, v in compared.items()}
        return experiences


def settings_of(task: Task) -> Settings:
    """The options of a task. Raises ValueError that names the one that is wrong."""
    try:
        settings = Settings.model_validate(dict(task.workflow_args))
    except ValidationError as error:
        for one in error.errors():
            if one["type"] == "extra_forbidden":
                option, known = str(one["loc"][0]), list(Settings.model_fields)
                hint = did_you_mean(option, known, " (did you mean '{}'?)")
                if option == "reward":
                    hint = ": the reward is default_reward_fn_type of the taskset"
                raise ValueError(
                    f"command_workflow has no option '{option}'{hint}. It has: {', '.join(known)}"
                ) from None
            where = ".".join(map(str, one["loc"]))
            if one["type"] == "missing":
                raise ValueError(
                    f"command_workflow needs workflow_args.{where}: a program with its arguments"
                ) from None
            raise ValueError(
                f"workflow_args.{where} is {one['input']!r:.60}: {one['msg']}"
            ) from None
    if not settings.command:
        raise ValueError("workflow_args.command is empty: expected a program with its arguments")
    return settings


def reward_of(output: str) -> tuple[float, dict[str, float]]:
    """The reward in the last line of an output, and the numbers beside it.

    Raises ProgramFailed where there is none.
    """
    last = output.rstrip().rpartition("\n")[2].strip()
    try:
        answer = json.loads(last)
    except ValueError:
        answer = None
    named = answer if isinstance(answer, Mapping) else {"reward": answer}
    reward = named.get("reward")
    if reward is None or isinstance(reward, str | list | Mapping):
        raise ProgramFailed(
            f"the program said no reward: its last line is {last!r:.80}; expected a number, or "
            'JSON like {"reward": 1.0}; or set default_reward_fn_type of the taskset'
        )
    parts = {
        str(name): number(value, f"the program gave for '{name}'", ProgramFailed)
        for name, value in named.items()
        if name != "reward" and isinstance(value, int | float)
    }
    return number(reward, "the program gave the reward", ProgramFailed), parts


NOWHERE = Address("", "", lambda: None)
"""In place of a rollout's address, where a command is looked at before there is one."""


def _holes(task: Task, address: Address, folder: Path, model_path: str = "") -> dict[str, str]:
    """What stands for each `{word}` of the command, its folder and its variables."""
    columns = {name: _plain(value) for name, value in task.raw_task.items()}
    return columns | {
        "prompt": _plain(task.prompt),
        "task": str(folder / "task.json"),
        "workdir": str(folder),
        "base_url": address.base_url,
        "anthropic_base_url": address.base_url.removesuffix("/v1"),
        "api_key": address.api_key,
        "model": model_path,
    }


def _fill(
    settings: Settings, holes: Mapping[str, str], address: Address
) -> tuple[list[str], dict[str, str], str]:
    """Command, environment and folder of a rollout. Raises ValueError for an unknown `{word}`."""

    def filled(text: str, where: str) -> str:
        def one(match: re.Match[str]) -> str:
            name = match[2]
            if name is None:
                return f"{{{match[1]}}}"
            if name not in holes:
                hint = did_you_mean(name, holes)
                raise ValueError(
                    f"workflow_args.{where} has {{{name}}}, which stands for nothing{hint}. There "
                    f"are: {', '.join(holes)}; {{{{{name}}}}} stands for {{{name}}} itself"
                )
            return holes[name]

        return _HOLE.sub(one, text)

    words = [filled(word, "command") for word in settings.command]
    near = {"TRIREME_TASK": holes["task"], "TRIREME_WORKDIR": holes["workdir"]}
    environment = {**os.environ, **address.environment, **near}
    for name in ("NO_PROXY", "no_proxy"):  # our address is this machine's
        environment[name] = ",".join(filter(None, [environment.get(name), "127.0.0.1,localhost"]))
    environment |= {n: filled(str(v), f"env.{n}") for n, v in settings.env.items()}
    cwd = str(Path(filled(settings.cwd, "cwd")).expanduser())
    return words, environment, cwd


def _limited(settings: Settings, words: list[str]) -> list[str]:
    """The command behind a shell that sets its limits."""
    limits = ["-f", str(settings.file_mb * 2048)]
    if settings.cpu_seconds is not None:
        limits += ["-t", str(settings.cpu_seconds)]
    if settings.memory_mb is not None:
        limits += ["-v", str(settings.memory_mb * 1024)]
    return ["/bin/sh", "-c", LIMITED, "sh", *limits, "--", *words]


@contextmanager
def _watch(folder: Path | None) -> Iterator[IO[bytes]]:
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


def _task_json(task: Task) -> str:
    """What the program may know of its task: the row without the right answer."""
    hidden = task.truth_key
    row = {name: value for name, value in task.raw_task.items() if name != hidden}
    known = {"task_id": task.task_id, "prompt": task.prompt, "row": row}
    return json.dumps(known, ensure_ascii=False, default=str)


def _how(code: int | None, timeout: float | None) -> str | None:
    """How a program ended that did not end well."""
    if code is None:
        return f"took longer than workflow_args.timeout ({timeout:g} s) and was killed"
    if code == 0:
        return None
    if code > 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal.Signals(-code).name}"


def _plain(value: Any) -> str:
    text = as_text(value)
    return text if isinstance(text, str) else json.dumps(value, ensure_ascii=False, default=str)


def _text(path: Path) -> str:
    """A file's text: its end, where it is long."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2**20))
        return file.read().decode("utf-8", "replace")


def _shown(output: str) -> str:
    """The last line of an output, and below it the end of the whole."""
    text = output.strip()
    last = text.rpartition("\n")[2]
    return f"it said: {last:.200}\n{text[-TAIL:]}" if text else "it said nothing"
