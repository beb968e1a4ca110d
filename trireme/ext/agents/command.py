"""Command: runs a program for every rollout, which calls the rollout's model over HTTP.

Invariants:
- The program knows only the model's address, in variables that clients of OpenAI and Anthropic
  read. Exactly its recorded calls are trained, id for id.
- It runs in its own process group, which ends with the rollout: see `program.py`.
- A program that fails, is killed, or prints no required reward is a failed rollout, and never one
  with reward 0.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from trireme.experience import Experience
from trireme.ext.agents.program import (
    TAIL,
    Ended,
    Limits,
    ProgramFailed,
    how,
    refuse_unasked,
    rollout_folder,
    run_program,
    shown,
)
from trireme.model.address import Address
from trireme.registry import did_you_mean
from trireme.rewards.grouped import Judges, is_grouped, judge_of, reward_group
from trireme.rewards.reward import examine_columns, number, resolve, score
from trireme.task import Task, as_text, without_truth
from trireme.text import as_json
from trireme.workflows.classes import Workflow

Options = TypeVar("Options", bound=BaseModel)
_HOLE = re.compile(r"\{\{(\w+)\}\}|\{(\w+)\}")
_BEFORE = ("env", "exec", "nice", "nohup", "setsid", "stdbuf", "time", "timeout")
"""Programs that run the command behind them."""
_ELSEWHERE = ("-C", "--chdir", "-S", "--split-string")
"""Options of `env` after which a script is not where it seems to be."""
_SCRIPT = re.compile(r"[^{]*\.(?:py|sh|js|mjs)")
_COMPOUND = re.compile(r"[^\w ./=:@%+,-]")
"""Characters of a shell's line that is more than one plain command."""


class Interpreter(NamedTuple):
    """A program whose first argument is a script, after its options."""

    name: re.Pattern[str]
    inline: re.Pattern[str]
    """Options after which comes no script, but a module or the code itself."""
    valued: re.Pattern[str]
    """Options whose value is the next word."""


def _named(name: str, inline: str, valued: str) -> Interpreter:
    return Interpreter(re.compile(rf"(?:.*/)?{name}"), re.compile(inline), re.compile(valued))


SHELL = _named("(?:ba|da|z|k)?sh", "-[a-z]*c", "[-+][a-z]*[oO]")
INTERPRETERS = (
    SHELL,
    _named(r"(?:python|pypy)[\d.]*", "-|-[A-Za-z]*[cm]", "-[A-Za-z]*[WX]"),
    _named("node", "-|-[ep]+|--eval|--print", "-r|--require|--import|--loader"),
)


def _words(command: Any) -> Any:
    if isinstance(command, str):
        return shlex.split(command)
    if not isinstance(command, list):
        return command
    return [str(word) if type(word) in (int, float) else word for word in command]


Words = Annotated[list[str], BeforeValidator(_words)]


class Settings(Limits):
    """`workflow_args`."""

    command: Words
    """The program with its arguments: a list, or a text that is split like a shell's line. It runs
    without a shell."""
    cwd: str = "."
    """Its working folder; `{workdir}`: the rollout's own folder."""
    env: dict[str, str | int | float] = Field(default_factory=dict)
    """Further variables."""
    timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds; not given: `explorer.max_timeout` alone."""
    keep: str | None = None
    """The folder in which the rollouts' own folders remain; not given: each is deleted."""
    sampling: Literal["run", "program"] = "run"
    """`run`: temperature and the like are the run's; `program`: those that the program requests."""


class CommandWorkflow(Workflow):
    """A program that calls the model over HTTP, one process for every rollout.

    The answer that a reward judges is the program's output. Without a reward the last line must be
    one: a number, or JSON with `reward` and further numbers, which become metrics.
    """

    one_at_a_time = True
    reward_parts = True
    judges: ClassVar[Judges] = Judges()

    async def run(self) -> list[Experience]:
        """Start it, wait for its end, and judge its output."""
        settings, address = settings_of(self.task), self.model.address
        model = self.model.model
        model.keeps_sampling = settings.sampling == "run"
        name = address.base_url.split("/")[-2]
        prefix = f"trireme-{name}" if settings.keep is None else name
        async with rollout_folder(prefix, settings.keep) as (folder, watch):
            ended = await self._run(settings, address, folder, watch)
            refuse_unasked(model, "the program", ended)
            return await self._judged(ended.output, str(folder))

    @classmethod
    def examine(cls, task: Task) -> None:
        """Raise ValueError for a command that cannot run, and for an unknown reward."""
        settings = settings_of(task)
        fill(settings, holes_of(task, NOWHERE, Path("workdir")), NOWHERE)
        cwd = Path("." if settings.cwd == "{workdir}" else settings.cwd).expanduser()
        if not cwd.is_dir():
            raise ValueError(f"workflow_args.cwd is '{settings.cwd}': there is no such folder")
        program = settings.command[0]
        path = str(cwd / program) if os.sep in program else program
        if "{" not in program and shutil.which(path) is None:
            raise ValueError(f"workflow_args.command: there is no program '{program}'")
        script = script_of(settings.command)
        if script and settings.cwd != "{workdir}" and not (cwd / script).exists():
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
        """Set the rewards of all rollouts of a task, if they are set together."""
        if is_grouped(task.reward_fn, task.reward_fn_args):
            await reward_group(cls.judges.of(task), task, experiences, models)
            for experience in experiences:  # the rewards have seen all of it
                experience.info["completion"] = str(experience.info["completion"])[-TAIL:]

    async def _run(
        self, settings: Settings, address: Address, folder: Path, watch: IO[bytes]
    ) -> Ended:
        """Run the program and return its output. Raises ProgramFailed if it did not exit with 0."""
        holes = holes_of(self.task, address, folder, self.model.model_path)
        words, environment, cwd = fill(settings, holes, address)
        (folder / "task.json").write_text(task_json(self.task), encoding="utf-8")
        ended = await run_program(
            settings.before(words),
            name=f"the program of {folder.name}",
            logs=folder,
            cwd=cwd,
            environment=environment,
            timeout=settings.timeout,
            watch=watch,
        )
        if end := how(ended.code, settings.timeout, "workflow_args.timeout"):
            raise ProgramFailed(f"the program {end}; {shown(ended.errors or ended.output)}")
        return ended

    async def _judged(self, output: str, folder: str) -> list[Experience]:
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
    """Return the options of a task. Raises ValueError that names a wrong one."""
    settings = options_of(task, Settings, "command_workflow")
    if not settings.command:
        raise ValueError("workflow_args.command is empty: expected a program with its arguments")
    return settings


def script_of(words: Sequence[str]) -> str | None:
    """Return the script that an interpreter in a command runs; None if there is none, or if the
    command does not tell.
    """
    before = 0
    if words and Path(words[0]).name in _BEFORE:
        before = next((at for at, word in enumerate(words) if _interpreter(word)), 0)
        if any(word.startswith(_ELSEWHERE) for word in words[1:before]):
            return None
    interpreter = _interpreter(words[before]) if words else None
    if interpreter is None:
        return None
    rest = iter(words[before + 1 :])
    for word in rest:
        if interpreter.inline.fullmatch(word):
            text = next(rest, "") if interpreter is SHELL else ""
            return None if _COMPOUND.search(text) else script_of(text.split())
        if interpreter.valued.fullmatch(word):
            next(rest, None)
        elif not word.startswith(("-", "+")):
            return word if _SCRIPT.fullmatch(word) else None
    return None


def _interpreter(word: str) -> Interpreter | None:
    return next((one for one in INTERPRETERS if one.name.fullmatch(word)), None)


def options_of(task: Task, kind: type[Options], workflow: str) -> Options:
    """Return the `workflow_args` of a task. Raises ValueError that names a wrong one."""
    try:
        return kind.model_validate(dict(task.workflow_args))
    except ValidationError as error:
        for one in error.errors():
            if one["type"] == "extra_forbidden":
                option, known = str(one["loc"][0]), list(kind.model_fields)
                hint = did_you_mean(option, known, " (did you mean '{}'?)")
                if option == "reward":
                    hint = ": the reward is default_reward_fn_type of the taskset"
                raise ValueError(
                    f"{workflow} has no option '{option}'{hint}. It has: {', '.join(known)}"
                ) from None
            where = ".".join(map(str, one["loc"]))
            if one["type"] == "missing":
                raise ValueError(
                    f"{workflow} needs workflow_args.{where}: a program with its arguments"
                ) from None
            raise ValueError(
                f"workflow_args.{where} is {one['input']!r:.60}: {one['msg']}"
            ) from None
    raise AssertionError("a validation error without an error")


def reward_of(output: str) -> tuple[float, dict[str, float]]:
    """Return the reward in the last line of an output, and the numbers next to it.

    Raises ProgramFailed if there is none.
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
            f"the program printed no reward: its last line is {last!r:.80}; expected a number, or "
            'JSON like {"reward": 1.0}; or set default_reward_fn_type of the taskset'
        )
    parts = {
        str(name): number(value, f"the program gave for '{name}'", ProgramFailed)
        for name, value in named.items()
        if name != "reward" and isinstance(value, int | float)
    }
    return number(reward, "the program gave the reward", ProgramFailed), parts


NOWHERE = Address("", "", lambda: None)
"""A stand-in for a rollout's address, to validate a command before there is one."""


def holes_of(task: Task, address: Address, folder: Path, model_path: str = "") -> dict[str, str]:
    """Return the value of each `{word}` in the command, its folder and its variables."""
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


def fill(
    settings: Settings, holes: Mapping[str, str], address: Address
) -> tuple[list[str], dict[str, str], str]:
    """Return command, environment and folder of a rollout. Raises ValueError for an unknown
    `{word}`.
    """

    def filled(text: str, where: str) -> str:
        def one(match: re.Match[str]) -> str:
            name = match[2]
            if name is None:
                return f"{{{match[1]}}}"
            if name not in holes:
                hint = did_you_mean(name, holes)
                raise ValueError(
                    f"workflow_args.{where} has the unknown placeholder {{{name}}}{hint}. Known: "
                    f"{', '.join(holes)}; {{{{{name}}}}} gives {{{name}}} itself"
                )
            return holes[name]

        return _HOLE.sub(one, text)

    words = [filled(word, "command") for word in settings.command]
    near = {"TRIREME_TASK": holes["task"], "TRIREME_WORKDIR": holes["workdir"]}
    environment = {**os.environ, **address.environment, **near}
    for name in ("NO_PROXY", "no_proxy"):  # our address is on this machine
        environment[name] = ",".join(filter(None, [environment.get(name), "127.0.0.1,localhost"]))
    environment |= {n: filled(str(v), f"env.{n}") for n, v in settings.env.items()}
    cwd = str(Path(filled(settings.cwd, "cwd")).expanduser())
    return words, environment, cwd


def task_json(task: Task) -> str:
    """Return the part of the task that the program may read, as JSON: the row without the right
    answer.
    """
    known = {"task_id": task.task_id, "prompt": task.prompt, "row": without_truth(task)}
    return as_json(known, default=str)


def _plain(value: Any) -> str:
    text = as_text(value)
    return text if isinstance(text, str) else as_json(value, default=str)
