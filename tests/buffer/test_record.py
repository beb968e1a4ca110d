"""The copy of experiences: one row and one line an id, in the places that the seeds show."""

from __future__ import annotations

import asyncio
import json
import math
import sqlite3
import threading
import time
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import MetaData, insert, text

from tests.buffer.samples import run, sample, step_of, uids
from tests.limits import HANG_S
from tests.postgres import PASSWORD, Server
from trireme.buffer import record as record_module
from trireme.buffer import rows as rows_module
from trireme.buffer import table as table_module
from trireme.buffer.blocks import BLOCKS, stored_experiences
from trireme.buffer.limit import fitting
from trireme.buffer.lines import LineFile
from trireme.buffer.queue import QueueBuffer
from trireme.buffer.record import Record, record_for
from trireme.buffer.table import experience_table, open_database, resolve_url, row_of
from trireme.experience import EID, Experience
from trireme.serialize import decode, encode


def rows(database: Path, columns: str = "msg_id") -> list[Any]:
    with sqlite3.connect(database) as connection:
        return connection.execute(f"SELECT {columns} FROM experiences ORDER BY id").fetchall()


def stored(database: Path, where: str = "") -> list[Experience]:
    with sqlite3.connect(database) as connection:
        return list(stored_experiences(connection, lambda digest: None, where))


def blocks(database: Path) -> list[int]:
    """How many experiences each block has."""
    with sqlite3.connect(database) as connection:
        return [len(decode(data)) for (data,) in connection.execute(f"select data from {BLOCKS}")]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_queue_leaves_a_copy_in_the_database_and_as_lines(tmp_path: Path) -> None:
    record = record_for("sqlite:///gsm8k.db", tmp_path)

    async def main() -> None:
        buffer = QueueBuffer("gsm8k_buffer", record=record)
        await buffer.put(step_of(1))
        await buffer.take(4)
        record.close()

    run(main())
    assert [uid for (uid,) in rows(tmp_path / "gsm8k.db")] == uids(step_of(1))
    [row] = rows(tmp_path / "gsm8k.db", "task_id, model_version, reward, prompt_text")[:1]
    assert row == ("1/0", 1, 0.0, "question 0")
    written = stored(tmp_path / "gsm8k.db")
    assert [e.tokens.tolist() for e in written] == [e.tokens.tolist() for e in step_of(1)]
    written = lines(tmp_path / "experience_buffer.jsonl")
    assert [line["eid"] for line in written] == uids(step_of(1))
    assert written[1]["response"] == "answer 1" and written[1]["reward"] == 1.0


def test_a_relative_database_lies_in_the_buffer_folder() -> None:
    folder = Path("/job/buffer")
    assert resolve_url("sqlite:///x.db", folder) == "sqlite:////job/buffer/x.db"
    assert resolve_url("x.db", folder) == "sqlite:////job/buffer/x.db"
    assert resolve_url("sqlite:////data/x.db", folder) == "sqlite:////data/x.db"
    assert resolve_url("postgresql://host/x", folder) == "postgresql://host/x"


def test_writing_an_id_again_replaces_it(tmp_path: Path) -> None:
    async def main(record: Record, reward: float) -> None:
        changed = step_of(1)
        changed[0].reward = reward
        await record.write(changed)

    for reward in (3.0, 5.0):
        record = record_for("copy.db", tmp_path)
        run(main(record, reward))
        record.close()
    assert len(rows(tmp_path / "copy.db")) == 4
    assert (5.0,) in rows(tmp_path / "copy.db", "reward")
    written = lines(tmp_path / "experience_buffer.jsonl")
    assert len(written) == 4 and written[0]["reward"] == 5.0
    assert sorted(e.reward or 0.0 for e in stored(tmp_path / "copy.db")) == [0.0, 1.0, 1.0, 5.0]


def test_one_of_a_task_is_replaced_and_the_others_stay_in_their_block(tmp_path: Path) -> None:
    record = Record(database=f"sqlite:///{tmp_path / 'copy.db'}")
    record._write(step_of(1, tasks=1, runs=3))
    assert blocks(tmp_path / "copy.db") == [3]
    for run_id in range(3):
        changed = sample(1, 0, run_id)
        changed.reward = 10.0 + run_id
        record._write([changed])
        rewards = {e.eid.uid: e.reward for e in stored(tmp_path / "copy.db")}
        assert rewards == {
            f"1/0/{other}/0": float(other) + 10.0 * (other <= run_id) for other in range(3)
        }
    assert blocks(tmp_path / "copy.db") == [1, 1, 1]
    record.rewind(0)
    record.close()
    assert blocks(tmp_path / "copy.db") == [] == rows(tmp_path / "copy.db")


def of_explorer(name: str, step: int) -> list[Experience]:
    found = step_of(step)
    for experience in found:
        experience.eid.batch = f"{step}/{name}"
    return found


def refuse_unreadable(url: str) -> int:
    """Check that each row's block has it, and that no block is without rows; the bytes of all."""
    engine = open_database(url, MetaData())
    with engine.connect() as connection:
        query = "SELECT msg_id, reward, block FROM experiences"
        found = connection.execute(text(query)).all()
        blocks = {n: data for n, data in connection.execute(text(f"SELECT id, data FROM {BLOCKS}"))}
        size = "coalesce(length(prompt_text), 0) + coalesce(length(response_text), 0)"
        texts = connection.scalar(text(f"SELECT sum({size}) FROM experiences")) or 0
    engine.dispose()
    held = {n: {e.eid.uid: e.reward for e in decode(bytes(data))} for n, data in blocks.items()}
    assert all(held[block][uid] == reward for uid, reward, block in found)
    assert set(held) == {block for *_, block in found}
    return texts + len(found) * rows_module.ROW_BYTES + sum(map(len, blocks.values()))


@pytest.fixture(params=["sqlite", "postgres"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a copy that several explorers write."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'copy.db'}"
    return request.getfixturevalue("postgres").database()


def test_a_server_of_a_copy_that_is_away_is_waited_for(
    postgres: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """As the store on the same server is; an outage of a second ended the run."""
    url = postgres.database()
    record = Record(database=url, patience=HANG_S, limit=1e6)
    record._write(step_of(1))
    with ThreadPoolExecutor() as pool:
        with postgres.away():
            writing = pool.submit(record._write, step_of(2))
            time.sleep(0.5)
            assert not writing.done()
        writing.result(HANG_S)
    postgres.end_connections()
    record._write(step_of(3))
    record.close()
    engine = open_database(url, MetaData())
    with engine.connect() as connection:
        ids = list(connection.scalars(text("SELECT msg_id FROM experiences ORDER BY id")))
    engine.dispose()
    assert ids == [uid for step in (1, 2, 3) for uid in uids(step_of(step))]
    told = [record.getMessage() for record in caplog.records]
    assert sum("is unreachable, waiting for it for" in line for line in told) == 1
    assert sum("is reachable again" in line for line in told) == 1
    assert not any(PASSWORD in line for line in told)

    record = Record(database=url, patience=0.1)
    record.rewind(3)
    with postgres.away(), pytest.raises(OSError, match=r"gresql.* cannot be written") as error:
        record._write(step_of(4))
    assert PASSWORD not in str(error.value)
    record.close()


@pytest.mark.parametrize("kind", ["rows", "lines"])
def test_a_second_job_does_not_take_the_copy_of_another(
    shared: str, tmp_path: Path, kind: str
) -> None:
    file = tmp_path / "copy.jsonl"
    jobs = [tmp_path / name for name in ("first", "second")]
    for job in jobs:
        job.mkdir()

    def claim(job: Path, resumes: bool = False) -> Record:
        record = Record(database=shared) if kind == "rows" else Record(lines=file)
        try:
            record.claim(job, key="input_save_path", resumes=resumes)
        except ValueError:
            record.close()
            raise
        return record

    first = claim(jobs[0])
    first._write(step_of(1))
    first.close()
    claim(jobs[0]).close()  # the same job again
    taken = rf"^input_save_path: .*copy.* is the copy of the job in {jobs[0]}, and this run, in "
    if kind == "rows":
        taken = taken.replace("copy.* is", ".* is")
    for resumes in (False, True):
        with pytest.raises(ValueError, match=taken) as refused:
            claim(jobs[1], resumes)
        assert PASSWORD not in str(refused.value)
    jobs[0].rmdir()  # renamed, or deleted
    with pytest.raises(ValueError, match=taken):
        claim(jobs[1])
    claim(jobs[1], resumes=True).close()  # it was renamed
    claim(jobs[1]).close()


def test_a_job_is_the_same_by_whichever_path_its_folder_is_named(tmp_path: Path) -> None:
    """It was another's after `checkpoint_root_dir` had become a link to it, or a path with `..`."""
    (tmp_path / "jobs/one").mkdir(parents=True)
    (tmp_path / "link").symlink_to("jobs")
    for job in ("jobs/one", "link/one", "jobs/../jobs/one"):
        record = Record(database=f"sqlite:///{tmp_path / 'copy.db'}", lines=tmp_path / "copy.jsonl")
        record.claim(tmp_path / job, key="path", resumes=True)
        record._write(step_of(1))
        record.close()


def test_a_copy_that_names_no_job_is_that_of_a_run_which_resumes(tmp_path: Path) -> None:
    url, lines = f"sqlite:///{tmp_path / 'copy.db'}", tmp_path / "copy.jsonl"
    record = Record(database=url, lines=lines)
    record._write(step_of(1))
    with pytest.raises(
        ValueError, match=r"copy\.db has experiences but names no job, and this run"
    ):
        record.claim(tmp_path / "job", key="path", resumes=False)
    record.claim(tmp_path / "job", key="path", resumes=True)
    record.claim(tmp_path / "job", key="path", resumes=False)
    record.close()


def test_a_copy_in_the_folder_of_its_job_names_no_owner(tmp_path: Path) -> None:
    record = record_for("copy.db", tmp_path / "buffer")
    record._write(step_of(1))
    record.claim(tmp_path, key="path", resumes=False)
    record.close()
    assert not list(tmp_path.rglob("*.owner.json"))
    with sqlite3.connect(tmp_path / "buffer/copy.db") as connection:
        tables = {name for (name,) in connection.execute("select name from sqlite_master")}
    assert "experiences" in tables and "experiences_owner" not in tables


@pytest.mark.parametrize("limit", [math.inf, 20_000])
def test_several_explorers_write_one_copy(shared: str, limit: float) -> None:
    """Each writes some of its rows again, as after a restart."""

    def write(name: str) -> None:
        record = Record(database=shared, limit=limit)
        for step in range(1, 9):
            record._write(of_explorer(name, step))
            again = of_explorer(name, step - step % 2)[:3]
            for experience in again:
                experience.reward = 9.0
            record._write(again)
        record.close()

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, ("first", "second", "third", "fourth")))
    bytes_ = refuse_unreadable(shared)
    assert bytes_ < limit
    assert limit < math.inf or bytes_ > 20_000


def test_copies_that_remove_each_others_rows_do_not_wait_for_each_other(
    shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One removes what it writes again, and meanwhile another removes the same at its limit."""
    first, second = (Record(database=shared, limit=limit) for limit in (1e9, 1_000.0))
    first._write(of_explorer("first", 1))
    real, begun = table_module.one_at_a_time, threading.Event()

    def late(connection: Any, what: str) -> None:
        if threading.current_thread().name.startswith("first"):
            begun.set()
            time.sleep(0.5)  # in which the other removes them
        real(connection, what)

    monkeypatch.setattr(table_module, "one_at_a_time", late)
    with ThreadPoolExecutor(thread_name_prefix="first") as pool:
        again = pool.submit(first._write, of_explorer("first", 1))
        assert begun.wait(HANG_S)
        second._write(of_explorer("second", 1))
        again.result()
    for record in (first, second):
        record.close()
    refuse_unreadable(shared)


def test_what_others_write_counts_towards_a_copys_limit(shared: str) -> None:
    limit = 20_000.0
    records = [Record(database=shared, limit=limit) for _ in range(4)]
    for step in range(1, 13):
        for number, record in enumerate(records):
            record._write(of_explorer(f"e{number}", step))
            assert refuse_unreadable(shared) <= limit
    for record in records:
        record.close()


def test_the_tasks_of_one_write_have_a_block_each_and_long_ones_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "BLOCK_TOKENS", 12)
    record = Record(database=f"sqlite:///{tmp_path / 'copy.db'}")
    mixed = step_of(1, tasks=2, runs=5)[::2] + step_of(1, tasks=2, runs=5)[1::2]
    record._write(mixed)
    record.close()
    assert sorted(blocks(tmp_path / "copy.db")) == [2, 2, 3, 3]
    assert [e.eid for e in stored(tmp_path / "copy.db")] == [e.eid for e in mixed]
    of_second = stored(tmp_path / "copy.db", "WHERE task_id = '1/1'")
    assert [e.eid.run for e in of_second] == [1, 3, 0, 2, 4]


def test_a_copy_that_an_earlier_version_began_goes_on(tmp_path: Path) -> None:
    """Its rows have their own bytes, and its table no blocks."""
    metadata = MetaData()
    table = experience_table("experiences", metadata)
    database = f"sqlite:///{tmp_path / 'copy.db'}"
    engine = open_database(database, metadata)
    with engine.begin() as connection:
        connection.execute(insert(table), [row_of(e, encode([e])) for e in step_of(1)])
    engine.dispose()
    assert [e.eid for e in stored(tmp_path / "copy.db")] == [e.eid for e in step_of(1)]
    record = Record(database=database, limit=10_000)
    record._write(step_of(2))
    record.close()
    assert [e.eid for e in stored(tmp_path / "copy.db")] == [
        e.eid for batch in (1, 2) for e in step_of(batch)
    ]
    record = Record(database=database, limit=2_000)  # now it has no room for all
    record._write(step_of(3))
    record.close()
    left = stored(tmp_path / "copy.db")
    assert {e.eid.batch for e in left} <= {2, 3} and left[-1].eid == step_of(3)[-1].eid


def test_rewinding_removes_what_came_after_the_step(tmp_path: Path) -> None:
    record = record_for("copy.db", tmp_path)

    async def main() -> None:
        for batch in (1, 2, 3):
            await record.write(step_of(batch))

    run(main())
    record.rewind(1)
    record.close()
    assert [uid for (uid,) in rows(tmp_path / "copy.db")] == uids(step_of(1))
    assert [line["eid"] for line in lines(tmp_path / "experience_buffer.jsonl")] == uids(step_of(1))


def test_a_line_that_a_crash_cut_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "experience_buffer.jsonl"
    path.write_text('{"eid": "1/0/0/0", "step": 1}\n{"eid": "1/0/1/0", "st')
    record = record_for(None, tmp_path)
    run(record.write([sample(2, 0, 0)]))
    record.close()
    assert [line["eid"] for line in lines(path)] == ["1/0/0/0", "2/0/0/0"]


def test_the_copy_is_of_the_moment_when_it_was_written(tmp_path: Path) -> None:
    record = record_for(None, tmp_path)

    async def main() -> None:
        e = sample(1, 0, 0)
        await record.write([e])
        e.reward, e.metrics["accuracy"] = 9.0, 9.0

    run(main())
    record.close()
    [line] = lines(tmp_path / "experience_buffer.jsonl")
    assert line["reward"] == 0.0 and line["metrics"] == {"accuracy": 1.0}


def test_a_put_that_is_cancelled_while_it_waits_leaves_out_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for the oldest write, and another put for the next, which is not yet begun."""
    monkeypatch.setattr(record_module, "MOST_PENDING", 2)
    database = tmp_path / "copy.db"
    record = Record(database=f"sqlite:///{database}")
    goes_on = threading.Event()

    async def main() -> None:
        record._thread.submit(goes_on.wait)
        for step in (1, 2):
            await record.write(step_of(step))
        puts = [asyncio.create_task(record.write(step_of(step))) for step in (3, 4)]
        await asyncio.sleep(0.1)
        for put in puts:
            put.cancel()
        await asyncio.wait(puts)
        goes_on.set()

    asyncio.run(main())
    record.close()
    assert {e.eid.batch for e in stored(database)} == {1, 2}


def test_a_copy_that_cannot_be_written_stops_the_run(tmp_path: Path) -> None:
    (tmp_path / "buffer").touch()
    record = record_for(None, tmp_path / "buffer")

    async def main() -> None:
        buffer = QueueBuffer("experiences", record=record)
        await buffer.put(step_of(1))
        await record.flushed()  # as a checkpoint does

    with pytest.raises(OSError, match=r"/buffer"):
        run(main())


@pytest.mark.parametrize("sampled", [False, True])
def test_a_copy_stays_below_its_limit(tmp_path: Path, sampled: bool) -> None:
    database, lines = tmp_path / "x.db", tmp_path / "x.jsonl"
    limit = 60_000
    record = Record(database=f"sqlite:///{database}", lines=lines, limit=limit, sampled=sampled)
    for step in range(1, 41):
        members = [
            Experience(list(range(50)), prompt_length=20, eid=EID(step, task, run), reward=1.0,
                       prompt_text="ask " * 20, response_text=f"reply {step} " * 10)
            for task in range(2) for run in range(4)
        ]  # fmt: skip
        record._write(members)
        assert lines.stat().st_size <= limit
    record.close()
    with sqlite3.connect(database) as connection:
        batches = [b for (b,) in connection.execute("select batch from experiences order by id")]
    told = [json.loads(line)["step"] for line in lines.read_text().splitlines()]
    for steps in (batches, told):
        assert 30 < len(steps) < 320
        if sampled:
            assert min(steps) <= 20 <= max(steps) and len(set(steps)) > 5  # of all times
        else:
            assert steps == sorted(steps) and steps[-1] == 40 and steps[0] > 20
    again = Record(database=f"sqlite:///{database}", lines=lines, limit=limit, sampled=sampled)
    again.rewind(40)  # what a resume does
    again._write([Experience([1, 2], prompt_length=1, eid=EID(41, 0), reward=0.0)])
    again.close()
    assert database.stat().st_size < 4 * limit


@pytest.mark.parametrize("sampled", [False, True])
def test_a_copy_of_lines_is_never_in_memory_as_a_whole(tmp_path: Path, sampled: bool) -> None:
    """At the limit of 1000 MB that would be several times as much of a run's memory."""

    def line(step: int) -> dict[str, Any]:
        return {"eid": f"{step}/0/0/0", "step": step, "response": "x" * 50_000}

    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(line(step)) + "\n" for step in range(300)))
    size = path.stat().st_size
    tracemalloc.start()
    file = LineFile(path, limit=size + 1000, sampled=sampled)
    file.append([{"eid": "300/0/0/0", "step": 300}])  # it knows which ids are there
    assert path.stat().st_size > size
    file.append([line(301)])  # it is cut
    file.append([line(301)])  # a line is replaced
    file.rewind(290)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    left = [row["step"] for row in lines(path)]
    assert 200 < len(left) < 280 and max(left) <= 290
    assert peak < size / 4


def test_a_line_that_was_written_in_this_process_is_replaced(tmp_path: Path) -> None:
    record = Record(lines=tmp_path / "x.jsonl")
    for reward in (1.0, 2.0, 3.0):
        record.write_lines([{"eid": "4/held_out/0/0/0", "step": 4, "reward": reward}])
    record.close()
    [line] = (tmp_path / "x.jsonl").read_text().splitlines()
    assert '"reward": 3.0' in line


def test_a_sample_within_the_limit_has_whole_groups() -> None:
    rows = [(f"{group}/{run}", str(group), 10) for group in range(5) for run in range(4)]
    for limit in range(0, 220, 10):
        left = list(fitting(rows, limit, sampled=True))
        groups = Counter(key.partition("/")[0] for key in left)
        assert set(groups.values()) <= {4} and len(groups) == min(limit // 40, 5)
        assert set(left) <= set(fitting(rows, limit + 10, sampled=True))
    assert list(fitting(rows, 50, sampled=False)) == ["4/3", "4/2", "4/1", "4/0", "3/3"]
