"""SqlBuffer between processes: two commands on one database."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, MetaData, event, text

from tests.buffer.samples import JumpingClock, run, sample, sql_buffer, step_of, uids
from tests.limits import HANG_S
from tests.postgres import PASSWORD, Server
from trireme.buffer.buffer import Closed
from trireme.buffer.table import open_database
from trireme.experience import Experience
from trireme.ext.sql.buffer import SqlBuffer
from trireme.ext.sql.claims import Reuse


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'b.db'}"
    return request.getfixturevalue("postgres").database()


def open_as(role: Any, url: str, party: str | None = None, **options: Any) -> SqlBuffer:
    return sql_buffer("experiences", url, role=role, party=party, **options)


def test_two_readers_never_share_an_experience(url: str) -> None:
    async def main() -> None:
        explorer = open_as("explore", url)
        readers = [open_as("train", url, f"trainer_{i}") for i in range(2)]
        takes = [asyncio.create_task(reader.take(2)) for _ in range(4) for reader in readers]
        for batch in range(4):
            await explorer.put(step_of(batch))
        taken = [uid for found in await asyncio.gather(*takes) for uid in uids(found)]
        assert sorted(taken) == sorted(uid for b in range(4) for uid in uids(step_of(b)))

    run(main())


def test_a_full_disk_is_one_sentence_with_the_buffer(tmp_path: Path) -> None:
    async def main() -> None:
        buffer = sql_buffer("experiences", f"sqlite:///{tmp_path}/b.db")

        def fill(connection: Connection) -> None:
            connection.exec_driver_sql("PRAGMA max_page_count = 20")

        event.listen(buffer._database, "begin", fill)
        large = replace(sample(1, 0, 0), prompt_text="long " * 20_000)
        says = f"^buffer 'experiences': its database '.*{tmp_path}/b.db' .*: database or disk is f"
        with pytest.raises(OSError, match=says):
            await buffer.put([large])

    run(main())


def test_the_end_of_the_explorer_is_seen_by_a_trainer_that_starts_later(url: str) -> None:
    async def main() -> None:
        explorer = open_as("explore", url)
        await explorer.put(step_of(1))
        await explorer.close()
        trainer = open_as("train", url)
        assert len(await trainer.take(100)) == 4
        with pytest.raises(Closed):
            await trainer.take(1)

    run(main())


def test_the_end_of_the_trainer_is_seen_by_the_explorer(url: str) -> None:
    async def main() -> None:
        explorer, trainer = open_as("explore", url), open_as("train", url)
        await trainer.close()
        with pytest.raises(Closed):
            await explorer.put(step_of(1))
        open_as("train", url)  # it comes back
        await explorer.put(step_of(1))

    run(main())


def test_an_explorer_sees_that_its_trainer_waits_for_more_than_there_is(url: str) -> None:
    async def main() -> None:
        explorer, trainer = open_as("explore", url), open_as("train", url)
        await explorer.put(step_of(1))
        take = asyncio.create_task(trainer.take(8))
        while not trainer.demand.unmet:
            await asyncio.sleep(0.001)
        assert await explorer.starves()
        await explorer.put(step_of(2))
        assert not await explorer.starves()
        assert len(await take) == 8 and not await explorer.starves()

    run(main())


@pytest.mark.parametrize("failed", ["", "trainer", "another explorer"])
def test_an_explorer_that_starts_first_waits_for_its_own_trainer(url: str, failed: str) -> None:
    """The end of the last attempt's is no end of this one."""

    async def main() -> None:
        other, last = open_as("explore", url, "other"), open_as("train", url)
        await (last.fail(ValueError("no memory")) if failed == "trainer" else last.close())
        if failed == "another explorer":
            await other.fail(ValueError("no tasks"))
        explorer = open_as("explore", url, capacity=1, max_read_timeout=0.3)
        await explorer.put(step_of(1))
        with pytest.raises(TimeoutError, match="no command with mode: train uses this buffer"):
            await explorer.put(step_of(2))
        trainer = open_as("train", url)
        assert uids(await trainer.take(4)) == uids(step_of(1))
        trainer.commit()
        await explorer.put(step_of(2))
        await (trainer.fail(ValueError("why")) if failed else trainer.close())
        with pytest.raises(RuntimeError if failed else Closed, match="why" if failed else "closed"):
            await explorer.put(step_of(3))

    run(main())


def test_the_last_of_several_explorers_ends_the_stream(url: str) -> None:
    async def main() -> None:
        one, two = open_as("explore", url, "one"), open_as("explore", url, "two")
        trainer = open_as("train", url)
        await one.close()
        taking = asyncio.create_task(trainer.take(8))
        await asyncio.sleep(0.1)
        assert not taking.done()
        await two.put(step_of(1))
        await two.close()
        assert uids(await taking) == uids(step_of(1))

    run(main())


def test_a_step_that_an_explorer_repeats_after_a_crash_is_not_doubled(url: str) -> None:
    async def main() -> None:
        first = open_as("explore", url)
        await first.put(step_of(1))
        again = open_as("explore", url)
        await again.put(step_of(1, tasks=3))
        trainer = open_as("train", url)
        assert len(trainer) == 6
        assert len(set(uids(await trainer.take(6)))) == 6

    run(main())


def test_a_whole_run_without_a_checkpoint_leaves_out_what_its_last_attempt_put(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    def rewarded(reward: float) -> list[Experience]:
        experiences = step_of(1)
        for experience in experiences:
            experience.reward = reward
        return experiences

    async def main() -> list[float | None]:
        first = open_as("both", url)
        await first.put(rewarded(1.0))
        await first.put(step_of(2))
        await first.take(2)
        first.dispose()
        again = open_as("both", url)
        taking = asyncio.create_task(again.take(4))
        await asyncio.sleep(0.1)  # it finds no rows before the put
        await again.put(rewarded(2.0))
        return [e.reward for e in await taking]

    assert run(main()) == [2.0] * 4
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_a_whole_run_does_not_begin_with_groups_that_were_trained(url: str) -> None:
    """They are another run's, or of a checkpoint that somebody has removed."""

    async def main() -> None:
        first = open_as("both", url)
        await first.put(step_of(1, tasks=2))
        await first.take(2)
        state = first.state()
        first.commit()
        first.dispose()
        again = open_as("both", url)
        with pytest.raises(ValueError, match=r"1 groups of the first step .* been trained"):
            await again.put(step_of(1, tasks=2))
        again.dispose()
        continued = open_as("both", url)
        continued.load_state(state)
        await continued.put(step_of(1, tasks=2))
        assert len(continued) == 2

    run(main())


def test_groups_of_another_run_that_replay_may_use_again_are_trained_with_a_warning(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        reuse = Reuse(cooldown=0.0, use_count_limit=2)
        first = open_as("both", url, reuse=reuse)
        await first.put(step_of(1))
        await first.take(4)
        first.commit()
        first.dispose()
        again = open_as("both", url, reuse=reuse)
        await again.put(step_of(1))
        assert len(await again.take(4)) == 4

    run(main())
    assert caplog.text.count("of another run") == 1


def test_a_trainer_killed_between_checkpoint_and_commit_learns_nothing_twice(
    url: str,
) -> None:
    async def main() -> None:
        explorer = open_as("explore", url)
        await explorer.put(step_of(1))
        trainer = open_as("train", url)
        await trainer.take(3)
        state = trainer.state()  # the checkpoint has it, and then the process dies
        again = open_as("train", url)
        again.load_state(state)
        assert uids(await again.take(1)) == uids(step_of(1))[3:]

    run(main())


def test_a_trainer_killed_before_its_first_checkpoint_gets_all_again(url: str) -> None:
    async def main() -> None:
        explorer = open_as("explore", url)
        await explorer.put(step_of(1))
        await open_as("train", url).take(3)
        assert uids(await open_as("train", url).take(4)) == uids(step_of(1))

    run(main())


def test_another_process_feeds_this_one(url: str) -> None:
    code = (
        "import asyncio, sys\n"
        "from tests.ext.sql.test_sql import open_as\n"
        "from tests.buffer.samples import step_of\n"
        "async def main():\n"
        "    buffer = open_as('explore', sys.argv[1])\n"
        "    for batch in range(3): await buffer.put(step_of(batch))\n"
        "    await buffer.close()\n"
        "asyncio.run(main())\n"
    )

    async def main() -> None:
        trainer = open_as("train", url)
        with subprocess.Popen([sys.executable, "-c", code, url]) as process:
            taken = await trainer.take(12)
        assert process.returncode == 0
        assert uids(taken) == [uid for b in range(3) for uid in uids(step_of(b))]

    run(main())


def without(url: str, column: str) -> None:
    """Make the table of `experiences` what a version was that did not know a column."""
    engine = open_database(url, MetaData())
    with engine.begin() as connection:
        connection.execute(text("DROP INDEX ix_experiences_open"))
        connection.execute(text(f"ALTER TABLE experiences DROP COLUMN {column}"))
    engine.dispose()


def test_a_store_of_an_earlier_version_is_gone_on_from(url: str) -> None:
    async def main() -> None:
        first = open_as("both", url)
        await first.put(step_of(1))
        await first.take(2)
        state = first.state()
        first.commit()
        first.dispose()
        without(url, "consumed_by")
        again = open_as("both", url)
        again.load_state(state)
        assert uids(await again.take(2)) == uids(step_of(1))[2:]
        again.commit()
        again.load_state(state)  # a fall-back, for which the column is there
        assert uids(await again.take(2)) == uids(step_of(1))[2:]

    run(main())


@pytest.mark.parametrize("earlier", [False, True])
def test_a_checkpoint_does_not_read_the_rows_of_the_whole_run(
    tmp_path: Path, earlier: bool
) -> None:
    url = f"sqlite:///{tmp_path / 'b.db'}"
    open_as("train", url).dispose()
    if earlier:  # an earlier version made fewer indexes
        database = open_database(url, MetaData())
        with database.begin() as connection:
            for column in ("claimed_by", "sealed"):
                connection.execute(text(f"DROP INDEX IF EXISTS ix_experiences_{column}"))
        database.dispose()
    trainer, plans = open_as("train", url), list[str]()
    trainer._next_seal()  # the first one looks for this reader's earlier seals, once in a run

    def explain(_connection: Any, cursor: Any, statement: str, values: Any, *_: Any) -> None:
        if "FROM experiences " in f"{statement} " or "UPDATE experiences " in statement:
            steps = cursor.execute(f"EXPLAIN QUERY PLAN {statement}", values).fetchall()
            plans.extend(step[3] for step in steps)

    event.listen(trainer._database, "before_cursor_execute", explain)
    trainer.state()
    trainer.commit()
    assert plans and not [plan for plan in plans if plan.startswith("SCAN experiences")]


def test_a_table_of_another_program_is_refused_in_a_sentence(url: str) -> None:
    open_as("both", url).dispose()
    without(url, "batch")
    with pytest.raises(ValueError, match=r"has a table 'experiences' without 'batch': another"):
        open_as("both", url)


@pytest.mark.parametrize("url", ["sqlit:///b.db", "mysqll://me:secret@host/b", "no url"])
def test_a_database_of_an_unknown_kind_is_named(url: str) -> None:
    told = "is of a kind that is not known here: expected a file, sqlite:///"
    with pytest.raises(ValueError, match=told) as error:
        SqlBuffer("b", url)
    assert "secret" not in str(error.value)


def test_a_folder_that_cannot_hold_the_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "b.db").mkdir()
    with pytest.raises(ValueError, match=r"database 'sqlite:.*b\.db' cannot be used"):
        open_as("both", f"sqlite:///{tmp_path / 'b.db'}")


def test_a_group_larger_than_a_statement_s_parameters_goes_in_and_out(url: str) -> None:
    async def main() -> None:
        buffer = open_as("both", url)
        many = [sample(1, task, 0) for task in range(1200)]
        await buffer.put(many)
        assert uids(await buffer.take(1200)) == uids(many)
        buffer.commit()

    run(main())


def test_what_a_silent_reader_took_returns_and_is_not_learned_from_twice(url: str) -> None:
    async def main() -> None:
        explorer = open_as("explore", url)
        await explorer.put(step_of(1))
        frozen = open_as("train", url, "frozen", lease_time=0.2)
        await frozen.take(2)
        frozen._heartbeat.stop()
        other = open_as("train", url, "other", lease_time=0.2)
        assert uids(await other.take(4)) == uids(step_of(1))  # waits for the lease
        with pytest.raises(RuntimeError, match=r"'frozen' sent no heartbeat.*2 of the 2"):
            frozen.state()
        other.commit()

    run(main())


def test_a_reader_that_is_alive_keeps_what_it_took_past_its_lease(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trireme.ext.sql.buffer.BEATS", 300)  # one every 0.2 s

    async def main() -> None:
        explorer = open_as("explore", url)
        await explorer.put(step_of(1))
        slow = open_as("train", url, "slow", lease_time=60.0)
        await slow.take(3)
        other = open_as("train", url, "other", lease_time=60.0)
        lease_ends(url, "slow")
        while silent_readers(other):
            await asyncio.sleep(0.01)
        assert uids(await other.take(1)) == uids(step_of(1))[3:]
        slow.commit()

    run(main())


def lease_ends(url: str, reader: str) -> None:
    """Let a reader's last heartbeat be long ago."""
    engine = open_database(url, MetaData())
    with engine.begin() as connection:
        words = "UPDATE experiences_parties SET seen = seen - 1000 WHERE name = :name"
        assert connection.execute(text(words), {"name": reader}).rowcount == 1
    engine.dispose()


def silent_readers(buffer: SqlBuffer) -> dict[str, float]:
    with buffer._database.begin() as connection:
        return buffer._parties.silent(connection, "train")


def test_what_a_checkpoint_sealed_waits_for_its_reader(url: str) -> None:
    """Only that reader knows whether the checkpoint was written whole."""

    async def main(written: bool) -> list[str]:
        explorer = open_as("explore", url)
        await explorer.put(step_of(int(written)))
        reader = open_as("train", url, "reader", lease_time=0.1)
        before = reader.state()
        reader.commit()
        await reader.take(3)
        state = reader.state()  # and here it dies
        reader._heartbeat.stop()
        other = open_as("train", url, "other", lease_time=0.1)
        await asyncio.sleep(0.3)
        await other.take(1)
        assert len(other) == 0
        other.commit()
        again = open_as("train", url, "reader")
        again.load_state(state if written else before)
        return [] if written else uids(await again.take(3))

    assert run(main(True)) == []
    assert run(main(False)) == uids(step_of(0))[:3]


def test_two_processes_of_one_name_do_not_both_go_on(url: str) -> None:
    async def main() -> None:
        first = open_as("explore", url)
        open_as("explore", url)
        with pytest.raises(
            RuntimeError, match=r"uses it under the name 'default'.*names of their own"
        ):
            await first.put(step_of(1))

    run(main())


def test_a_trainer_whose_name_another_process_has_taken_does_not_seal_what_that_one_holds(
    url: str,
) -> None:
    async def main() -> None:
        explorer = open_as("explore", url)
        await explorer.put(step_of(1))
        first = open_as("train", url)
        await first.take(2)
        second = open_as("train", url)
        assert uids(await second.take(2)) == uids(step_of(1))[:2]
        with pytest.raises(
            RuntimeError, match=r"uses it under the name 'default'.*names of their own"
        ):
            first.commit()
        second.commit()

    run(main())


def test_an_explorer_that_went_without_a_word_is_named(url: str) -> None:
    async def main() -> None:
        gone = open_as("explore", url, "explorer_7", lease_time=0.1)
        gone._heartbeat.stop()
        trainer = open_as("train", url, lease_time=0.1, max_read_timeout=0.5)
        with pytest.raises(TimeoutError, match=r"no heartbeat from: explorer_7 for \d s"):
            await trainer.take(1)

    run(main())


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_an_explorer_supplies_no_trainer_that_is_gone(url: str, how: str) -> None:
    """It would not wait for the weights of another, nor for room."""
    clock = JumpingClock()

    async def main() -> None:
        explorer = open_as("explore", url, clock=clock, lease_time=60)
        other = open_as("train", url, "other", lease_time=60)  # its next heartbeat is in 15 s
        take = asyncio.create_task(other.take(64))
        while not await explorer.starves():
            await asyncio.sleep(0.001)
        clock.time += 59  # it may be slow
        assert await explorer.starves()
        take.cancel()
        with pytest.raises(asyncio.CancelledError):
            await take
        if how == "killed":
            other._transact(lambda connection: other._parties.want(connection, 64))
            clock.time += 2
        assert not await explorer.starves()

    run(main())


@pytest.mark.parametrize("clock", [0.0, 3600.0, -3600.0])
def test_a_trainer_is_gone_once_its_heartbeats_stop_whatever_its_machines_clock_says(
    tmp_path: Path, clock: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two machines on one SQLite file, or one whose clock was set."""
    hands = JumpingClock()

    async def main() -> None:
        url = f"sqlite:///{tmp_path / 'b.db'}"
        explorer = open_as("explore", url, clock=hands, lease_time=60)
        assert "no command with mode: train" in await explorer.without_reader()
        there = time.time
        with monkeypatch.context() as patch:
            patch.setattr("trireme.buffer.table.time.time", lambda: there() + clock)
            trainer = open_as("train", url, lease_time=0.2)
            for hands.time in range(0, 600, 20):
                assert not await explorer.without_reader()
                await asyncio.sleep(0.1)  # two heartbeats
            trainer._heartbeat.stop()
            await asyncio.sleep(0.1)
        assert not await explorer.without_reader()
        hands.time += 61
        assert "; no heartbeat from: default for " in await explorer.without_reader()
        open_as("train", url)
        assert not await explorer.without_reader(), "it was started again"

    run(main())


def test_a_server_that_cuts_its_connections_costs_nothing(postgres: Server) -> None:
    async def main(url: str) -> None:
        explorer, trainer = open_as("explore", url), open_as("train", url)
        for batch in range(6):
            await explorer.put(step_of(batch))
            postgres.end_connections()
            assert uids(await trainer.take(4)) == uids(step_of(batch))
            postgres.end_connections()
            trainer.state()
            trainer.commit()
        assert len(trainer) == 0

    run(main(postgres.database()))


def test_a_server_that_is_away_is_waited_for(
    postgres: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """While something is put, while something is taken, and while a checkpoint is made."""

    async def while_away(work: Coroutine[Any, Any, Any]) -> Any:
        with postgres.away():
            task = asyncio.create_task(work)
            await asyncio.sleep(0.5)
            assert not task.done()
        return await task

    async def main(url: str) -> None:
        explorer, trainer = open_as("explore", url), open_as("train", url)
        await while_away(explorer.put(step_of(1)))
        assert uids(await while_away(trainer.take(4))) == uids(step_of(1))
        await while_away(asyncio.to_thread(trainer.commit))
        assert len(trainer) == 0

    run(main(postgres.database()))
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    away = [text for text in told if "is unreachable, waiting for it for 1800 s at most" in text]
    assert (
        len(away) == len([text for text in told if "its database is reachable again" in text]) == 3
    )
    assert not any(PASSWORD in text for text in told)


def test_a_server_that_stays_away_ends_the_wait_with_its_name(postgres: Server) -> None:
    async def main(url: str) -> None:
        trainer = open_as("train", url, max_read_timeout=0.3, max_retry_interval=0.1)
        said = r"database 'postgresql.* was unreachable for 0.3 s"
        with postgres.away(), pytest.raises(TimeoutError, match=said):
            await trainer.take(1)
        trainer = open_as("train", url)  # which waits for half an hour
        with postgres.away():
            await asyncio.wait_for(trainer.fail(ValueError("another cause")), HANG_S)

    run(main(postgres.database()))


def test_a_take_that_is_cancelled_waits_for_no_server(postgres: Server) -> None:
    async def main(url: str) -> None:
        explorer, trainer = open_as("explore", url), open_as("train", url)
        with postgres.away():
            taking = asyncio.create_task(trainer.take(4))
            await asyncio.sleep(0.3)
            taking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(taking, HANG_S)
        await explorer.put(step_of(1))
        assert uids(await trainer.take(4)) == uids(step_of(1))

    run(main(postgres.database()))


def test_a_server_that_does_not_answer_is_named_without_its_password() -> None:
    url = "postgresql://me:geheim@127.0.0.1:1/none"
    with pytest.raises(
        ValueError, match=r"me:\*\*\*@127\.0\.0\.1:1/none' cannot be used"
    ) as caught:
        open_as("both", url, max_retry_times=1, max_retry_interval=0.01)
    assert "geheim" not in str(caught.value)


def test_replay_in_a_database_gives_the_newest_first_and_again_after_its_rest(url: str) -> None:
    async def main() -> None:
        reuse = Reuse(decay=2.0, use_count_limit=2, cooldown=0.3)
        buffer = open_as("both", url, reuse=reuse)
        await buffer.put([sample(4, 0, 0)])
        await buffer.put([sample(5, 0, 0)])
        assert [e.eid.batch for e in await buffer.take(1)] == [5]
        again = await buffer.take(2)  # waits for the rest; 5 - 2 * 1 is less than 4
        assert [e.eid.batch for e in again] == [4, 5]
        assert [e.info["use_count"] for e in again] == [1, 2]
        buffer.commit()
        assert [e.info["use_count"] for e in await buffer.take(1)] == [2]
        assert len(buffer) == 0

    run(main())


def test_a_group_in_a_database_that_is_too_old_for_a_take_never_comes_back(url: str) -> None:
    async def main() -> None:
        options = {"reuse": Reuse(decay=0.0, cooldown=0.05), "max_read_timeout": 0.5}
        buffer = open_as("both", url, **options)
        await buffer.put(step_of(5, tasks=1))
        await buffer.put(step_of(1, tasks=1))
        state = buffer.state()
        assert len(await buffer.take(4)) == 4
        await asyncio.sleep(0.1)
        taken = await buffer.take(2, oldest=5)
        assert [e.eid.batch for e in taken] == [5, 5]
        await asyncio.sleep(0.1)
        with pytest.raises(TimeoutError, match="4 experiences of version 5 or later of buffer 'ex"):
            await buffer.take(4, oldest=5)  # meets the older ones
        buffer.commit()
        assert [e.eid.batch for e in await buffer.take(2)] == [5, 5]
        again = open_as("both", url, **options)
        again.load_state(state)  # of a time at which they were young enough
        assert len(await again.take(4)) == 4

    run(main())


def test_replay_in_a_database_drops_the_lowest_priority(url: str) -> None:
    async def main() -> None:
        buffer = open_as("both", url, reuse=Reuse(), capacity=2)
        for version in (2, 3, 1, 4):
            await buffer.put([sample(version, 0, run) for run in range(2)])
        assert buffer.metrics() == {"buffer/dropped": 2.0}
        assert [e.eid.batch for e in await buffer.take(4)] == [4, 4, 3, 3]
        await buffer.close()
        with pytest.raises(Closed):
            await buffer.take(1)

    run(main())


@pytest.mark.parametrize("limit", [1, 2])
def test_groups_that_are_used_up_take_no_room_in_replay(url: str, limit: int) -> None:
    async def main() -> None:
        reuse = Reuse(decay=0.0, use_count_limit=limit, cooldown=None if limit == 1 else 0.0)
        buffer = open_as("both", url, reuse=reuse, capacity=2)
        await buffer.put([sample(9, 0, run) for run in range(2)])
        for _ in range(limit):
            assert [e.eid.batch for e in await buffer.take(2)] == [9, 9]
            buffer.commit()
        for version in (2, 3):
            await buffer.put([sample(version, 0, run) for run in range(2)])
        assert buffer.metrics() == {"buffer/dropped": 0.0}
        assert [e.eid.batch for e in await buffer.take(4)] == [3, 3, 2, 2]

    run(main())


def test_replay_in_a_database_takes_back_every_use_after_the_checkpoint_of_a_resume(
    url: str,
) -> None:
    async def main() -> None:
        reuse = Reuse(decay=0.0, use_count_limit=5, cooldown=0.0)
        buffer = open_as("train", url, reuse=reuse)
        await open_as("explore", url).put([sample(9, 0, 0)])
        states = []
        for uses in (1, 2, 1):  # in each of three checkpoints
            for _ in range(uses):
                await buffer.take(1)
            states.append(buffer.state())
            buffer.commit()
        again = open_as("train", url, reuse=reuse, max_read_timeout=0.5)
        for state, left in ((states[1], [4, 5]), (states[0], [2, 3, 4, 5])):
            again.load_state(state)
            counts = [(await again.take(1))[0].info["use_count"] for _ in left]
            assert counts == left and len(again) == 0
            again.state()
            again.commit()  # and go back behind this as well

    run(main())


def test_replay_in_a_database_takes_back_drops_after_the_checkpoint_of_a_resume(url: str) -> None:
    async def main() -> None:
        reuse = Reuse(decay=0.0, use_count_limit=3, cooldown=0.0)
        buffer = open_as("both", url, reuse=reuse, capacity=2)
        await buffer.put(step_of(1, tasks=1))
        await buffer.put(step_of(2, tasks=1))
        await buffer.put(step_of(3, tasks=1))  # drops step 1 before the checkpoint
        assert [e.eid.batch for e in await buffer.take(2)] == [3, 3]
        state = buffer.state()
        buffer.commit()

        async def go_on(buffer: SqlBuffer) -> list[tuple[Any, int]]:
            await buffer.put(step_of(4, tasks=1))  # drops step 2, which was never used
            await buffer.take(2)
            buffer.commit()
            await buffer.put(step_of(5, tasks=1))  # drops step 3, which was used once
            return [(e.eid.batch, e.info["use_count"]) for e in await buffer.take(4)]

        first = await go_on(buffer)
        for _ in range(2):
            again = open_as("both", url, reuse=reuse, capacity=2)
            again.load_state(state)
            assert len(again) == 4  # steps 2 and 3
            assert await go_on(again) == first

    run(main())


@pytest.mark.parametrize("there", [False, True])
def test_a_side_that_nobody_started_is_said_long_before_the_time_out(
    url: str, there: bool, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = open_as("train", url, "t", clock=JumpingClock(), max_read_timeout=60.0)
    if there:
        open_as("explore", url, "e")
    with pytest.raises(TimeoutError, match="no new one came for 60 s"):
        run(trainer.take(1))
    sentence = "waiting on buffer 'experiences'; no command with mode: explore uses this buffer"
    assert caplog.text.count(sentence) == int(not there)


def damage(url: str, *eids: str) -> None:
    """Flip a bit in the middle of what is stored of these experiences."""
    with open_database(url, MetaData()).begin() as connection:
        for eid in eids:
            query = text("SELECT experience_bytes FROM experiences WHERE msg_id = :eid")
            data = bytearray(connection.scalar(query, {"eid": eid}))
            data[-20] ^= 1
            update = text("UPDATE experiences SET experience_bytes = :data WHERE msg_id = :eid")
            connection.execute(update, {"data": bytes(data), "eid": eid})


def test_a_damaged_row_ends_a_take_in_a_sentence_and_nothing_is_claimed(url: str) -> None:
    async def main() -> None:
        buffer = open_as("both", url)
        await buffer.put(step_of(1))
        damage(url, "1/1/0/0")
        sentence = r"row 3 of table experiences in '.+' is damaged \(error: .+\): expected it as it"
        with pytest.raises(ValueError, match=sentence):
            await buffer.take(4)
        assert len(buffer) == 4
        assert uids(await buffer.take(2)) == ["1/0/0/0", "1/0/1/0"]  # before it all is well

    run(main())


def test_damaged_rows_that_may_be_left_out_are_counted_and_others_fill_the_batch(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        buffer = open_as("both", url, on_error="skip")
        await buffer.put(step_of(1))
        damage(url, "1/0/0/0", "1/1/1/0")
        take = asyncio.create_task(buffer.take(3))
        await asyncio.sleep(0.3)
        assert not take.done()  # two are left, and the third has to be waited for
        await buffer.put(step_of(2, tasks=1, runs=1))
        assert uids(await take) == ["1/0/1/0", "1/1/0/0", "2/0/0/0"]
        assert buffer.metrics() == {"buffer/damaged": 2.0}
        await buffer.put(step_of(1))  # is there already, and is not put again
        assert len(buffer) == 0

    run(main())
    said = [r.getMessage() for r in caplog.records if "damaged" in r.getMessage()]
    assert ["row 1 of" in said[0], "row 4 of" in said[1], len(said)] == [True, True, 2]
    assert said[1].endswith("and left out: 2 so far")


def test_what_is_damaged_stays_out_after_a_resume_and_the_others_are_taken_once(url: str) -> None:
    async def main() -> None:
        killed = open_as("train", url, on_error="skip")
        explorer = open_as("explore", url)
        await explorer.put(step_of(1))
        await explorer.put(step_of(2))
        assert len(await killed.take(2)) == 2
        state = killed.state()
        killed.commit()
        damage(url, "1/1/0/0")
        assert uids(await killed.take(2)) == ["1/1/1/0", "2/0/0/0"]

        again = open_as("train", url, on_error="skip")
        again.load_state(state)
        await explorer.close()
        taken = uids(await again.take(4)) + uids(await again.take(4))
        assert taken == ["1/1/1/0", "2/0/0/0", "2/0/1/0", "2/1/0/0", "2/1/1/0"]
        again.commit()
        with pytest.raises(Closed):
            await again.take(1)

    run(main())


def test_a_whole_run_that_is_resumed_makes_a_damaged_row_anew(url: str) -> None:
    async def main() -> None:
        buffer = open_as("both", url, on_error="skip")
        await buffer.put(step_of(1, tasks=1))
        assert len(await buffer.take(2)) == 2
        state = buffer.state()
        buffer.commit()
        await buffer.put(step_of(2, tasks=1))
        damage(url, "2/0/0/0")
        assert uids(await buffer.take(1)) == ["2/0/1/0"]

        again = open_as("both", url, on_error="skip")
        again.load_state(state)
        await again.put(step_of(2, tasks=1))
        assert uids(await again.take(2)) == ["2/0/0/0", "2/0/1/0"]

    run(main())


def test_of_rows_that_are_all_damaged_the_end_is_seen(url: str) -> None:
    async def main() -> None:
        buffer = open_as("both", url, on_error="skip")
        await buffer.put(step_of(1, tasks=1))
        damage(url, "1/0/0/0", "1/0/1/0")
        await buffer.close()
        with pytest.raises(Closed):
            await buffer.take(4)

    run(main())


def test_a_row_that_is_damaged_between_two_uses_is_sealed_and_not_used_again(url: str) -> None:
    async def main() -> None:
        reuse = Reuse(cooldown=0.01, use_count_limit=3)
        buffer = open_as("both", url, on_error="skip", reuse=reuse)
        await buffer.put(step_of(1, tasks=1))
        assert len(await buffer.take(2)) == 2
        damage(url, "1/0/0/0")
        for _ in range(2):
            await asyncio.sleep(0.05)
            assert uids(await buffer.take(1)) == ["1/0/1/0"]
            assert buffer.metrics() == {"buffer/damaged": 1.0, "buffer/dropped": 0.0}
            buffer.commit()  # counts what it holds

    run(main())
