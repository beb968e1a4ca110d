"""Signals: a run that is told to end saves, says what it did, and ends with the signal's code."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.job import Forked, run, small_config, started, wait_for, weights
from tests.e2e.test_two_commands import Pair, check, pair  # noqa: F401 - the fixture

JOB = "checkpoints/tests/job"
"""For what takes seconds on a quiet machine."""
PLUGIN = '''
"""A workflow whose first call of the third explore step lasts; another that cannot be cancelled."""
import asyncio, time
from pathlib import Path
from trireme import workflow


@workflow("waits")
async def waits(task, model):
    flag = Path("third_step")
    if task.batch_id == 3 and not flag.exists():
        flag.touch()
        await asyncio.sleep(600)
    reply = await model.chat([{"role": "user", "content": task.prompt}])
    return model.experiences(reward=(sum(map(ord, reply.text)) % 17) / 16)


@workflow("clings")
async def clings(task, model):
    Path("clinging").touch()
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass


@workflow("blocks")
async def blocks(task, model):
    Path("blocking").touch()
    time.sleep(600)
'''


def job(folder: Path, workflow: str = "waits", **sections: dict[str, Any]) -> dict[str, Any]:
    """The small job without evaluations, with a workflow of the plug-in."""
    config = small_config(folder)
    (folder / "plugin.py").write_text(PLUGIN)
    config["plugins"] = [str(folder / "plugin.py")]
    config["buffer"]["explorer_input"] |= {"default_workflow_type": workflow, "eval_tasksets": []}
    config["explorer"] |= {"eval_on_startup": False}
    config["trainer"] = {"save_interval": 100}
    for name, values in sections.items():
        config[name] = config.get(name, {}) | values
    return config


def told(process: Forked, *numbers: int) -> tuple[int, str]:
    """Its exit code and what it says, once it got the signals."""
    for number in numbers:
        process.send_signal(number)
        if len(numbers) > 1 and number == numbers[0]:  # two at once are one
            wait_for(lambda: "at the next safe point" in process.said(), process)
    _, errors = process.communicate()
    return process.wait(), errors


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of a run that nobody interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    config = job(folder)
    (folder / "third_step").touch()
    done = run(folder, config)
    assert done.returncode == 0, done.stderr
    return weights(folder / JOB, 4)


@pytest.mark.parametrize(
    ("number", "code", "storage"),
    [(signal.SIGTERM, 143, "queue"), (signal.SIGHUP, 129, "sql"), (signal.SIGINT, 130, "queue")],
)
def test_a_signal_saves_what_was_learned_and_the_same_command_ends_with_equal_weights(
    tmp_path: Path, whole: bytes, number: int, code: int, storage: str
) -> None:
    config = job(tmp_path)
    config["buffer"]["trainer_input"] = {
        "experience_buffer": {"storage_type": storage, "name": "b"}
    }
    process = started(tmp_path, config)
    wait_for((tmp_path / "third_step").exists, process)
    returned, said = told(process, number)
    assert returned == code, said
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    last = said.splitlines()[-1]
    assert last == (
        f"stopped by {name}: the checkpoint of step 2 is saved; the same command resumes from it"
    ), said
    assert (tmp_path / JOB / "global_step_2/manifest.json").exists()
    done = run(tmp_path, config)
    assert done.returncode == 0, done.stderr
    assert weights(tmp_path / JOB, 4) == whole


def test_the_words_are_true_where_the_same_command_begins_anew(tmp_path: Path) -> None:
    config = job(tmp_path) | {"continue_from_checkpoint": False}
    process = started(tmp_path, config)
    wait_for((tmp_path / "third_step").exists, process)
    code, said = told(process, signal.SIGTERM)
    assert code == 143 and "starts over (continue_from_checkpoint: false)" in said
    done = run(tmp_path, config, "name=job", "continue_from_checkpoint=true")
    assert "resuming from" in done.stdout and done.returncode == 0


def test_before_the_first_train_step_there_is_nothing_to_save(tmp_path: Path) -> None:
    process = started(tmp_path, job(tmp_path, "clings"))
    wait_for((tmp_path / "clinging").exists, process)
    code, said = told(process, signal.SIGTERM)
    assert code == 143 and said.splitlines()[-1].endswith("the same command starts over"), said


@pytest.mark.parametrize("numbers", [(signal.SIGTERM,), (signal.SIGINT, signal.SIGINT)])
def test_a_loop_that_user_code_blocks_ends_by_the_time_limit_or_a_second_control_c(
    tmp_path: Path, numbers: tuple[int, ...]
) -> None:
    process = started(tmp_path, job(tmp_path, "blocks", cluster={"stop_timeout": 5}))
    wait_for((tmp_path / "blocking").exists, process)
    code, said = told(process, *numbers)
    assert code == 128 + numbers[0], said
    if len(numbers) == 1:
        assert "ended after 5 s (cluster.stop_timeout)" in said
        assert "plugin.py" in said.splitlines()[-1], said
    else:
        assert "ended at once by a second Ctrl-C" in said


def test_a_coroutine_that_ignores_its_cancellation_does_not_keep_a_run_from_ending(
    tmp_path: Path,
) -> None:
    config = job(tmp_path, "clings", explorer={"max_timeout": 1, "max_retry_times": 0})
    done = run(tmp_path, config)
    assert done.returncode == 1, done.stderr
    assert "took longer than explorer.max_timeout" in done.stderr
    assert "plugin.py" in done.stderr and "ignores its cancellation" in done.stderr


def test_two_commands_that_are_told_to_end_go_on_where_they_were(pair: Pair) -> None:  # noqa: F811
    for mode, ready in (
        ("train", (pair.job / "global_step_1").exists),
        ("explore", lambda: pair.explored() >= 2),
    ):
        process = pair.running[mode]
        wait_for(ready, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait() in (143, 0), process.said()
        pair.start(mode)
    pair.finish()
    check(pair)


@pytest.mark.extension("provenance")
def test_a_run_that_left_no_checkpoint_says_that_it_begins_again(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    started(tmp_path, config).kill_when(tmp_path / "checkpoints/tests/job/run/starts.json")
    done = run(tmp_path, config)
    assert "the last start left no checkpoint: the run begins at step 1 again" in done.stdout
    assert done.returncode == 0, done.stderr
    assert "left no checkpoint" not in run(tmp_path, config, "buffer.total_steps=5").stdout
