"""Environments in worker processes: what they answer, and what becomes of those that misbehave."""

from __future__ import annotations

import asyncio
import os
import resource
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.limits import HANG_S
from tests.workflows.test_workflow import call
from trireme.ext.environments.pool import EnvError, EnvLost, EnvPool, shared_pool
from trireme.processes import began
from trireme.usercode import Refused
from trireme.workflows.episode import EpisodeWorkflow

FACTORY = "tests.ext.environments.fakes:make"


@pytest.fixture
def pool() -> Iterator[EnvPool]:
    made = EnvPool(FACTORY, workers=2, timeout_s=HANG_S, recycle_after=500)
    yield made
    made.close()


def test_an_episode(pool: EnvPool) -> None:
    async def main() -> None:
        async with pool.lend(start=1) as env:
            _, info = await env.reset()
            assert info == {"start": 1}
            assert await env.step("a") == ("a 2", 0.5, False, {"n": 2})
            assert await env.step("b") == ("b 3", 0.5, True, {"n": 3})

    asyncio.run(main())
    assert pool.counts == {"lent": 1, "ended": 1, "raised": 0, "hung": 0, "died": 0}


def test_one_key_lives_on_one_worker_and_others_beside_it(pool: EnvPool) -> None:
    lend = pool.lend_blocking
    with lend(key="a") as one, lend(key="a") as two, lend(key="b") as other:
        first = one.reset()[0]
        assert two.reset()[0] == first
        assert other.reset()[0] != first


def test_what_an_environment_raises_comes_out_with_its_traceback(pool: EnvPool) -> None:
    with pool.lend_blocking() as env:
        env.reset()
        with pytest.raises(EnvError, match="ValueError: no such door") as caught:
            env.step("raise")
        assert "fakes.py" in str(caught.value)
        assert env.step("a")[0] == "a 1"  # the worker is well
    with pool.lend_blocking(broken=True) as env, pytest.raises(EnvError, match="no game file"):
        env.reset()
    assert pool.counts["raised"] == 2 and pool.counts["ended"] == 0


def test_arrays_become_lists_and_what_is_no_json_fails_its_environment_alone(
    pool: EnvPool,
) -> None:
    with pool.lend_blocking(key="k") as env, pool.lend_blocking(key="k") as beside:
        assert env.reset() and beside.reset()
        assert env.step("array") == ("a grid", 0.5, True, {"mask": [1, 0, 1]})
        with pytest.raises(EnvError, match="TypeError: keys must be str"):
            env.step("keys")
        assert beside.step("a")[0] == "a 1"
    assert pool.counts["raised"] == pool.counts["ended"] == 1


def test_a_coroutine_is_not_shown_as_an_observation(pool: EnvPool) -> None:
    with (
        pool.lend_blocking(later=True) as env,
        pytest.raises(
            EnvError, match=r"TypeError: Later.reset is a coroutine, .*: expected a plain"
        ),
    ):
        env.reset()


def test_a_step_that_returns_nothing_is_refused_as_any_other(pool: EnvPool) -> None:
    class Forgets(EpisodeWorkflow):
        blocking_env = False

        def make_env(self) -> Any:
            return pool.lend()

    with pytest.raises(
        Refused, match=r"step of the environment of Forgets returned None: expected"
    ):
        call(Forgets, ["forget"])


def test_a_hung_worker_is_replaced_and_its_other_environments_are_lost() -> None:
    pool = EnvPool(FACTORY, workers=1, timeout_s=8)
    try:
        with pool.lend_blocking() as env, pool.lend_blocking() as beside:
            assert env.reset() and beside.reset()
            with pytest.raises(EnvLost, match=r"'step' of .* worker 0 did not return within 8 s"):
                env.step("hang")
            with pytest.raises(EnvLost, match="worker 0 is gone: 'step' of"):
                beside.step("a")
        with pool.lend_blocking() as env:
            env.reset()
            assert env.step("a")[0] == "a 1"
        assert pool.counts == {"lent": 3, "ended": 1, "raised": 0, "hung": 1, "died": 1}
    finally:
        pool.close()


def test_a_dead_worker_is_replaced(pool: EnvPool) -> None:
    with pool.lend_blocking(key="k") as env:
        pid = env.reset()[0]
        with pytest.raises(EnvLost, match=r"ended the worker \(exit code 7\)"):
            env.step("die")
        with pool.lend_blocking(key="k") as again:
            assert again.reset()[0] != pid
    assert pool.counts["died"] == 1 and pool.counts["ended"] == 1


def test_a_hung_worker_ends_with_the_processes_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CHILD", str(tmp_path / "child"))
    pool = EnvPool(FACTORY, workers=1, timeout_s=8)
    try:
        with pool.lend_blocking() as env:
            env.reset()
            with pytest.raises(EnvLost, match="did not return within 8 s"):
                env.step("start and hang")
        _ends(int((tmp_path / "child").read_text()))
    finally:
        pool.close()


@pytest.mark.parametrize("end", ["die", "close", "its input ends"])
def test_the_processes_of_a_worker_end_with_it(end: str) -> None:
    pool = EnvPool(FACTORY, workers=1, timeout_s=HANG_S)
    try:
        with pool.lend_blocking() as env:
            env.reset()
            child = int(env.step("start")[0])
            assert began(child)
            if end == "die":
                with pytest.raises(EnvLost):
                    env.step("die")
            elif end == "its input ends":
                process = pool._workers[0]._process
                assert process is not None and process.stdin is not None
                process.stdin.close()  # as where this process is killed
            else:
                pool.close()
        _ends(child)
    finally:
        pool.close()


def _ends(pid: int) -> None:
    deadline = time.monotonic() + HANG_S
    while began(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.01)


def test_a_worn_worker_is_replaced_when_it_is_empty() -> None:
    pool = EnvPool(FACTORY, workers=1, timeout_s=HANG_S, recycle_after=2)
    try:
        pids = []
        for _ in range(5):
            with pool.lend_blocking() as env:
                pids.append(env.reset()[0])
        assert pids[0] == pids[1] != pids[2] == pids[3] != pids[4]
    finally:
        pool.close()


def test_many_episodes_from_loops_and_threads_are_all_accounted_for(pool: EnvPool) -> None:
    async def episode(number: int) -> None:
        async with pool.lend(key=str(number % 3)) as env:
            await env.reset()
            if number % 5 == 0:
                with pytest.raises(EnvError):
                    await env.step("raise")
            else:
                assert (await env.step("a"))[0] == "a 1"

    async def several() -> None:
        await asyncio.gather(*(episode(n) for n in range(20)))

    threads = [threading.Thread(target=lambda: asyncio.run(several())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.counts == {"lent": 40, "ended": 32, "raised": 8, "hung": 0, "died": 0}


def test_a_cancelled_episode_gives_its_environment_back(pool: EnvPool) -> None:
    async def main() -> None:
        playing = asyncio.Event()

        async def plays() -> None:
            async with pool.lend() as env:
                await env.reset()
                playing.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(plays())
        await playing.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    assert pool.counts["lent"] == pool.counts["ended"] == 1


def test_a_worker_finds_the_modules_that_this_process_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    source = "from tests.ext.environments.fakes import make as make\n"
    (folder / "my_games_elsewhere.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", "")
    pool = EnvPool("my_games_elsewhere:make", workers=1, timeout_s=HANG_S)
    try:
        with pool.lend_blocking(start=2) as env:
            assert env.reset()[1] == {"start": 2}
    finally:
        pool.close()


def test_a_worker_answers_where_a_thousand_files_are_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1024):
            files.enter_context(open(os.devnull, "rb"))
        pool = EnvPool(FACTORY, workers=1, timeout_s=HANG_S)
        files.callback(pool.close)
        with pool.lend_blocking(start=1) as env:
            assert env.reset()[1] == {"start": 1}


def test_a_closed_pool_says_so() -> None:
    pool = EnvPool(FACTORY, workers=1)
    pool.close()
    with pool.lend_blocking() as env, pytest.raises(EnvLost, match="closed"):
        env.reset()


def test_episodes_that_begin_at_once_share_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Slow(EnvPool):
        def __init__(self, factory: str, **options: float) -> None:
            time.sleep(0.05)
            made.append(factory)

    monkeypatch.setattr("trireme.ext.environments.pool.EnvPool", Slow)
    monkeypatch.setattr("atexit.register", lambda close: None)
    with ThreadPoolExecutor(8) as threads:
        pools = set(threads.map(lambda _: shared_pool("made:at_once"), range(8)))
    assert len(pools) == len(made) == 1
    assert {shared_pool("made:at_once", workers=2, timeout_s=60)} == pools
