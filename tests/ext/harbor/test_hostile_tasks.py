"""A task of a stranger's: what it holds and what its programs leave is read with care, or not."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.e2e.test_damaged_files import DAMAGES
from tests.ext.harbor.test_harbor import MODES, NO_WALL, VERDICT, call, earned, folder_of, play
from trireme.data.rows import NoRows, load_rows
from trireme.ext.agents import program
from trireme.ext.agents.program import ProgramFailed
from trireme.ext.harbor.task_box import NoReward, TaskBox
from trireme.ext.harbor.task_folders import read_task

SECRET = "the-host's-own-secret"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "host" / "id_rsa"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


@pytest.mark.parametrize("to", ["a file", "a folder", "nothing"])
@pytest.mark.parametrize("name", ["environment", "tests", "solution"])
def test_a_link_that_leaves_the_task_is_refused_in_every_folder(
    name: str, to: str, secret: Path, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "tasks")
    target = {"a file": secret, "a folder": secret.parent, "nothing": secret / "gone"}[to]
    (folder / name / "deep").mkdir()
    (folder / name / "deep" / "link").symlink_to(target)
    with pytest.raises(ValueError, match=f"task-0: {name}/deep/link is a link to .*/host") as error:
        read_task(folder)
    assert SECRET not in str(error.value)


@MODES
@pytest.mark.parametrize("then", ["true", "touch src", "ln -s /nowhere src"])
def test_an_agent_that_removes_its_folder_earns_0(then: str, open_: bool, tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    docker = folder / "environment" / "Dockerfile"
    docker.write_text(docker.read_text() + "WORKDIR /app/src\n")
    removing = f'cd ..; rm -r "$APP_DIR"; {then}'
    outcome = play(folder, [call(removing), call("pwd -P; ls"), "Done."], open_=open_)
    assert not outcome.failures, outcome.failures
    [e] = outcome.experiences
    seen = [m["content"] for m in e.messages or [] if m["role"] == "tool"]
    assert e.reward == 0.0 and seen[1].endswith("/app/src")


def test_a_folder_is_not_made_again_behind_a_link(secret: Path, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "tasks")
    docker = folder / "environment" / "Dockerfile"
    docker.write_text(docker.read_text() + "WORKDIR /app/src/deep\n")
    box = TaskBox(read_task(folder), tmp_path / "box", sandbox=False)
    shutil.rmtree(box.cwd.parent)
    box.cwd.parent.symlink_to(secret.parent)
    (secret.parent / "deep").write_text(SECRET)
    with pytest.raises(ValueError, match="/app/src of the task is behind a link that leaves"):
        box.mend()
    assert (secret.parent / "deep").read_text() == SECRET


@pytest.mark.parametrize("name", ["environment", "tests", "solution"])
def test_a_folder_of_a_task_that_is_a_link_is_refused(
    name: str, secret: Path, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "tasks")
    (folder / name).rename(tmp_path / "away")
    (folder / name).symlink_to(secret.parent)
    with pytest.raises(ValueError, match=f"{name} is a link to"):
        read_task(folder)


@pytest.mark.parametrize("name", ["task.toml", "instruction.md"])
def test_a_text_of_a_task_that_is_a_link_out_of_it_is_refused(
    name: str, secret: Path, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "tasks")
    (folder / name).unlink()
    (folder / name).symlink_to(secret)
    with pytest.raises(ValueError, match=f"{name} is a link to"):
        read_task(folder)
    if name == "instruction.md":
        with pytest.raises(NoRows, match=r"instruction.md is a link to") as error:
            load_rows(str(tmp_path / "tasks"), None, "train")
        assert SECRET not in str(error.value)


def test_links_within_a_task_are_followed_where_they_are_files(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "tests" / "words").symlink_to("../environment/words.txt")
    (folder / "tests" / "again").symlink_to("words")
    (folder / "tests" / "here").symlink_to(".")
    box = TaskBox(read_task(folder), tmp_path / "box", sandbox=False)
    box.put("tests")
    words = (folder / "environment" / "words.txt").read_bytes()
    copied = box.root / "tests" / "words"
    assert copied.read_bytes() == words and not copied.is_symlink()
    assert (box.root / "tests" / "again").read_bytes() == words
    assert os.readlink(box.root / "tests" / "here") == "."


@pytest.mark.parametrize("name", ["environment/x", "tests/x", "solution/x", "instruction.md"])
@pytest.mark.parametrize("kind", ["pipe", "gigabytes"])
def test_a_pipe_and_gigabytes_in_a_task_are_refused(name: str, kind: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.touch()
        os.truncate(path, 3 << 30)
    wanted = "a pipe" if kind == "pipe" else r"has 3072 MB: expected at most 1024 \(workflow_args"
    with pytest.raises(ValueError, match=f"task-0: {name} .*{wanted}"):
        read_task(folder)
    if name == "instruction.md":
        with pytest.raises(NoRows, match="is a pipe" if kind == "pipe" else "bytes: expected"):
            load_rows(str(tmp_path), None, "train")


def test_a_task_of_too_many_files_or_folders_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path)
    monkeypatch.setattr("trireme.ext.harbor.task_folders.MOST_FILES", 3)
    with pytest.raises(ValueError, match="more than 3 files"):
        read_task(folder)
    monkeypatch.undo()
    (folder / "tests" / "/".join("d" * 120)).mkdir(parents=True)
    with pytest.raises(ValueError, match="folders more than 100 deep"):
        read_task(folder)


TXT, JSON = f'{VERDICT}reward.txt"', f'{VERDICT}reward.json"'
LEFT = {
    "a link to a file": f"ln -s HOST/id_rsa {TXT}",
    "a link to a table": f"ln -s HOST/id_rsa {JSON}",
    "a link to nothing": f"ln -s HOST/gone {TXT}",
    "a link to the kernel's log": f"ln -s /proc/kmsg {TXT}",
    "a link in place of its folder": f'rm -r {VERDICT}"; ln -s HOST {VERDICT[:-1]}"',
    "a pipe": f"mkfifo {TXT}",
    "a folder": f"mkdir {TXT}",
    "gigabytes": f"truncate -s 900M {TXT}",
    "gigabytes of a table": f"truncate -s 900M {JSON}",
    "a deep table": f"python3 -c \"print('[' * 200000)\" > {JSON}",
    "a deep table within the limit": f"python3 -c \"print('[' * 60000)\" > {JSON}",
    "no text": f"printf '\\377\\376' > {TXT}",
    "a number of 5,000 digits": f"printf %05000d 1 > {TXT}",
    "a large number": f"echo 1e999 > {TXT}",
    "a large whole number": f"python3 -c \"print('{{\\\"a\\\": ' + '9' * 500 + '}}')\" > {JSON}",
    "a thousand parts": f'python3 -c "print(str({{str(n): 1 for n in range(999)}})'
    f'.replace(chr(39), chr(34)))" > {JSON}',
    "half a line": f"printf '{{\"a\": 1' > {JSON}",
    "nothing": f": > {TXT}",
}


@pytest.mark.parametrize("left", LEFT)
def test_what_is_no_reward_is_not_read(left: str, secret: Path, tmp_path: Path) -> None:
    (secret.parent / "reward.txt").write_text("0.5\n")
    folder = folder_of(tmp_path / "tasks")
    (folder / "tests" / "test.sh").write_text(LEFT[left].replace("HOST", str(secret.parent)))
    if left == "a number of 5,000 digits":
        assert earned(folder, solve=False) == {"reward": 1.0}  # printf pads with zeros
        return
    with pytest.raises(NoReward) as error:
        earned(folder, solve=False)
    text = str(error.value)
    assert text.startswith("the verifier of task task-0 ") and SECRET not in text
    assert len(text) < 300 and str(tmp_path) not in text.replace(str(secret.parent), "")
    if left in ("gigabytes", "gigabytes of a table", "a deep table"):
        assert f"bytes: expected at most {2**16}" in text


@MODES
def test_a_reward_behind_a_link_fails_its_rollout(
    open_: bool, secret: Path, tmp_path: Path
) -> None:
    (secret.parent / "reward.txt").write_text("0.5\n")
    link = LEFT["a link in place of its folder"].replace("HOST", str(secret.parent))
    folder = folder_of(tmp_path / "tasks", tests__test_sh=link)
    [failed] = play(folder, ["Done."], open_=open_).failures
    assert "/logs/verifier/reward.txt lies behind a link" in failed.message


@MODES
def test_folders_deeper_than_the_stack_are_removed(
    open_: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    where = 'cd "${LOGS_DIR:-/logs}/verifier"'
    each = "[(os.mkdir('d'), os.chdir('d')) for _ in range(1200)]"
    deep = f"{where}; python3 -c \"import os; {each}; os.chmod('.', 0)\""
    script = f"{deep}; {where}; echo 1 > reward.txt"
    folder = folder_of(tmp_path / "tasks", tests__test_sh=script)
    outcome = play(folder, [call(deep), "Done."], open_=open_)
    assert [e.reward for e in outcome.experiences] == [1.0], outcome.failures
    assert not [*(tmp_path / "tmp").iterdir()]


COUNTED = {
    "processes": """python3 -c "
import os, time
count = 0
try:
    for _ in range(300):
        if os.fork() == 0:
            time.sleep(30); os._exit(0)
        count += 1
except OSError:
    pass
print(count, file=open('/logs/verifier/reward.txt', 'w'))" """,
    "threads": """python3 -c "
import threading, time
count = 0
try:
    for _ in range(300):
        threading.Thread(target=time.sleep, args=(3,), daemon=True).start(); count += 1
except RuntimeError:
    pass
print(count, file=open('/logs/verifier/reward.txt', 'w'))" """,
    "a fork bomb": ":(){ :|:& };: ; sleep 2; echo 0 > /logs/verifier/reward.txt",
}


@NO_WALL
@pytest.mark.parametrize("kind", COUNTED)
def test_a_program_has_so_many_processes_at_most(kind: str, tmp_path: Path) -> None:
    if not program.counted_apart() and program.groups() is None:
        pytest.skip("this machine has no way to limit processes")
    folder = folder_of(tmp_path, tests__test_sh=COUNTED[kind])
    (count,) = earned(folder, solve=False, open_=False, processes=100).values()
    assert count <= 100 and (kind == "a fork bomb" or count > 80)
    if place := program.groups():
        assert not [*place.glob(f"trireme-{os.getpid()}-*")]


@NO_WALL
def test_what_a_program_writes_outside_of_its_folders_is_limited(tmp_path: Path) -> None:
    each = "head -c 90000000 /dev/zero >"
    script = (
        f"{each} /tmp/x; {each} /x; {each} /dev/shm/x; touch /dev/x\n"
        "python3 -c \"import os; s = [os.stat(f).st_size for f in ('/tmp/x', '/x', '/dev/shm/x')]; "
        "print(max(s) / 2**20 + 100 * os.path.exists('/dev/x'), "
        "file=open('/logs/verifier/reward.txt', 'w'))\""
    )
    folder = folder_of(tmp_path, tests__test_sh=script)
    assert earned(folder, solve=False, open_=False, tmp_mb=8) == {"reward": 8.0}


WRITE = "for i in 1 2 3; do head -c 4000000 /dev/zero > $i; done; "


@MODES
@pytest.mark.parametrize("then", [f'echo 1 > {VERDICT}reward.txt"', "sleep 1000"])
def test_what_a_program_writes_in_its_folders_is_limited_in_all(
    then: str, open_: bool, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, tests__test_sh=WRITE + then)
    with pytest.raises(ProgramFailed, match=r"files of task task-0 take more than 8 MB: .*disk_mb"):
        earned(folder, solve=False, open_=open_, disk_mb=8)
    if then != "sleep 1000":
        assert earned(folder, solve=False, open_=open_, disk_mb=20) == {"reward": 1.0}


@MODES
def test_a_model_that_writes_too_much_has_failed(open_: bool, tmp_path: Path) -> None:
    """The rest of the rollout cannot undo it."""
    said = [call(f"{WRITE}rm 1"), call(f"cat 2 3 > 4; {WRITE}sleep 1000"), call("rm *"), "Done."]
    [failed] = play(folder_of(tmp_path), said, open_=open_, disk_mb=14).failures
    assert "task-0 take more than 14 MB: expected" in failed.message


@pytest.mark.parametrize("kind", ["files", "links"])
def test_a_task_with_too_much_in_all_is_refused(kind: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    big = folder / "environment" / "0"
    big.touch()
    os.truncate(big, 1 << 30)
    for name in range(1, 12):
        path = folder / "environment" / str(name)
        if kind == "files":
            path.touch()
            os.truncate(path, 1 << 30)
        else:
            path.symlink_to(big)
    said = r"task-0: its files have more than 10240 MB in all: expected .*workflow_args.disk_mb"
    with pytest.raises(ValueError, match=said):
        read_task(folder)
    assert read_task(folder, disk_mb=13_000)


def test_a_task_that_is_copied_too_often_is_refused(tmp_path: Path) -> None:
    lines = "".join(f"COPY words.txt /app/{i}\n" for i in range(9))
    folder = folder_of(tmp_path, environment__Dockerfile=f"FROM x\nWORKDIR /app\n{lines}")
    (folder / "environment" / "words.txt").write_bytes(bytes(400_000))
    with pytest.raises(ValueError, match=r"with COPY words.txt its files take more than 2 MB: exp"):
        TaskBox(read_task(folder), tmp_path / "box", sandbox=False, disk_mb=2)


@MODES
def test_a_program_has_so_many_files_open(open_: bool, tmp_path: Path) -> None:
    script = f'ulimit -n > {VERDICT}reward.txt"'
    folder = folder_of(tmp_path, tests__test_sh=script)
    assert earned(folder, solve=False, open_=open_, open_files=77) == {"reward": 77.0}


# What a damaged file of a task does: "text" is read and named, "copied" may hold anything.
TASK_FILES = (
    (r"task\.toml", "text"),
    (r"instruction\.md", "text"),
    (r"environment/Dockerfile", "text"),
    (r"environment/.*", "copied"),
    (r"tests/.*", "copied"),
    (r"solution/.*", "copied"),
)


def test_every_file_of_a_task_is_named_where_it_is_damaged(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "whole" / "train")
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        kinds = [kind for pattern, kind in TASK_FILES if re.fullmatch(pattern, name)]
        assert kinds, f"{name}: say in TASK_FILES what a damaged one does"
        for damage in DAMAGES:
            if damage in ("half of it", "empty", "a folder") or (
                kinds[0] == "copied" and damage in ("garbage", "deep JSON", "not ours to read")
            ):
                continue
            root = tmp_path / "job" / "tasks"
            shutil.rmtree(root.parent, ignore_errors=True)
            shutil.copytree(folder, root / "task-0")
            DAMAGES[damage](root / "task-0" / name)
            if name == "instruction.md" and damage in ("garbage", "not ours to read"):
                with pytest.raises(NoRows, match=name):
                    load_rows(str(root), None, "train")
            elif name != "instruction.md" or damage != "deep JSON":
                with pytest.raises(ValueError, match=f"task-0: .*{Path(name).name}") as error:
                    read_task(root / "task-0")
                assert len(str(error.value)) < 800
