"""Task folders without a container: what runs, what earns what, and what is refused."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.ext.agents.addressed import played
from tests.ext.agents.test_command import ASK
from tests.limits import HANG_S
from trireme.data.rows import NoRows, load_rows
from trireme.explorer.runner import Outcome
from trireme.ext.agents.program import ProgramFailed
from trireme.ext.harbor.task_box import NoReward, TaskBox, total
from trireme.ext.harbor.task_folders import absolute_path, read_task
from trireme.ext.harbor.workflow import HarborSettings, HarborWorkflow, reward_of_task
from trireme.ext.sandbox.programs import wall
from trireme.task import Task

EXAMPLE = Path(__file__).parents[3] / "examples" / "harbor_tasks" / "make_tasks.py"
MAKE = runpy.run_path(str(EXAMPLE))
NO_WALL = pytest.mark.skipif(not wall(), reason="bubblewrap is not installed")
MODES = pytest.mark.parametrize(
    "open_", [pytest.param(True, id="open"), pytest.param(False, id="bwrap", marks=NO_WALL)]
)
VERDICT = '"${LOGS_DIR:-/logs}/verifier/'


def folder_of(root: Path, number: int = 0, **texts: str) -> Path:
    """A task of the example; `texts` go over its files, `__` for a slash and `_.` for a dot."""
    make = MAKE["KINDS"][number]
    folder = root / f"task-{number}"
    MAKE["write_task"](folder, make.__name__, make(random.Random(0)))
    for name, text in texts.items():
        path = folder / name.replace("__", "/").replace("_sh", ".sh").replace("_toml", ".toml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def earned(folder: Path, *, solve: bool, open_: bool = True, **options: Any) -> dict[str, float]:
    settings = HarborSettings(no_sandbox=open_, **options)
    return asyncio.run(reward_of_task(folder, solve=solve, settings=settings))


def call(command: str) -> str:
    asked = {"name": "shell", "arguments": {"command": command}}
    return f"<tool_call>\n{json.dumps(asked)}\n</tool_call>"


def play(
    folder: Path, replies: list[str], *, open_: bool = True, batch_id: int | str = 0, **args: Any
) -> Outcome:
    row = {"name": folder.name, "prompt": "Do it.", "folder": str(folder)}
    given = {"no_sandbox": open_, **args}
    task = Task(row, workflow="harbor_workflow", workflow_args=given, batch_id=batch_id)
    said = iter(replies)
    return played(task, lambda _: next(said), [0], limit=HANG_S)


@MODES
@pytest.mark.parametrize("number", range(5))
def test_the_solution_earns_1_and_nothing_0(number: int, open_: bool, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, number)
    assert total(earned(folder, solve=True, open_=open_)) == pytest.approx(1.0)
    assert total(earned(folder, solve=False, open_=open_)) == 0.0


@MODES
def test_the_model_with_a_shell(open_: bool, tmp_path: Path) -> None:
    solution = (folder_of(tmp_path) / "solution" / "solve.sh").read_text()
    replies = [call("ls; echo no >&2; exit 3"), call(solution), "Done."]
    outcome = play(tmp_path / "task-0", replies, open_=open_)
    assert not outcome.failures, outcome.failures
    [e] = outcome.experiences
    assert e.reward == 1.0 and e.metrics["verifier/reward"] == 1.0 and e.metrics["num_turns"] == 3
    seen = [m["content"] for m in e.messages or [] if m["role"] == "tool"]
    listed = "Dockerfile\nwords.txt\nno\n[it ended with exit code 3]"
    assert seen == [listed, "(no output)"]
    assert int(e.mask.sum()) == sum(len(reply) + 1 for reply in replies)
    [e] = play(tmp_path / "task-0", ["Done."], open_=open_).experiences
    assert e.reward == 0.0 and e.info["task_name"] == "task-0"


@MODES
def test_a_program_as_agent(open_: bool, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "tasks")
    agent = tmp_path / "agent.py"
    agent.write_text(
        f"{ASK}\nknown = json.load(open(os.environ['TRIREME_TASK']))\n"
        "assert known['prompt'] == 'Do it.' == sys.argv[1]\n"
        "assert 'PYTEST_CURRENT_TEST' not in os.environ\n"
        "os.system(ask('a'))\n"
    )
    command = [os.path.realpath(sys.executable), "-S", str(agent), "{prompt}"]
    visible = [sys.base_prefix, str(agent)]
    outcome = play(
        folder, ["wc -l < words.txt > count.txt"], open_=open_, command=command, visible=visible
    )
    assert not outcome.failures, outcome.failures
    assert [e.reward for e in outcome.experiences] == [1.0]
    [failed] = play(folder, [], open_=open_, command=["true"]).failures
    assert "never called the model" in failed.message


@MODES
def test_what_an_agent_leaves_for_the_verifier_does_not_count(open_: bool, tmp_path: Path) -> None:
    forged = call(f'echo 1 > {VERDICT}reward.txt"; echo exit > "${{TESTS_DIR}}/test.sh"')
    [e] = play(folder_of(tmp_path), [forged, "Done."], open_=open_).experiences
    assert e.reward == 0.0


@pytest.mark.parametrize(
    ("script", "error", "said"),
    [
        ("exit 0", NoReward, "left no reward"),
        ("kill -9 $$", ProgramFailed, "was killed by SIGKILL"),
        (f'echo 0 > {VERDICT}reward.txt"; exit 137', ProgramFailed, "exit code 137"),
        ("sleep 60", ProgramFailed, r"longer than verifier.timeout_sec \(0.5 s\)"),
        (f'echo fine > {VERDICT}reward.txt"', NoReward, "'fine': expected a number"),
        (f'echo nan > {VERDICT}reward.txt"', NoReward, "finite"),
        (f"echo '{{' > {VERDICT}reward.json\"", NoReward, "not JSON"),
        (f"echo '[1]' > {VERDICT}reward.json\"", NoReward, "numbers by name"),
    ],
)
def test_a_verifier_without_a_reward_is_a_failure(
    script: str, error: type[Exception], said: str, tmp_path: Path
) -> None:
    toml = "[verifier]\ntimeout_sec = 0.5\n" if "sleep" in script else ""
    folder = folder_of(tmp_path, tests__test_sh=script, task_toml=toml)
    with pytest.raises(error, match=said):
        earned(folder, solve=False)
    [failed] = play(folder, ["Done."]).failures
    assert not failed.fault.lasting


@pytest.mark.parametrize("code", [3, 143, 200, 255])
def test_how_a_verifier_exits_does_not_matter(code: int, tmp_path: Path) -> None:
    script = f'echo \'{{"a": 0.25, "b": 0.5}}\' > {VERDICT}reward.json"; exit {code}'
    parts = earned(folder_of(tmp_path, tests__test_sh=script), solve=False)
    assert parts == {"a": 0.25, "b": 0.5} and total(parts) == 0.75
    assert total({"reward": 1.0, "a": 7.0}) == 1.0


@NO_WALL
def test_behind_bubblewrap_there_is_no_other_file_and_nothing_stays(tmp_path: Path) -> None:
    script = (
        f"n=0; ls {tmp_path} {Path.home()}/.bashrc {Path(__file__).parent} || n=1\n"
        "touch /usr/made 2> /dev/null && n=2; (exec 3<> /dev/tcp/1.1.1.1/80) 2> /dev/null && n=3\n"
        '[ "$(pwd)" = /app ] && [ -n "$(ls /app)" ] || n=4\n'
        "sleep 987 & echo $n > /logs/verifier/reward.txt"
    )
    assert earned(folder_of(tmp_path, tests__test_sh=script), solve=False, open_=False) == {
        "reward": 1.0
    }
    running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not any(b"sleep\x00987" in words for words in running)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ({"environment__Dockerfile": "FROM a\nRUN apt-get \\\n  update"}, "line 2, `RUN apt-get"),
        ({"environment__Dockerfile": "FROM a\nCOPY gone /app/"}, "there is no 'gone'"),
        ({"environment__Dockerfile": "FROM a\nCOPY ../tests /app/"}, "there is no '../tests'"),
        ({"environment__Dockerfile": "FROM a\nCOPY . /usr/x"}, "below /usr"),
        ({"environment__Dockerfile": "FROM a\nFROM b"}, "line 2, `FROM b`"),
        ({"environment__docker-compose.yaml": ""}, "docker-compose.yaml needs containers"),
        ({"task_toml": "[[steps]]\nname = 'a'"}, "several steps"),
        ({"task_toml": "[agent]\ntimeout_sec = 0"}, "agent.timeout_sec is 0"),
        ({"task_toml": "[agent"}, "task.toml cannot be read"),
        ({"task_toml": "[environment]\ndocker_image = 'a'"}, "docker_image"),
        ({"task_toml": "agent = 3"}, "task-0: task.toml has agent = 3: expected a table"),
        ({"task_toml": "[verifier]\nenv = 3"}, "has verifier.env = 3"),
        ({"task_toml": "[verifier]\nenv = {K = true}"}, "verifier.env.K is True"),
        ({"task_toml": "[verifier]\nenv = {K = '${A}'}"}, "expected the value itself"),
        ({"task_toml": "[environment]\nenv = {K = '${A}'}"}, "environment.env.K is"),
        ({"environment__Dockerfile": "FROM a\nENV A=1 B"}, "line 2, `ENV A=1 B`: 'B' does not set"),
        ({"environment__Dockerfile": "FROM a\nENV"}, "line 2, `ENV`: nothing follows"),
        (
            {"environment__Dockerfile": "FROM a\nENV A=b\0"},
            "line 2, .*'A' with the value .* is not",
        ),
        ({"environment__Dockerfile": "FROM a\nCOPY " + "[" * 9999}, "line 2, .* is not JSON"),
        (
            {"task_toml": "[environment]\nenv = {'A=B' = 'x'}"},
            "environment.env: 'A=B' with",
        ),
        ({"task_toml": "[verifier]\nenv = {'' = 'x'}"}, "verifier.env: '' with the value"),
        ({"task_toml": '[verifier]\nenv = {K = "\\u0000"}'}, "verifier.env: 'K' with the value"),
        (
            {"task_toml": f"[agent]\ntimeout_sec = {'9' * 400}"},
            "agent.timeout_sec is 9999.*: expected",
        ),
        ({"task_toml": "[agent]\ntimeout_sec = inf"}, "agent.timeout_sec is inf: expected seconds"),
        ({"environment__Dockerfile": "FROM a\nENV A='"}, "line 2, .*No closing quotation"),
        ({"environment__Dockerfile": 'FROM a\nCOPY ["a", b]'}, "line 2, .* is not JSON"),
        ({"environment__Dockerfile": "FROM a\nCOPY --chmod=u+x a /b"}, "expected digits, --chmod"),
        ({"environment__Dockerfile": 'FROM a\nCOPY ["a", 1]'}, "line 2, .*not a list of texts"),
        ({"environment__Dockerfile": "FROM a\nCOPY **bad /app/"}, r"task-0: .*line 2, .*\*\*"),
    ],
)
def test_what_needs_a_container_is_refused(
    texts: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, **texts)
    with pytest.raises(ValueError, match=said):
        read_task(folder)


def test_what_a_dockerfile_comes_to(tmp_path: Path) -> None:
    text = (
        "# syntax\nFROM python:3.12 AS base\nARG x\nENV A=1 B='2 3'\nENV C 4\nWORKDIR /srv\n"
        "WORKDIR app\nCOPY words.txt ./list.txt\nCOPY --chown=me words.txt /data/\n"
        "COPY . .\nRUN x\n"
    )
    folder = folder_of(tmp_path, environment__Dockerfile=text)
    task = read_task(folder, skip_run=True)
    assert task.workdir == "/srv/app" and task.variables == {"A": "1", "B": "2 3", "C": "4"}
    files = [("words.txt", "/srv/app/list.txt"), ("words.txt", "/data/words.txt")]
    assert [copy[:2] for copy in task.copies] == [*files, (".", "/srv/app")]
    assert task.roots == ["app", "tests", "logs", "root", "srv", "data"]
    script = f'ls list.txt ../../data/words.txt && echo $C > {VERDICT}reward.txt"'
    (folder / "tests" / "test.sh").write_text(script)
    assert earned(folder, solve=False, skip_run=True) == {"reward": 4.0}


@pytest.mark.parametrize("line", ["COPY words.txt /words.txt", "COPY words.txt /"])
def test_a_file_may_lie_in_the_root_itself(tmp_path: Path, line: str) -> None:
    folder = folder_of(tmp_path, environment__Dockerfile=f"FROM a\n{line}\n")
    box = TaskBox(read_task(folder), tmp_path / "box", sandbox=False)
    copied = (box.root / "words.txt").read_text()
    assert copied == (folder / "environment" / "words.txt").read_text()


def test_a_last_line_that_goes_on_to_nothing_is_an_instruction(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, environment__Dockerfile="FROM a\nCOPY words.txt \\\n /app/a \\\n")
    assert [target for _, target, _ in read_task(folder).copies] == ["/app/a"]


def test_copies_have_the_permissions_of_their_line(tmp_path: Path) -> None:
    text = "FROM a\nCOPY --chmod=755 words.txt /app/run\nCOPY --chmod=0700 more /app/more\n"
    folder = folder_of(tmp_path, environment__Dockerfile=text, environment__more__b="b")
    box = TaskBox(read_task(folder), tmp_path / "box", sandbox=False)
    modes = [(box.cwd / name).stat().st_mode & 0o777 for name in ("run", "more", "more/b")]
    assert modes == [0o755, 0o700, 0o700]


def test_what_dockerignore_leaves_out_is_not_copied(tmp_path: Path) -> None:
    lines = "# a comment\n*.log\n!keep.log\n/answers\n!answers/hint.txt\n**/*.pyc\nex?mple[0-9]\n\n"
    folder = folder_of(tmp_path, environment__Dockerfile="FROM a\nCOPY . /app/\n")
    environment = folder / "environment"
    (environment / ".dockerignore").write_text(lines)
    paths = ("a.log", "keep.log", "deep/a.log", "deep/er/x.pyc", "answers/right.txt")
    for path in (*paths, "answers/hint.txt", "example1", "exampleA", "gone.log/b"):
        (environment / path).parent.mkdir(parents=True, exist_ok=True)
        (environment / path).write_text(path)
    box = TaskBox(read_task(folder), tmp_path / "box", sandbox=False)
    files = {str(path.relative_to(box.cwd)) for path in box.cwd.rglob("*") if path.is_file()}
    kept = {"keep.log", "deep/a.log", "answers/hint.txt", "exampleA", "words.txt"}
    assert files == kept | {"Dockerfile", ".dockerignore"}
    # this one takes precedence; all but what is named
    (environment / "Dockerfile.dockerignore").write_text("*\n!words.txt\n")
    box = TaskBox(read_task(folder), tmp_path / "other", sandbox=False)
    assert [path.name for path in box.cwd.iterdir()] == ["words.txt"]


def test_copy_of_what_dockerignore_leaves_out_is_refused(tmp_path: Path) -> None:
    text = "FROM a\nCOPY words.txt /app/\n"
    folder = folder_of(tmp_path, environment__Dockerfile=text)
    (folder / "environment" / ".dockerignore").write_text("words*")
    with pytest.raises(ValueError, match=r"no 'words.txt' in .* \.dockerignore does not leave out"):
        read_task(folder)
    for wrong in ("[z-a]", "[a", "a\\"):
        (folder / "environment" / ".dockerignore").write_text(f"b\n{wrong}")
        with pytest.raises(ValueError, match=r"\.dockerignore cannot be .*: line 2, .* no pattern"):
            read_task(folder)


def test_nothing_is_copied_out_of_the_rollouts_files(tmp_path: Path) -> None:
    text = "FROM a\nWORKDIR /app/../../srv\nCOPY words.txt ../../../victim/a\n"
    folder = folder_of(tmp_path / "tasks", environment__Dockerfile=text)
    task = read_task(folder)
    assert task.workdir == "/srv" and task.copies == (("words.txt", "/victim/a", None),)
    TaskBox(task, tmp_path / "a" / "b" / "box", sandbox=False)
    assert not [path for path in tmp_path.rglob("victim") if path.parent.name != "box"]
    for line in ("COPY words.txt ../usr/x", "COPY words.txt //usr/x"):
        (folder / "environment" / "Dockerfile").write_text(f"FROM a\n{line}\n")
        with pytest.raises(ValueError, match="below /usr"):
            read_task(folder)


def test_nothing_is_copied_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    text = "FROM a\nCOPY deep/er /app/\nCOPY words.txt /app/link/b\n"
    folder = folder_of(tmp_path / "tasks", environment__Dockerfile=text)
    link = folder / "environment" / "deep" / "er" / "link"
    link.parent.mkdir(parents=True)
    link.symlink_to(victim)
    with pytest.raises(ValueError, match=r"environment/deep/er/link is a link to .*/victim"):
        read_task(folder)
    # this one stays within environment/, but leaves the box from where COPY puts it
    link.unlink()
    link.symlink_to("../../../environment")
    (tmp_path / "environment").mkdir()
    task, box = read_task(folder), tmp_path / "b" / "box"
    with pytest.raises(ValueError, match="/app/link/b of the task is behind a link"):
        TaskBox(task, box, sandbox=False)
    with pytest.raises(ValueError, match="/app/link of the task is behind a link"):
        TaskBox(replace(task, copies=task.copies[:1]), tmp_path / "c" / "box", sandbox=False)
    assert not [*victim.iterdir(), *(tmp_path / "environment").iterdir()]
    link.unlink()
    link.symlink_to("other.txt")
    TaskBox(replace(task, copies=task.copies[:1]), tmp_path / "d" / "box", sandbox=False)
    assert os.readlink(tmp_path / "d" / "box" / "app" / "link") == "other.txt"


def test_the_folders_name_needs_no_quotes(tmp_path: Path) -> None:
    script = "echo 1 > ${LOGS_DIR:-/logs}/verifier/reward.txt"
    folder = folder_of(tmp_path, tests__test_sh=script).rename(tmp_path / "a task")
    outcome = play(folder, ["Done."], batch_id="1/held/out", keep=str(tmp_path / "kept"))
    assert not outcome.failures, outcome.failures
    [kept] = (tmp_path / "kept").iterdir()
    assert re.fullmatch(r"a-task-[\w.-]+", kept.name)


def test_variables_of_the_environment_and_of_the_verifier(tmp_path: Path) -> None:
    toml = "[environment]\nenv = {A = 'env', B = 2}\n[verifier]\nenv = {name = 'own'}\n"
    script = f'[ "$A-$B-$C-$name" = env-2-docker-own ]; echo $? > {VERDICT}reward.txt"'
    docker = "FROM a\nENV A=docker C=docker\n"
    texts: dict[str, Any] = {
        "environment__Dockerfile": docker,
        "tests__test_sh": script,
        "task_toml": toml,
    }
    assert earned(folder_of(tmp_path, **texts), solve=False) == {"reward": 0.0}


def test_absolute_paths_need_bubblewrap(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    assert absolute_path(read_task(folder)) is None  # the example's take variables first
    (folder / "tests" / "check.py").write_text("x = 1\nopen('/app/count.txt')\n")
    assert absolute_path(read_task(folder)) == "tests/check.py, line 2: /app"
    with pytest.raises(ValueError, match=r"names a folder of the root \(tests/check.py, line 2"):
        play(folder, [])


@pytest.mark.parametrize("docker", ["WORKDIR /workspace", "COPY files /workspace/files"])
def test_paths_below_other_folders_of_the_root_need_it_too(tmp_path: Path, docker: str) -> None:
    folder = folder_of(tmp_path, environment__Dockerfile=f"FROM a\n{docker}\n")
    (folder / "environment" / "files").mkdir(exist_ok=True)
    assert absolute_path(read_task(folder)) is None
    (folder / "tests" / "check.py").write_text("open('/workspace/count.txt')\n")
    assert absolute_path(read_task(folder)) == "tests/check.py, line 1: /workspace"


def test_without_bubblewrap_nothing_runs_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trireme.ext.harbor.workflow.wall", lambda: ())
    with pytest.raises(ValueError, match="install bubblewrap"):
        play(folder_of(tmp_path), [], open_=False)
    with pytest.raises(ValueError, match="install bubblewrap"):
        earned(tmp_path / "tasks", solve=True, open_=False)
    with pytest.raises(ValueError, match=r"no option 'comand'.*did you mean 'command'"):
        play(folder_of(tmp_path), [], comand="ls")


def test_a_folder_of_tasks_is_a_data_set(tmp_path: Path) -> None:
    MAKE["write_tasks"](tmp_path / "train", 6, 0)
    MAKE["write_tasks"](tmp_path / "test", 5, 1)
    rows = load_rows(tmp_path)
    assert [row["name"] for row in rows][:2] == ["count-lines-000", "count-lines-005"]
    assert rows[0]["prompt"].startswith("Write the number of lines") and len(rows) == 6
    assert len(load_rows(tmp_path, split="test")) == 5 == len(load_rows(tmp_path / "test"))
    assert rows.where(1).endswith("count-lines-005/task.toml)")
    with pytest.raises(NoRows, match="has no split 'dev'"):
        load_rows(tmp_path, split="dev")
    (tmp_path / "train" / "count-lines-000" / "tests" / "test.sh").unlink()
    (tmp_path / "train" / "count-lines-000" / "instruction.md").touch()
    with pytest.raises(NoRows, match=r"a task without tests/test.sh"):
        load_rows(tmp_path)


def test_another_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a taskset of task folders"):
        HarborWorkflow.examine(Task({"prompt": "a"}))


def test_a_link_to_nothing_is_copied_as_one(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "environment" / "Dockerfile").unlink(missing_ok=True)
    for name, to in (("nowhere", "gone"), ("itself", "itself")):
        (folder / "environment" / name).symlink_to(to)
    box = TaskBox(read_task(folder), tmp_path / "box", sandbox=False)
    links = {path.name: os.readlink(path) for path in box.cwd.iterdir() if path.is_symlink()}
    assert links == {"nowhere": "gone", "itself": "itself"}
