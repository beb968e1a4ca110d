"""What every buffer keeps: order, batches, the end, back-pressure, time-outs, and resuming."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.buffer.samples import JumpingClock, run, sample, sql_buffer, step_of, uids
from trireme.buffer.buffer import Buffer, Closed, Condition, WallClock
from trireme.buffer.file import FileBuffer
from trireme.buffer.queue import QueueBuffer
from trireme.experience import EID, Experience

Make = Callable[..., Any]


class FourRows:
    """A data set of four rows."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return 4

    def __call__(self, index: int, *, eid: EID) -> Experience | None:
        return sample(1, index // 2, index % 2)


def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database."""
    if request.param == "postgres":
        return request.getfixturevalue("postgres").database()
    return f"sqlite:///{tmp_path / 'buffer.db'}"


@pytest.fixture(params=["queue", "sqlite", "postgres"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Makes buffers of one kind; the SQL ones all open the same database."""
    url = database(request, tmp_path)

    def build(**options: Any) -> Any:
        if request.param == "queue":
            return QueueBuffer("experiences", **options)
        return sql_buffer("experiences", url, **options)

    return build


@pytest.fixture(params=["queue", "sqlite", "postgres", "file"])
def filled(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    """Makes a buffer that holds the four experiences of one step and gets no more."""
    url = database(request, tmp_path)

    async def build() -> Buffer:
        if request.param == "file":
            return FileBuffer("experiences", FourRows(), total_epochs=1, shuffle=False)
        buffer: Any = QueueBuffer("experiences")
        if request.param in ("sqlite", "postgres"):
            buffer = sql_buffer("experiences", url)
        await buffer.put(step_of(1))
        return buffer

    return build


ALL = uids(step_of(1))


def test_what_is_older_than_a_take_accepts_leaves_with_it_and_does_not_count(make: Make) -> None:
    async def main() -> None:
        buffer = make(max_read_timeout=5)
        for batch in (1, 3, 2, 3):
            await buffer.put([sample(batch, len(buffer), 0)])
        taken = await buffer.take(2, oldest=3)
        assert sorted(e.eid.batch for e in taken) == [1, 2, 3, 3] and len(buffer) == 0

    run(main())


def test_a_take_that_has_only_what_is_too_old_waits_for_more_and_says_for_what(make: Make) -> None:
    async def main() -> None:
        buffer = make(max_read_timeout=0.5, capacity=1)
        await buffer.put(step_of(1))
        take = asyncio.create_task(buffer.take(2, oldest=3))
        await asyncio.sleep(0.1)
        await buffer.put(step_of(3))  # there is room for it, since the trainer waits
        taken = await take
        assert sorted(e.eid.batch for e in taken) == [1, 1, 1, 1, 3, 3]
        said = "requested 3 experiences of version 3 or later of buffer 'experiences', which has 2"
        with pytest.raises(TimeoutError, match=said):
            await buffer.take(3, oldest=3)

    run(main())


def test_experiences_come_in_the_order_of_the_puts_across_their_borders(make: Make) -> None:
    async def main() -> None:
        buffer = make()
        await buffer.put(step_of(1))
        await buffer.put(step_of(2))
        assert len(buffer) == 8
        taken = await buffer.take(3) + await buffer.take(5)
        assert uids(taken) == uids(step_of(1) + step_of(2))
        assert len(buffer) == 0

    run(main())


def test_what_comes_out_is_what_went_in(make: Make) -> None:
    async def main() -> None:
        buffer = make()
        wanted = sample(3, 1, 1)
        wanted.routed_experts = torch.arange(len(wanted.tokens) * 6).view(-1, 2, 3).to(torch.uint8)
        await buffer.put([wanted])
        [out] = await buffer.take(1)
        assert out.routed_experts is not None
        assert torch.equal(out.routed_experts, wanted.routed_experts)
        assert out.tokens.tolist() == wanted.tokens.tolist()
        assert out.mask.tolist() == wanted.mask.tolist()
        assert out.logprobs is not None and wanted.logprobs is not None
        assert out.logprobs.tolist() == wanted.logprobs.tolist()
        assert (out.version, out.reward, out.info) == (3, 1.0, wanted.info)

    run(main())


def test_what_is_left_at_the_end_is_one_smaller_batch(filled: Callable[[], Any]) -> None:
    async def main() -> None:
        buffer = await filled()
        assert len(buffer) == 4
        first = await buffer.take(3)
        if not isinstance(buffer, FileBuffer):
            await buffer.close()
        assert uids(first + await buffer.take(3)) == ALL
        with pytest.raises(Closed, match="experiences"):
            await buffer.take(3)

    run(main())


def test_a_resumed_buffer_gives_exactly_what_was_not_taken(filled: Callable[[], Any]) -> None:
    async def main() -> None:
        buffer = await filled()
        first = await buffer.take(1)
        state = buffer.state()
        buffer.commit()
        lost = await buffer.take(2)  # learned from, but not in a checkpoint when the process dies
        again = reopened(buffer)
        again.load_state(state)
        assert len(again) == 3
        taken = await again.take(3)
        assert uids(first + taken) == ALL
        assert uids(taken)[:2] == uids(lost)

    run(main())


def test_a_commit_is_of_what_was_taken_before_the_state(filled: Callable[[], Any]) -> None:
    async def main() -> None:
        buffer = await filled()
        first = await buffer.take(1)
        state = buffer.state()
        lost = await buffer.take(1)  # while the checkpoint is written
        buffer.commit()
        lost += await buffer.take(1)
        again = reopened(buffer)
        again.load_state(state)
        taken = await again.take(3)
        assert uids(first + taken) == ALL and uids(taken)[:2] == uids(lost)

    run(main())


def test_an_older_checkpoint_gives_again_what_later_ones_had_made_final(
    filled: Callable[[], Any],
) -> None:
    async def main() -> None:
        buffer = await filled()
        states = []
        for _ in range(3):  # the last two checkpoints will be damaged
            await buffer.take(1)
            states.append(buffer.state())
            buffer.commit()
        for _ in range(2):  # and once more, by a run that has gone on from the first
            again = reopened(buffer)
            again.load_state(states[0])
            assert len(again) == 3
            assert uids(await again.take(1)) == ALL[1:2]
            again.state()
            again.commit()

    run(main())


def reopened(buffer: Any) -> Any:
    """What a new process opens; no state is loaded yet."""
    if not isinstance(buffer, FileBuffer | QueueBuffer):
        return sql_buffer("experiences", buffer._database.url.render_as_string(False))
    if isinstance(buffer, FileBuffer):
        return FileBuffer("experiences", FourRows(), total_epochs=1, shuffle=False)
    return QueueBuffer("experiences")


def test_closing_wakes_a_trainer_that_waits_for_more_than_will_come(make: Make) -> None:
    """7,680 are wanted, and the episodes end early."""

    async def main() -> None:
        buffer = make()
        waiting = asyncio.create_task(buffer.take(7680))
        await buffer.put(step_of(1))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        await buffer.close()
        assert uids(await waiting) == ALL

    run(main())


def test_closing_wakes_an_explorer_that_waits_for_room(make: Make) -> None:
    async def main() -> None:
        buffer = make(capacity=1)
        await buffer.put(step_of(1))
        waiting = asyncio.create_task(buffer.put(step_of(2)))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        await buffer.close()
        with pytest.raises(Closed):
            await waiting

    run(main())


def test_failing_wakes_everyone_with_the_cause(make: Make) -> None:
    async def main() -> None:
        buffer = make()
        waiting = asyncio.create_task(buffer.take(2))
        await asyncio.sleep(0.02)
        await buffer.fail(RuntimeError("the engine is out of memory"))
        with pytest.raises(RuntimeError, match="out of memory"):
            await waiting
        with pytest.raises(RuntimeError, match="out of memory"):
            await buffer.put(step_of(1))

    run(main())


def test_demand_is_unmet_only_once_a_take_has_looked_in_vain_since_the_last_put(
    make: Make,
) -> None:
    async def main() -> None:
        buffer = make()
        said: list[bool] = []
        for step in (1, 2, 3):  # a slow store's looks and puts fall into many orders
            take = asyncio.create_task(buffer.take(8))
            await until(lambda: buffer.demand.unmet)
            await buffer.put(step_of(2 * step))
            await until(lambda: buffer.demand.unmet)
            buffer.demand.changed = lambda: said.append(buffer.demand.unmet)
            await buffer.put(step_of(2 * step + 1))
            while not take.done():
                assert not buffer.demand.unmet, "the batch is there, taken or not"
                await asyncio.sleep(0)
            assert said == [False] and len(await take) == 8
            said.clear()
            buffer.demand.changed = lambda: None

    run(main())


def test_a_take_that_waits_for_more_than_there_is_starves(make: Make) -> None:
    async def main() -> None:
        buffer = make()
        await buffer.put(step_of(1))
        assert not await buffer.starves(), "nobody takes"
        take = asyncio.create_task(buffer.take(8))
        await until(lambda: buffer.demand.unmet)
        assert await buffer.starves()
        await buffer.put(step_of(2))
        assert not await buffer.starves(), "the batch is there, taken or not"
        assert len(await take) == 8
        assert not await buffer.starves()

    run(main())


async def until(ready: Callable[[], bool]) -> None:
    while not ready():
        await asyncio.sleep(0.001)


def test_a_put_waits_while_the_buffer_is_full(make: Make) -> None:
    async def main() -> None:
        buffer = make(capacity=1)
        await buffer.put(step_of(1))
        waiting = asyncio.create_task(buffer.put(step_of(2)))
        await asyncio.sleep(0.02)
        assert len(buffer) == 4 and not waiting.done()
        await buffer.take(4)
        await waiting
        assert uids(await buffer.take(4)) == uids(step_of(2))

    run(main())


def test_a_full_buffer_takes_more_when_the_trainer_wants_more_than_it_holds(make: Make) -> None:
    async def main() -> None:
        buffer = make(capacity=1)
        await buffer.put(step_of(1))
        taking = asyncio.create_task(buffer.take(8))
        await buffer.put(step_of(2))
        assert uids(await taking) == uids(step_of(1) + step_of(2))

    run(main())


def test_a_trainer_that_waits_too_long_is_told_for_what(make: Make) -> None:
    async def main() -> None:
        buffer = make(max_read_timeout=10.0, clock=JumpingClock())
        await buffer.put(step_of(1))
        wanted = r"requested 5 experiences of buffer 'experiences', which has 4, .* 10 s"
        with pytest.raises(TimeoutError, match=wanted):
            await buffer.take(5)
        assert len(buffer) == 4

    run(main())


def test_an_explorer_that_waits_too_long_is_told_for_what(make: Make) -> None:
    async def main() -> None:
        buffer = make(capacity=1, max_read_timeout=10.0, clock=JumpingClock())
        await buffer.put(step_of(1))
        with pytest.raises(TimeoutError, match=r"'experiences' is full \(1 explore steps\)"):
            await buffer.put(step_of(2))

    run(main())


class HandClock(JumpingClock):
    """Time passes only by the test's hand."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.Event().wait()


def test_a_put_waits_on_while_the_trainer_takes_something() -> None:
    async def main() -> None:
        clock = HandClock()
        buffer = QueueBuffer("experiences", capacity=1, max_read_timeout=10.0, clock=clock)
        await buffer.put(step_of(1))
        put = asyncio.ensure_future(buffer.put(step_of(2)))
        for _ in range(3):  # each makes no room, and comes before the ten seconds are over
            await asyncio.sleep(0.01)
            clock.time += 6.0
            await buffer.take(1)
        await asyncio.sleep(0.01)
        assert clock.time > 10 and not put.done()
        await buffer.take(1)
        await put

    run(main())


def test_a_queue_gives_the_explore_steps_one_by_one_however_large() -> None:
    async def main() -> None:
        buffer = QueueBuffer("experiences")
        step = asyncio.ensure_future(buffer.take_step())
        await asyncio.sleep(0)
        await buffer.put([sample(1, 0, 0)])  # one alone is a step too
        assert uids(await step) == uids([sample(1, 0, 0)])
        await buffer.put(step_of(2))
        await buffer.put(step_of(3))
        await buffer.close()
        assert uids(await buffer.take_step()) == uids(step_of(2))
        assert uids(await buffer.take_step()) == uids(step_of(3))
        with pytest.raises(Closed):
            await buffer.take_step()

    run(main())


def test_an_empty_put_is_no_put(make: Make) -> None:
    async def main() -> None:
        buffer = make(capacity=1)
        for _ in range(3):
            await buffer.put([])
        assert len(buffer) == 0

    run(main())


def test_the_wall_clocks_sleep_lets_its_seconds_pass() -> None:
    async def main() -> None:
        clock = WallClock()
        begun = clock.now()
        await clock.sleep(0.05)
        assert clock.now() - begun >= 0.04
        assert not await Condition(clock).wait(0.01), "nobody has notified"

    run(main())
