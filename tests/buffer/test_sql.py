"""SqlBuffer between processes: two commands on one database."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.buffer.samples import run, sample, step_of, uids
from trireme.buffer.buffer import Closed
from trireme.buffer.sql import SqlBuffer


def open_as(role: Any, folder: Path, party: str | None = None) -> SqlBuffer:
    return SqlBuffer("experiences", f"sqlite:///{folder / 'b.db'}", role=role, party=party)


def test_two_readers_never_share_an_experience(tmp_path: Path) -> None:
    async def main() -> None:
        explorer = open_as("explore", tmp_path)
        readers = [open_as("train", tmp_path, f"trainer_{i}") for i in range(2)]
        takes = [asyncio.create_task(reader.take(2)) for _ in range(4) for reader in readers]
        for batch in range(4):
            await explorer.put(step_of(batch))
        taken = [uid for found in await asyncio.gather(*takes) for uid in uids(found)]
        assert sorted(taken) == sorted(uid for b in range(4) for uid in uids(step_of(b)))

    run(main())


def test_the_end_of_the_explorer_is_seen_by_a_trainer_that_starts_later(tmp_path: Path) -> None:
    async def main() -> None:
        explorer = open_as("explore", tmp_path)
        await explorer.put(step_of(1))
        await explorer.close()
        trainer = open_as("train", tmp_path)
        assert len(await trainer.take(100)) == 4
        with pytest.raises(Closed):
            await trainer.take(1)

    run(main())


def test_the_end_of_the_trainer_is_seen_by_the_explorer(tmp_path: Path) -> None:
    async def main() -> None:
        explorer, trainer = open_as("explore", tmp_path), open_as("train", tmp_path)
        await trainer.close()
        with pytest.raises(Closed):
            await explorer.put(step_of(1))
        open_as("train", tmp_path)  # it comes back
        await explorer.put(step_of(1))

    run(main())


def test_the_last_of_several_explorers_ends_the_stream(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = open_as("explore", tmp_path, "one"), open_as("explore", tmp_path, "two")
        trainer = open_as("train", tmp_path)
        await one.close()
        taking = asyncio.create_task(trainer.take(8))
        await asyncio.sleep(0.1)
        assert not taking.done()
        await two.put(step_of(1))
        await two.close()
        assert uids(await taking) == uids(step_of(1))

    run(main())


def test_a_step_that_an_explorer_repeats_after_a_crash_is_not_doubled(tmp_path: Path) -> None:
    async def main() -> None:
        first = open_as("explore", tmp_path)
        await first.put(step_of(1))
        again = open_as("explore", tmp_path)
        await again.put(step_of(1, tasks=3))
        trainer = open_as("train", tmp_path)
        assert len(trainer) == 6
        assert len(set(uids(await trainer.take(6)))) == 6

    run(main())


def test_a_trainer_killed_between_checkpoint_and_commit_learns_nothing_twice(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        explorer = open_as("explore", tmp_path)
        await explorer.put(step_of(1))
        trainer = open_as("train", tmp_path)
        await trainer.take(3)
        state = trainer.state()  # the checkpoint has it, and then the process dies
        again = open_as("train", tmp_path)
        again.load_state(state)
        assert uids(await again.take(1)) == uids(step_of(1))[3:]

    run(main())


def test_a_trainer_killed_before_its_first_checkpoint_gets_all_again(tmp_path: Path) -> None:
    async def main() -> None:
        explorer = open_as("explore", tmp_path)
        await explorer.put(step_of(1))
        await open_as("train", tmp_path).take(3)
        assert uids(await open_as("train", tmp_path).take(4)) == uids(step_of(1))

    run(main())


def test_another_process_feeds_this_one(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from tests.buffer.test_sql import open_as\n"
        "from tests.buffer.samples import step_of\n"
        "async def main():\n"
        "    buffer = open_as('explore', Path(sys.argv[1]))\n"
        "    for batch in range(3): await buffer.put(step_of(batch))\n"
        "    await buffer.close()\n"
        "asyncio.run(main())\n"
    )

    async def main() -> None:
        trainer = open_as("train", tmp_path)
        with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) as process:
            taken = await trainer.take(12)
        assert process.returncode == 0
        assert uids(taken) == [uid for b in range(3) for uid in uids(step_of(b))]

    run(main())


def test_a_folder_that_cannot_hold_the_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "b.db").mkdir()
    with pytest.raises(ValueError, match=r"database 'sqlite:.*b\.db' cannot be used"):
        open_as("both", tmp_path)


def test_a_group_larger_than_a_statement_s_parameters_goes_in_and_out(tmp_path: Path) -> None:
    async def main() -> None:
        buffer = open_as("both", tmp_path)
        many = [sample(1, task, 0) for task in range(1200)]
        await buffer.put(many)
        assert uids(await buffer.take(1200)) == uids(many)
        buffer.commit()

    run(main())
