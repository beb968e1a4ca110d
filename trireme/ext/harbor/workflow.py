"""Harbor: runs tasks that are folders, without a container, each in a copy of its files.

`path` of the taskset is a folder of task folders. The agent is a program (`command`), or the model
with a shell. Then the task's own tests run, with a separate time-out, and leave the reward: an
agent or a verifier that dies, is late or leaves no reward is a failed rollout, and never a reward
of 0. Scripts of a task and commands of a model run behind bubblewrap; without it nothing runs,
unless the YAML says that this machine is itself to be thrown away (`no_sandbox`).
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from pydantic import Field

from trireme.aio import OutOfTime, in_time
from trireme.experience import Experience
from trireme.ext.agents.command import (
    NOWHERE,
    Settings,
    Words,
    fill,
    holes_of,
    options_of,
    task_json,
)
from trireme.ext.agents.program import (
    Ended,
    Limits,
    ProgramFailed,
    at_most,
    how,
    limited_processes,
    middle_out,
    refuse_unasked,
    rollout_folder,
    run_program,
    shown,
    watching,
)
from trireme.ext.harbor.task_box import TaskBox, taken_mb, total
from trireme.ext.harbor.task_folders import DISK_MB, TOML, TaskFolder, absolute_path, read_task
from trireme.ext.multi_turn.scheduled import samples
from trireme.ext.multi_turn.scheduler import request_of
from trireme.ext.multi_turn.tool_calls import ToolCallScheduler
from trireme.ext.multi_turn.turns import play
from trireme.ext.sandbox.programs import wall
from trireme.model.chat_tokens import conversation_of
from trireme.task import Task
from trireme.workflows.classes import Workflow

SYSTEM_PROMPT = """You solve a task on a Linux machine. The tool `shell` runs a command in the \
task's folder and shows what it prints. Look around, do what is asked, and check it. When you are \
done, answer without calling a tool."""
_KILLS = (signal.SIGKILL, signal.SIGXCPU, signal.SIGXFSZ)
"""Signals by which a system or a limit ends a program."""
_MEASURE_S = 1.0
"""Between two looks at how much a program has written."""


class HarborSettings(Limits):
    """`workflow_args`."""

    command: Words | None = None
    """The agent's program; not given: the model with a shell."""
    env: dict[str, str | int | float] = Field(default_factory=dict)
    """Further variables of the program."""
    sampling: Literal["run", "program"] = "run"
    """See `command_workflow`."""
    keep: str | None = None
    """The folder in which the rollouts' own folders remain; not given: each is deleted."""
    max_turns: Annotated[int, Field(gt=0)] = 30
    """Most replies of the model with a shell."""
    call_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Time of one command of the model's."""
    network: bool = False
    """Whether the model's commands and the verifier have a network; a program always has."""
    visible: list[str] = Field(default_factory=list)
    """Further paths of this machine that are visible behind bubblewrap, read-only."""
    skip_run: bool = False
    """Whether the results of Dockerfiles' RUN are on this machine already."""
    processes: Annotated[int, Field(gt=0)] = 256
    """Most processes and threads of a program at a time."""
    open_files: Annotated[int, Field(gt=0)] = 4096
    """Most files that each process has open."""
    tmp_mb: Annotated[int, Field(gt=0)] = 512
    """Most that a program may write outside of the task's folders, which is in memory."""
    disk_mb: Annotated[int, Field(gt=0)] = DISK_MB
    """Most that the files of a rollout take in all; it fails with more."""
    no_sandbox: bool = False
    """Without bubblewrap: scripts and commands have all that the run's user has."""


@dataclass(frozen=True)
class Trial:
    """One rollout of a task folder."""

    task: TaskFolder
    box: TaskBox
    folder: Path
    watch: IO[bytes]
    settings: HarborSettings
    network: bool

    async def run(
        self, name: str, words: Sequence[str], seconds: float, /, **variables: str
    ) -> Ended:
        """Run a program among the task's files; its output stays in a folder of that name."""
        logs = self.folder / name
        logs.mkdir(parents=True, exist_ok=True)
        most, box = self.settings.processes, self.box
        words = limited_processes(words, most) if box.sandbox else words
        await self._refuse_full()  # a model's earlier command may have left too much
        await asyncio.to_thread(box.mend)
        words = box.words(words, network=self.network)
        async with at_most(most, sandbox=box.sandbox) as before:
            program = run_program(
                [*before, *self.settings.before(words, "-n", str(self.settings.open_files))],
                name=f"{name} of {self.folder.name}",
                logs=logs,
                cwd=box.cwd,
                environment=box.environment(**variables),
                timeout=seconds,
                watch=self.watch,
            )
            return await self._measured(program)

    async def _measured(self, program: Coroutine[Any, Any, Ended]) -> Ended:
        """Return the end of a program. Raises ProgramFailed, and ends it, once the rollout's files
        take too much.
        """
        running = asyncio.ensure_future(program)
        try:
            while not running.done():
                await asyncio.wait([running], timeout=_MEASURE_S)
                await self._refuse_full()
            return running.result()
        finally:
            running.cancel()
            await asyncio.wait([running])

    async def _refuse_full(self) -> None:
        most = self.settings.disk_mb
        if await asyncio.to_thread(taken_mb, self.folder) > most:
            raise ProgramFailed(
                f"the files of task {self.task.folder.name} take more than {most} MB: expected at "
                "most that (workflow_args.disk_mb)"
            )

    async def solve(self) -> None:
        """Run the task's own solution. Raises ProgramFailed if it does not end well."""
        self.box.put("solution")
        seconds = self.task.agent_seconds
        ended = await self.run("solution", self.box.script("solution/solve.sh"), seconds)
        if end := how(ended.code, seconds, "agent.timeout_sec"):
            said = shown(ended.errors or ended.output)
            raise ProgramFailed(f"the solution of task {self.task.folder.name} {end}; {said}")

    async def verify(self) -> dict[str, float]:
        """Run the tests and return the reward by its parts.

        Raises ProgramFailed if they are killed or late, and NoReward if they leave none. Any other
        exit code is ignored, even that of a signal: it may be that of a server that they stopped
        and waited for.
        """
        await asyncio.to_thread(self.box.show_tests)
        script, seconds = self.box.script("tests/test.sh"), self.task.verifier_seconds
        ended = await self.run("verifier", script, seconds, **self.task.verifier_env)
        # bubblewrap ends with the code of the signal that killed the script behind it
        if ended.code is None or ended.code < 0 or ended.code - 128 in _KILLS:
            end = how(ended.code, seconds, "verifier.timeout_sec")
            said = shown(ended.errors or ended.output)
            raise ProgramFailed(f"the verifier of task {self.task.folder.name} {end}; {said}")
        return await asyncio.to_thread(self.box.reward)


class HarborWorkflow(Workflow):
    """A task folder: a program or the model with a shell, then the task's own tests."""

    one_at_a_time = True

    async def run(self) -> list[Experience]:
        """Copy the files, let the agent work, and verify."""
        settings = options_of(self.task, HarborSettings, "harbor_workflow")
        task = await asyncio.to_thread(_task, Path(self.raw_task["folder"]), settings)
        model = self.model.model
        # scripts of tasks take the folder from variables, perhaps without quotes
        name = re.sub(r"[^\w.]+", "-", f"{task.folder.name}-{'-'.join(map(str, model.key))}")
        async with rollout_folder(name, settings.keep) as (folder, watch):
            trial = await asyncio.to_thread(open_trial, task, folder, watch, settings)
            if settings.command is None:
                experiences = await self._shell(trial, settings)
            else:
                experiences = await self._program(trial, settings)
            parts = await trial.verify()
        for experience in experiences:
            experience.reward = total(parts)
            experience.metrics.update({f"verifier/{name}": part for name, part in parts.items()})
            experience.info["task_name"] = task.folder.name
        return experiences

    @classmethod
    def examine(cls, task: Task) -> None:
        """Raise ValueError for an option, and for the first task that cannot run here."""
        settings = options_of(task, HarborSettings, "harbor_workflow")
        folder = task.raw_task.get("folder")
        if not folder or not (Path(str(folder)) / TOML).is_file():
            raise ValueError(
                "harbor_workflow needs a taskset of task folders: set its path to a folder with "
                "one folder per task, each with task.toml, instruction.md, environment/ and "
                "tests/"
            )
        if task.reward_fn is not None:
            raise ValueError(
                "harbor_workflow takes its reward from the task's tests: name no other"
            )
        _refuse_without_wall(settings)
        if settings.command is not None:
            inner = _inner(settings, "/app")
            fill(inner, holes_of(task, NOWHERE, Path("workdir")), NOWHERE)
            if settings.no_sandbox and shutil.which(inner.command[0]) is None:
                raise ValueError(f"workflow_args.command: no program '{inner.command[0]}'")
        for toml in sorted(Path(str(folder)).parent.glob(f"*/{TOML}")):
            one = _task(toml.parent, settings)
            path = absolute_path(one) if settings.no_sandbox else None
            if path is not None:
                raise ValueError(
                    f"task {one.folder.name} names a folder of the root ({path}), which only "
                    "bubblewrap can put there: expected $APP_DIR, $TESTS_DIR and $LOGS_DIR, or "
                    "workflow_args.no_sandbox: false"
                )

    async def _program(self, trial: Trial, settings: HarborSettings) -> list[Experience]:
        """Run the agent's program and return its experiences. Raises ProgramFailed if it did not
        exit with 0.
        """
        address, box = self.model.address, trial.box
        model = self.model.model
        model.keeps_sampling = settings.sampling == "run"
        seen = box.root / "logs" / "agent"
        (seen / "task.json").write_text(task_json(self.task), encoding="utf-8")
        place = Path("/logs/agent") if box.sandbox else seen
        holes = holes_of(self.task, address, place, self.model.model_path)
        words, variables, _ = fill(_inner(settings, str(box.cwd)), holes, address)
        mine = set(os.environ) - set(address.environment) - set(settings.env)
        given = {name: value for name, value in variables.items() if name not in mine}
        seconds = trial.task.agent_seconds
        ended = await replace(trial, network=True).run("agent", words, seconds, **given)
        if end := how(ended.code, seconds, "agent.timeout_sec"):
            raise ProgramFailed(f"the agent {end}; {shown(ended.errors or ended.output)}")
        refuse_unasked(model, "the agent", ended)
        return self.model.experiences()

    async def _shell(self, trial: Trial, settings: HarborSettings) -> list[Experience]:
        calls = 0

        async def shell(command: str) -> str:
            """Runs a command with bash in the task's folder; shows what it prints.

            Args:
                command: The command. Files stay from call to call; variables do not.
            """
            nonlocal calls
            calls += 1
            ended = await trial.run(
                f"calls/{calls}", ["bash", "-c", command], settings.call_seconds
            )
            end = how(ended.code, settings.call_seconds, "its time")
            said = middle_out((ended.output + ended.errors).strip())
            return "\n".join(filter(None, [said, end and f"[it {end}]"])) or "(no output)"

        # a command's own time is its limit: the scheduler's only has to be longer
        scheduler = ToolCallScheduler(tools=[shell], timeout=settings.call_seconds + 60)
        prompt = conversation_of(self.task, self.task.prompt, self.system_prompt or SYSTEM_PROMPT)
        model = self.model.model
        uuid = model.rollout_name
        playing = play(scheduler, request_of({}, prompt, uuid), model, max_turns=settings.max_turns)
        seconds = trial.task.agent_seconds
        try:
            ended = await in_time(playing, seconds)
        except OutOfTime:
            raise ProgramFailed(
                f"the agent took longer than agent.timeout_sec ({seconds:g} s)"
            ) from None
        return samples(model, ended, "default", uuid)


def _refuse_without_wall(settings: HarborSettings) -> None:
    if not settings.no_sandbox and not wall():
        raise ValueError(
            "harbor_workflow runs scripts of tasks and commands of a model: install bubblewrap "
            "(bwrap), or set workflow_args.no_sandbox: true on a disposable machine"
        )


def _task(folder: Path, settings: HarborSettings) -> TaskFolder:
    return read_task(
        folder,
        skip_run=settings.skip_run,
        file_mb=settings.file_mb,
        disk_mb=settings.disk_mb,
    )


def open_trial(task: TaskFolder, folder: Path, watch: IO[bytes], settings: HarborSettings) -> Trial:
    """Make a rollout's copy of a task, below its folder."""
    box = TaskBox(
        task,
        folder / "box",
        sandbox=not settings.no_sandbox,
        visible=settings.visible,
        tmp_mb=settings.tmp_mb,
        disk_mb=settings.disk_mb,
    )
    return Trial(task, box, folder, watch, settings, settings.network)


async def reward_of_task(
    folder: Path, *, solve: bool, settings: HarborSettings | None = None
) -> dict[str, float]:
    """Return the reward of the task's own solution, or of doing nothing, by its parts.

    Raises the errors that a rollout would fail with.
    """
    settings = settings or HarborSettings()
    _refuse_without_wall(settings)
    task = _task(folder.absolute(), settings)
    with tempfile.TemporaryDirectory() as place, watching(None) as watch:
        trial = open_trial(task, Path(place), watch, settings)
        if solve:
            await trial.solve()
        return await trial.verify()


def _inner(settings: HarborSettings, cwd: str) -> Settings:
    assert settings.command is not None
    return Settings(command=settings.command, cwd=cwd, env=settings.env)
