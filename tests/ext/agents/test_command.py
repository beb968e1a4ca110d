"""A program a rollout: what it is given, how it may end, and what of it is trained."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.job import ROOT, trireme, wait_for
from tests.ext.agents.addressed import played
from tests.limits import HANG_S
from tests.test_documents import BLOCK
from tests.tiny import make_model
from trireme.explorer.runner import Outcome
from trireme.ext.agents.command import (
    CommandWorkflow,
    ProgramFailed,
    Settings,
    reward_of,
    script_of,
    settings_of,
    task_json,
)
from trireme.task import Task
from trireme.workflows.workflow import resolve

ASK = """
import json, os, sys, urllib.request as web
def ask(text, **more):
    body = {"messages": [{"role": "user", "content": text}], **more}
    head = {"content-type": "application/json", "x-api-key": os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    asked = web.Request(url, json.dumps(body).encode(), head)
    opened = web.build_opener(web.ProxyHandler({})).open(asked)
    return json.load(opened)["choices"][0]["message"]["content"]
"""
DIES = """
import asyncio, os, sys
from pathlib import Path
from trireme.ext.agents import program

def before(*_, **__):
    os.kill(os.getpid(), 9)

def after(work):
    return lambda *given, **named: (work(*given, **named), before())

async def soon_after(*given, start=asyncio.create_subprocess_exec, **named):
    await start(*given, **named)
    before()

async def main(moment, cwd):
    match moment:
        case "nothing watches": program.subprocess.Popen = before
        case "the folder is made": Path.mkdir = after(Path.mkdir)
        case "the program begins": asyncio.create_subprocess_exec = soon_after
    async with program.rollout_folder("trireme-1", None) as (folder, watch):
        limits = dict(name="p", logs=folder, cwd=cwd, environment={}, timeout=None, watch=watch)
        await program.run_program(["sleep", "6000"], **limits)

asyncio.run(main(*sys.argv[1:]))
"""
SPAWN = "import subprocess; child = subprocess.Popen(['sleep', '6000'])\n"
ROW = {"prompt": "1 + 2?", "response": "3", "level": 4}


def there(text: str, **answers: Any) -> float:
    return 0.0


def flat(task: Task, answer: str) -> float:
    return 0.0


def long(task: Task, answer: str) -> float:
    return float(len(answer))


def of_files(task: Task, answer: str, *, workdir: str) -> dict[str, float]:
    written = (Path(workdir) / "made.txt").read_text()
    return {"right": float(answer == f"said {task.truth}"), "written": float(written == "done")}


def task_of(code: str, words: tuple[str, ...] = (), reward: Any = None, **options: Any) -> Task:
    command = [sys.executable, "-S", "-c", ASK + code, *words]
    args = {"command": command} | options
    return Task(ROW, workflow="command_workflow", workflow_args=args, reward_fn=reward)


def play(task: Task, reply: str = "3", *, limit: float = HANG_S, retries: int = 0) -> Outcome:
    return played(task, lambda _: reply, range(task.repeat_times), limit=limit, retries=retries)


def test_what_the_program_asked_is_trained_and_its_last_line_is_the_reward() -> None:
    code = "print('hm', ask('a'), ask(sys.argv[1]))\nprint(json.dumps({'reward': 0.5, 'turns': 2}))"
    outcome = play(task_of(code, ("{prompt} at level {level}",)))
    assert not outcome.failures
    first, second = outcome.experiences
    assert [e.reward for e in (first, second)] == [0.5, 0.5] and first.metrics["turns"] == 2
    assert second.messages and second.messages[0]["content"] == "1 + 2? at level 4"
    assert first.info["reward_parts"] == {"reward": (0.5, 1.0)}
    assert int(first.mask.sum()) == 2 and first.info["completion"].startswith("hm 3 3\n")


def test_a_program_that_sends_keys_of_other_servers_is_served() -> None:
    code = "ask('a', odd={'x': 1}, frequency_penalty=0.5, logit_bias={'5': 1}); print(1)"
    assert not play(task_of(code)).failures
    [failure] = play(task_of(code, sampling="program")).failures
    assert "HTTP Error 400" in failure.message


def test_the_program_is_told_its_task_without_the_answer() -> None:
    code = (
        "ask('a'); known = json.load(open(os.environ['TRIREME_TASK']))\n"
        "assert known == json.load(open(sys.argv[1])) and os.getcwd() == sys.argv[2]\n"
        "assert os.environ['TRIREME_WORKDIR'] == sys.argv[2]\n"
        "assert os.environ['LEVEL'] == 'l4{}{{level}}' and json.loads(sys.argv[3])['x']['y'] == 4\n"
        "assert os.environ['ANTHROPIC_BASE_URL'] + '/v1' == os.environ['OPENAI_BASE_URL']\n"
        "assert '127.0.0.1' in os.environ['NO_PROXY']\n"
        "print(known['prompt'], known['row'], file=sys.stderr); print(len(known['row']))"
    )
    words = ("{task}", "{workdir}", '{"x":{"y":{level}}}')
    outcome = play(task_of(code, words, cwd="{workdir}", env={"LEVEL": "l{level}{}{{level}}"}))
    assert not outcome.failures, outcome.failures
    assert outcome.experiences[0].reward == 2.0  # prompt and level


def test_a_reward_function_sees_what_was_printed_and_the_files() -> None:
    code = "open('made.txt', 'w').write('done'); print('said', ask('a'))"
    outcome = play(task_of(code, reward=of_files, cwd="{workdir}"))
    [experience] = outcome.experiences
    assert experience.reward == 2.0 and experience.metrics["written"] == 1.0
    assert sum(part for part, _ in experience.info["reward_parts"].values()) == 2.0


def test_rewards_that_are_given_together_see_all_that_was_printed() -> None:
    task = task_of("ask('a'); print('x' * 9000)", reward=[long, flat])
    outcome = play(task)
    asyncio.run(CommandWorkflow.judge(task, outcome.experiences, []))
    [experience] = outcome.experiences
    assert experience.reward == 9000 and len(experience.info["completion"]) == 4000


def test_a_reward_of_the_folder_stands_alone() -> None:
    for task in (
        task_of("", reward=[of_files, flat]),
        Task(ROW, workflow_args={"command": "ls"}, reward_fn_args={"funcs": [of_files]}),
    ):
        with pytest.raises(ValueError, match="'of_files' needs 'workdir', which there is not"):
            CommandWorkflow.examine(task)


@pytest.mark.parametrize("given", ["NaN", '{"reward": NaN}', '{"reward": 1, "turns": Infinity}'])
def test_a_reward_that_is_no_finite_number_is_a_failure_that_is_tried_again(given: str) -> None:
    with pytest.raises(ProgramFailed, match="expected a finite number"):
        reward_of(given)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("ask('a'); print('1.0'); sys.exit('no idea')", "exit code 1; it said: no idea"),
        ("ask('a'); print('0'); os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("ask('a'); print('0'); os.kill(os.getpid(), 40)", "was killed by signal 40"),
        ("ask('a'); print('fine')", "printed no reward: its last line is 'fine'"),
        ("ask('a'); print('{\"reward\": NaN}')", "expected a finite number"),
        ("print(1)", "never called the model"),
        ("ask('a', n='many')", "HTTPError"),
    ],
)
def test_what_does_not_end_well_is_a_failed_rollout_and_no_reward_of_0(
    code: str, said: str
) -> None:
    outcome = play(task_of(code))
    [failed] = outcome.failures
    assert said in str(failed) and not outcome.experiences


def test_a_failed_program_is_tried_again(tmp_path: Path) -> None:
    folder = "os.path.dirname(os.environ['TRIREME_WORKDIR'])"
    code = (
        f"ask('a'); n = len(os.listdir({folder}))\n"
        "sys.exit('the first time') if n == 1 else print(1.0)"
    )
    outcome = play(task_of(code, keep=str(tmp_path)), retries=2)
    assert outcome.retries == 1 and [e.reward for e in outcome.experiences] == [1.0]
    said = sorted((folder / "stderr.txt").read_text() for folder in tmp_path.iterdir())
    assert said == ["", "the first time\n"]


def ended(pid: int) -> bool:
    """Whether a process is gone, or waits to be collected by its new parent."""
    state = Path(f"/proc/{pid}/stat")
    try:
        return state.read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.parametrize("own", [True, False])
def test_a_time_out_kills_the_whole_group(own: bool, tmp_path: Path) -> None:
    code = SPAWN + f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); child.wait()"
    outcome = play(task_of(code, timeout=3.0 if own else None), limit=HANG_S if own else 3.0)
    [failed] = outcome.failures
    which = "workflow_args.timeout" if own else "explorer.max_timeout"
    assert which in str(failed)
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: ended(pid))


def test_nothing_of_the_group_outlives_a_program_that_ends_well(tmp_path: Path) -> None:
    code = SPAWN + f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); ask('a'); print(1)"
    assert not play(task_of(code)).failures
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: ended(pid))


def test_a_program_ends_with_the_process_that_started_it_however_that_ends(
    tmp_path: Path,
) -> None:
    pid = tmp_path / "pid"
    code = SPAWN + "ask('a'); ids = f'{os.getpid()} {child.pid} ' + os.environ['TRIREME_WORKDIR']\n"
    code += f"open('new', 'w').write(ids); os.rename('new', {str(pid)!r}); child.wait()"
    here = "import sys; from tests.ext.agents.test_command import play, task_of\n"
    here += "play(task_of(sys.argv[1], cwd=sys.argv[2], timeout=6000), limit=6000)"
    words = [sys.executable, "-c", here, code, str(tmp_path)]
    with subprocess.Popen(words, text=True) as parent:
        wait_for(pid.exists, parent)
        parent.kill()
    *ids, workdir = pid.read_text().split()
    program, child = map(int, ids)
    try:
        wait_for(lambda: ended(program) and ended(child) and not Path(workdir).exists())
    finally:
        if not (ended(program) and ended(child)):
            os.killpg(program, signal.SIGKILL)


DIES_BESIDE_TWO = """
import asyncio, os, signal, sys
from pathlib import Path
from trireme.ext.agents.program import rollout_folder, run_program

async def main():
    async with rollout_folder("trireme-beside", None) as (folder, watch):
        async def call(name, then):
            logs = folder / name
            logs.mkdir()
            words = ["/bin/sh", "-c", ': >"$0"; ' + then, name]
            options = {"environment": dict(os.environ), "timeout": None, "watch": watch}
            await run_program(words, name=name, logs=logs, cwd=sys.argv[1], **options)

        calls = [asyncio.create_task(call(name, "exec sleep 6000")) for name in "ab"]
        while not all(Path(sys.argv[1], name).exists() for name in "ab"):
            await asyncio.sleep(0.05)
        await call("c", "exit 0")
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
"""A process that is killed while two programs run, after a third has ended."""


def works_in(folder: Path) -> list[str]:
    """The processes whose working folder it is."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            found += [link.parent.name] if link.readlink() == folder else []
    return found


@pytest.mark.parametrize("moment", ["nothing watches", "the folder is made", "the program begins"])
def test_a_process_that_is_killed_at_a_bad_moment_leaves_nothing(
    moment: str, tmp_path: Path
) -> None:
    temporary, work = tmp_path / "tmp", tmp_path / "work"
    temporary.mkdir()
    work.mkdir()
    words = [sys.executable, "-c", DIES, moment, str(work)]
    done = subprocess.run(
        words, env={**os.environ, "TMPDIR": str(temporary)}, check=False, timeout=HANG_S
    )
    assert done.returncode == -signal.SIGKILL
    try:
        wait_for(lambda: not works_in(work) and not list(temporary.glob("trireme-*")))
    finally:
        for process in works_in(work):
            os.kill(int(process), signal.SIGKILL)


def test_all_programs_of_a_rollout_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    words = [sys.executable, "-c", DIES_BESIDE_TWO, str(tmp_path)]
    done = subprocess.run(words, check=False, timeout=HANG_S)
    assert done.returncode == -signal.SIGKILL
    assert {"a", "b"} <= {path.name for path in tmp_path.iterdir()}
    try:
        wait_for(lambda: not works_in(tmp_path))
    finally:
        for process in works_in(tmp_path):
            os.kill(int(process), signal.SIGKILL)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "1000 unlimited 50"),
        ({"cpu_seconds": 60}, "1000 unlimited 50"),
        ({"cpu_seconds": 40, "memory_mb": 500}, "1000 512000 40"),
    ],
)
def test_a_limit_that_is_tighter_already_stays(options: dict[str, Any], expected: str) -> None:
    def lowered() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (512_000, 512_000))
        resource.setrlimit(resource.RLIMIT_CPU, (50, 50))

    words = ["/bin/sh", "-c", "echo $(ulimit -f) $(ulimit -v) $(ulimit -t)"]
    made = Settings(command=["x"], **options).before(words)
    nobody: Any = {"user": 65534} if os.getuid() == 0 else {}  # root may go over a hard limit
    done = subprocess.run(made, preexec_fn=lowered, capture_output=True, text=True, **nobody)
    assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr


@pytest.mark.parametrize(
    ("code", "limits", "said"),
    [
        ("bytearray(10**9)", {"memory_mb": 300}, "MemoryError"),
        ("[None for _ in iter(int, 1)]", {"cpu_seconds": 1}, "SIG"),
        ("open('x', 'wb').write(bytes(3 * 10**6))", {"file_mb": 1}, "File too large"),
    ],
)
def test_limits_hold(code: str, limits: dict[str, Any], said: str) -> None:
    [failed] = play(task_of(code, cwd="{workdir}", **limits)).failures
    assert said in str(failed) + failed.trace


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("python -u -X dev a.py --out b.py", "a.py"),
        ("env -i X=1 python3.12 a.py", "a.py"),
        ("timeout -k 5 60 bash -eo pipefail a.sh", "a.sh"),
        ("bash -lc 'exec python a.py b'", "a.py"),
        ("node --import ./b.mjs a.mjs", "a.mjs"),
        ("bash -e a.sh", "a.sh"),
        ("bash -c 'cd b && python a.py'", None),
        ("bash -c", None),
        ("env -C b python a.py", None),
        ("python -m a.py", None),
        ("python -uc a.py", None),
        ("python {folder}/a.py", None),
        ("python - a.py", None),
        ("my_agent a.py", None),
        ("env my_agent", None),
    ],
)
def test_the_script_of_a_command(command: str, script: str | None, tmp_path: Path) -> None:
    words = shlex.split(command)
    assert script_of(words) == script
    settings = {"command": ["python", *words[1:]], "cwd": str(tmp_path)}
    if script and words[0] == "python":
        with pytest.raises(ValueError, match=f"there is no '{script}' in"):
            CommandWorkflow.examine(Task(ROW, workflow_args=settings))
        (tmp_path / script).touch()
        CommandWorkflow.examine(Task(ROW, workflow_args=settings))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"command": ["no-such-program"]}, "there is no program 'no-such-program'"),
        ({"command": ""}, "command is empty"),
        ({"command": "python3 agnt.py", "cwd": "/"}, "there is no 'agnt.py' in '/'"),
        ({"comand": "x"}, "no option 'comand' (did you mean 'command'?)"),
        ({"reward": "x"}, "no option 'reward': the reward is default_reward_fn_type"),
        ({"command": "ls {promt}"}, "the unknown placeholder {promt}; did you mean 'prompt'?"),
        ({"env": {"A": "{b}"}}, "workflow_args.env.A has the unknown placeholder {b}"),
        ({"env": {"A": "{b}"}}, "{{b}} gives {b} itself"),
        ({"cwd": "/no/such"}, "workflow_args.cwd is '/no/such'"),
        ({"timeout": 0}, "timeout is 0"),
        ({"sampling": "both"}, "sampling is 'both': Input should be 'run' or 'program'"),
        ({"command": ["echo", None]}, "workflow_args.command.1 is None: Input should be a valid s"),
        ({"command": 'echo "a'}, "workflow_args.command is 'echo \"a': Value error, No closing"),
        ({"command": 3}, "workflow_args.command is 3: Input should be a valid list"),
    ],
)
def test_what_cannot_run_is_said_before_a_model_is_loaded(
    options: dict[str, Any], said: str
) -> None:
    task = Task(ROW, workflow_args={"command": "ls"} | options)
    examine = resolve("command_workflow").examine
    assert examine is not None
    with pytest.raises(ValueError) as caught:
        examine(task)
    assert said in str(caught.value)


def test_a_command_must_be_given_and_may_have_numbers() -> None:
    with pytest.raises(ValueError, match=r"needs workflow_args\.command: a program"):
        settings_of(Task(ROW, workflow_args={"cwd": "/"}))
    numbers = settings_of(Task(ROW, workflow_args={"command": ["echo", 1, 0.5]}))
    assert numbers.command == ["echo", "1", "0.5"]


def test_a_text_is_split_without_a_shell_and_a_task_cannot_add_arguments() -> None:
    row = {"prompt": "a b; echo 'x' $(id) {level}", "response": ""}
    show = "import sys, os; exec(os.environ['ASK']); ask('a'); "
    show += "print(len(sys.argv), sys.argv[1]); print(1)"
    command = f'{sys.executable} -S -c "{show}" {{prompt}}'
    args = {"command": command, "env": {"ASK": ASK}}
    outcome = play(Task(row, workflow="command_workflow", workflow_args=args))
    assert not outcome.failures, outcome.failures
    said = outcome.experiences[0].info["completion"]
    assert said == f"2 {row['prompt']}\n1"


@pytest.mark.skipif(os.name != "posix", reason="process groups are POSIX's")
def test_rollouts_of_a_group_run_one_after_the_other() -> None:
    task = task_of("ask('a'); print(1)")
    task.repeat_times = 3
    outcome = play(task)
    assert [e.eid.run for e in outcome.experiences] == [0, 1, 2]


@pytest.mark.parametrize("key", ["answer", "reward_model.ground_truth", "reward_model"])
def test_the_task_that_a_program_reads_is_without_the_right_answer(key: str) -> None:
    judged = {"style": "rule", "ground_truth": "never-seen"}
    row = {"prompt": "?", "level": 2, "reward_model": judged, "answer": "never-seen"}
    if key != "answer":
        del row["answer"]
    else:
        judged["ground_truth"] = "another"
    task = Task(row, format_args={"response_key": key})
    known = task_json(task)
    assert "never-seen" not in known and json.loads(known)["row"]["level"] == 2
    assert task.raw_task["reward_model"] == judged
    if key == "reward_model.ground_truth":
        assert json.loads(known)["row"]["reward_model"] == {"style": "rule"}


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "file"), [("agents.md", "agent.py"), ("agent_programs.md", "with_openai.py")]
)
def test_the_first_program_of_a_page_runs_as_pasted_with_the_yaml_beside_it(
    page: str, file: str, tmp_path: Path
) -> None:
    blocks = BLOCK.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
    shown = {language: text for language, text in reversed(blocks)}  # the first of each
    (tmp_path / file).write_text(shown["python"])
    row = {"prompt": "6 * 7?", "question": "6 * 7?", "response": "42", "answer": "42"}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    config = yaml.safe_load(shown["yaml"])
    model = {"model_path": str(make_model(tmp_path / "model", max_len=512))}
    config["model"] = {**model, "max_model_len": 512, "max_response_tokens": 64}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = trireme(tmp_path, "debug", "run.yaml", "--reply", "42", PATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reward 1 " in done.stdout and "assistant  42" in done.stdout
