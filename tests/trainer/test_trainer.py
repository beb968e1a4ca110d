"""Trainer: when the loop ends, when it saves and commits, and what it tells the synchronizer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.limits import HANG_S
from trireme.buffer.buffer import Closed
from trireme.buffer.queue import QueueBuffer
from trireme.engines.device import Device
from trireme.experience import EID, Experience
from trireme.files import CannotWrite
from trireme.monitor.events import Event, Noted, Saved, StepDone, Trained
from trireme.registry import ALGORITHMS
from trireme.sync.probe import BrokenWeights
from trireme.trainer.learning import TrainState
from trireme.trainer.led import Models
from trireme.trainer.measure import Measures, Profile
from trireme.trainer.ranks import NotFinite
from trireme.trainer.trainer import Stopped, Trainer, TrainerSettings, _tokens_of

SFT = ALGORITHMS.get("sft")


class Learner:
    """Learns nothing, and remembers the sizes of its batches."""

    def __init__(self, fails_at: int = 0) -> None:
        self.sizes: list[int] = []
        self.fails_at = fails_at
        self.fails: Callable[[], None] = lambda: None
        """Called where it fails."""
        self.rank, self.num_ranks, self.ranks, self.replays_routing = 0, 1, None, False
        self.device = torch.device("cpu")
        self.measures = Measures(self.device)

    def forward_backward(self, batch: Any, loss: Any, *, entropy: bool = False) -> None:
        self.sizes.append(batch.num_samples)
        if len(self.sizes) == self.fails_at:
            self.fails()
            raise ArithmeticError("the loss of a batch overflows")

    def step(self) -> dict[str, float]:
        return {"actor/lr": 0.1}

    def logprobs(self, batch: Any, *, reference: bool = False) -> Any:
        return torch.zeros(batch.num_tokens)

    def scores(self, batch: Any) -> Any:
        return torch.zeros(2, batch.num_tokens)

    def score(self, ids: Any, *, temperature: float = 1.0) -> list[list[float]]:
        return [[0.0] * len(row) for row in ids]

    def weights(self) -> dict[str, Any]:
        return {}

    def each_weight(self) -> Generator[tuple[str, Any]]:
        yield from ()

    def in_order(self) -> AbstractContextManager:
        return nullcontext()

    def gather(self, value: Any, *, every: bool = False) -> list[Any]:
        return [value]

    def save(self, actor: Any, *, hf: bool) -> None: ...

    def load(self, actor: Any) -> None: ...

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None: ...


class Buffer(QueueBuffer):
    """Says when it is told to commit."""

    def __init__(self, events: list[str], **options: Any) -> None:
        super().__init__("store", **options)
        self.events = events

    def commit(self) -> None:
        self.events.append("commit")


class Folder:
    """A checkpointer that only says what it is asked."""

    def __init__(self, events: list[str], buffer: Buffer) -> None:
        self.events = events
        self.buffer = buffer
        self.disk = threading.Event()
        """Set where the disk has taken everything."""
        self.disk.set()
        self.full = False

    async def snapshot(self) -> dict[str, Any]:
        return {"left": len(self.buffer)}

    def begin_save(self, step: int, run_state: dict[str, Any], last: bool, behind: bool) -> None:
        self.behind = behind
        self.events.append(
            f"save {step}, {run_state['left']} left" + (", the last" if last else "")
        )

    def await_save(self) -> None:
        if self.behind:
            assert self.disk.wait(HANG_S)

    def end_save(self) -> None:
        if self.full:
            raise CannotWrite("cannot write /job/global_step_1: No space left on device")

    def seal_save(self) -> None:
        self.events.append("sealed")


class Sync:
    """The trainer's side of a synchronizer, written down."""

    version = trained_step = pushed_step = 0
    lock_step = False

    def __init__(self, events: list[str]) -> None:
        self.events = events

    async def trained(self, step: int) -> dict[str, float]:
        self.events.append(f"trained {step}")
        return {"sync/version": step}

    async def stopped(self, step: int) -> None:
        self.events.append(f"stopped {step}")


def samples(count: int) -> list[Experience]:
    return [Experience([1, 2, 3], prompt_length=1, eid=EID(1, i, 0)) for i in range(count)]


async def make(
    stored: int, *, closed: bool = True, fails_at: int = 0, **options: Any
) -> SimpleNamespace:
    """A trainer of batches of 2 over a buffer that holds `stored` experiences."""
    events: list[str] = []
    reports: list[tuple[str, int, dict[str, float]]] = []
    said: list[Any] = []

    def emit(event: Event) -> None:
        said.append(event)
        if isinstance(event, StepDone):
            reports.append((event.part, event.step, dict(event.metrics)))

    buffer, backend = Buffer(events, max_read_timeout=HANG_S), Learner(fails_at)
    await buffer.put(samples(stored))
    if closed:
        await buffer.close()
    options = {"sync": Sync(events)} | options
    common = TrainerSettings(
        batch_size=2, total_steps=None, save_interval=0, save_behind=True, save_timeout=HANG_S
    )
    settings = {f.name: options.pop(f.name) for f in fields(common) if f.name in options}
    trainer = Trainer(
        models=Models(cast(Any, backend), SFT, TrainState(SFT)),
        buffer=buffer,
        settings=replace(common, **settings),
        device=Device(1),
        checkpointer=Folder(events, buffer),
        emit=emit,
        **options,
    )
    return SimpleNamespace(
        trainer=trainer, buffer=buffer, backend=backend, events=events, reports=reports, said=said
    )


def trained(stored: int, **options: Any) -> SimpleNamespace:
    """What a trainer that has run to its end did."""

    async def main() -> SimpleNamespace:
        made = await make(stored, **options)
        try:
            await asyncio.wait_for(made.trainer.train(), HANG_S)
        finally:
            made.trainer.device.close()
        return made

    return asyncio.run(main())


def saves(made: SimpleNamespace) -> list[str]:
    return [event for event in made.events if event.startswith("save")]


def test_it_ends_when_the_experiences_do_and_trains_the_rest_as_a_smaller_batch() -> None:
    made = trained(5)
    assert made.backend.sizes == [2, 2, 1] and made.trainer.step == 3
    assert saves(made) == ["save 3, 0 left, the last"]
    assert made.events[-1] == "stopped 3"


def test_a_loss_of_broken_weights_blames_no_experience() -> None:
    async def main() -> None:
        made = await make(4, fails_at=1)

        def fail() -> None:
            raise NotFinite("the loss of experience 1/0/0 is nan at token 1")

        made.backend.fails, made.backend.broken_weights = fail, lambda: ["a", "b", "c", "d"]
        with pytest.raises(BrokenWeights, match=r"number before train step 1 \(a, b, c, \.\.\.\)"):
            await made.trainer.train()
        made.trainer.device.close()

    asyncio.run(main())


def test_it_ends_at_total_steps_and_closes_the_buffer() -> None:
    made = trained(9, total_steps=2, closed=False)
    assert made.backend.sizes == [2, 2] and saves(made) == ["save 2, 5 left, the last"]
    assert made.buffer._closed


def test_a_run_that_made_no_step_has_failed_and_leaves_no_checkpoint_to_resume() -> None:
    async def main() -> list[str]:
        made = await make(0)
        with pytest.raises(RuntimeError, match="no train step was made: there was nothing to tra"):
            await made.trainer.train()
        made.trainer.device.close()
        return made.events

    assert asyncio.run(main()) == ["stopped 0"]


@pytest.mark.parametrize(
    ("total", "expected"),
    [
        (5, ["save 2, 6 left", "save 4, 2 left", "save 5, 0 left, the last"]),
        (4, ["save 2, 6 left", "save 4, 2 left, the last"]),
    ],
)
def test_it_saves_every_interval_and_once_at_the_end(total: int, expected: list[str]) -> None:
    assert saves(trained(10, total_steps=total, save_interval=2)) == expected


def test_what_was_taken_is_committed_after_each_save_and_not_before() -> None:
    events = trained(6, total_steps=3, save_interval=1).events
    order = [event.split(",")[0] for event in events]
    assert [e for e in order if e.startswith("trained")] == ["trained 1", "trained 2", "trained 3"]
    assert [e for e in order if not e.startswith("trained")] == [
        "save 1", "sealed", "commit",
        "save 2", "sealed", "commit",
        "save 3", "sealed", "commit", "stopped 3",
    ]  # fmt: skip
    assert order.index("trained 2") < order.index("save 2")


def test_training_goes_on_while_a_checkpoint_is_written() -> None:
    async def main() -> list[str]:
        made = await make(8, total_steps=4, save_interval=2)
        folder = made.trainer.checkpointer
        folder.disk.clear()
        running = asyncio.create_task(made.trainer.train())
        while "trained 3" not in made.events and not running.done():
            await asyncio.sleep(0.01)
        assert "sealed" not in made.events and "commit" not in made.events
        folder.disk.set()
        await running
        made.trainer.device.close()
        return made.events

    events = asyncio.run(main())
    assert events.index("trained 3") < events.index("sealed") < events.index("commit")


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_its_sentence() -> None:
    async def main() -> SimpleNamespace:
        made = await make(40, save_interval=1)
        made.trainer.checkpointer.full = True
        with pytest.raises(CannotWrite, match="global_step_1: No space left on device"):
            await made.trainer.train()
        made.trainer.device.close()
        return made

    made = asyncio.run(main())
    assert "commit" not in made.events and "sealed" not in made.events
    assert made.trainer.step <= 2


def test_a_checkpoint_that_is_being_written_is_finished_where_a_later_step_fails() -> None:
    async def main() -> list[str]:
        made = await make(6, fails_at=2, save_interval=1)
        with pytest.raises(ArithmeticError, match="overflows"):
            await made.trainer.train()
        made.trainer.device.close()
        return made.events

    assert asyncio.run(main()) == ["trained 1", "save 1, 4 left", "sealed", "commit"]


def test_a_failed_checkpoint_is_logged_where_a_later_step_fails_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        made = await make(6, fails_at=2, save_interval=1)
        made.trainer.checkpointer.full = True
        made.trainer.checkpointer.disk.clear()
        made.backend.fails = made.trainer.checkpointer.disk.set
        with pytest.raises(ArithmeticError, match="overflows"):
            await made.trainer.train()
        made.trainer.device.close()

    asyncio.run(main())
    assert "checkpoint of step 1 failed too: cannot write /job/global_step_1: No" in caplog.text


async def cancelled_while_it_writes(**options: Any) -> SimpleNamespace:
    """A trainer that waits for experiences and writes a checkpoint, cancelled as by a failure of
    the explorer.
    """
    made = await make(2, closed=False, save_interval=1, **options)
    made.trainer.checkpointer.disk.clear()
    made.running = asyncio.create_task(made.trainer.train())
    while "save 1, 0 left" not in made.events or "step 2" not in made.trainer.doing:
        await asyncio.sleep(0.01)
    made.running.cancel()
    await asyncio.sleep(0)
    return made


@pytest.mark.parametrize("again", [False, True], ids=["cancelled", "and cancelled again"])
def test_a_checkpoint_that_is_being_written_is_finished_where_the_explorer_fails(
    again: bool,
) -> None:
    """The explorer's failure may come through the buffer first, and then cancel the trainer."""

    async def main() -> list[str]:
        made = await cancelled_while_it_writes()
        if again:
            await asyncio.sleep(0.05)
            made.running.cancel()
            await asyncio.sleep(0.05)
        made.trainer.checkpointer.disk.set()
        with pytest.raises(asyncio.CancelledError):
            await made.running
        made.trainer.device.close()
        return made.events

    assert asyncio.run(main())[-2:] == ["sealed", "commit"]


def test_a_disk_that_hangs_is_given_up_where_the_run_has_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> list[str]:
        made = await cancelled_while_it_writes(save_timeout=0.1)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(made.running, HANG_S)
        made.trainer.checkpointer.disk.set()
        made.trainer.device.close()
        return made.events

    assert "commit" not in asyncio.run(main())
    assert "step 1 was not written in 0.1 s (cluster.stop_timeout)" in caplog.text


def test_what_was_learned_is_committed_while_the_trainer_waits_for_more() -> None:
    async def main() -> None:
        made = await make(2, closed=False, save_interval=1)
        running = asyncio.create_task(made.trainer.train())
        async with asyncio.timeout(HANG_S):
            while "commit" not in made.events:
                await asyncio.sleep(0.01)
        await made.buffer.close()
        await running
        made.trainer.device.close()

    asyncio.run(main())


def test_the_wait_for_the_checkpoint_before_counts_as_time_of_saving() -> None:
    async def main() -> SimpleNamespace:
        made = await make(6, save_interval=1)
        made.trainer.checkpointer.disk.clear()
        running = asyncio.create_task(made.trainer.train())
        while made.trainer.doing != "the checkpoint of step 2":
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        made.trainer.checkpointer.disk.set()
        await running
        made.trainer.device.close()
        return made

    assert asyncio.run(main()).reports[2][2]["time/save"] > 0.09


def test_a_checkpoint_that_is_written_at_once_is_one_piece_of_work_on_the_device() -> None:
    async def main() -> list[str]:
        made = await make(4, save_interval=1, save_behind=False)
        device, works = made.trainer.device, []
        real = device.run

        async def run(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
            works.append(function.__name__)
            return await real(function, *args, **options)

        device.run = run
        await made.trainer.train()
        device.close()
        assert made.events.count("sealed") == made.events.count("commit") == 3
        return works

    assert asyncio.run(main()) == [*["_step", "_begin_save"] * 2, "_begin_save"]


@pytest.mark.parametrize("lock_step", [True, False])
def test_only_a_train_step_in_lock_step_promises_its_weights_to_the_engine(lock_step: bool) -> None:
    async def main() -> set[tuple[str, bool]]:
        made = await make(4, save_interval=1)
        made.trainer.sync.lock_step = lock_step
        device, promises = made.trainer.device, set()
        real = device.run

        async def run(
            function: Callable[..., Any], *args: Any, weights_follow: bool = False
        ) -> Any:
            promises.add((function.__name__, weights_follow))
            return await real(function, *args, weights_follow=weights_follow)

        device.run = run
        await made.trainer.train()
        device.close()
        return promises

    promises = asyncio.run(main())
    assert ("_step", lock_step) in promises and len(promises) == len(dict(promises))
    assert not any(follow for name, follow in promises if name != "_step")


def test_a_trainer_that_is_told_to_stop_writes_nothing_behind_it() -> None:
    async def main() -> SimpleNamespace:
        made = await make(2, closed=False)
        running = asyncio.create_task(made.trainer.train())
        while "step 2" not in made.trainer.doing:
            await asyncio.sleep(0.01)
        made.trainer.stop()
        with pytest.raises(Stopped):
            await running
        made.trainer.device.close()
        return made

    made = asyncio.run(main())
    assert saves(made) == ["save 1, 0 left"] and not made.trainer.checkpointer.behind


def test_an_error_of_a_step_is_not_caught_and_nothing_is_saved_or_committed() -> None:
    async def main() -> list[str]:
        made = await make(6, fails_at=2)
        with pytest.raises(ArithmeticError, match="overflows"):
            await made.trainer.train()
        made.trainer.device.close()
        return made.events

    assert asyncio.run(main()) == ["trained 1"]


def test_a_resumed_trainer_counts_on() -> None:
    async def main() -> SimpleNamespace:
        made = await make(6, total_steps=5)
        made.trainer.step = 3
        await made.trainer.train()
        made.trainer.device.close()
        return made

    made = asyncio.run(main())
    assert [step for _, step, _ in made.reports] == [4, 5]
    assert made.backend.sizes == [2, 2]


def test_a_step_reports_its_metrics_with_the_synchronizers() -> None:
    ((part, step, metrics),) = trained(2).reports
    assert (part, step) == ("trainer", 1)
    assert metrics["actor/lr"] == 0.1 and metrics["sync/version"] == 1
    assert metrics["perf/experiences"] == 2 and metrics["time/train"] > 0


def test_without_a_synchronizer_it_trains_alone() -> None:
    assert trained(4, sync=None).events == [
        "save 2, 0 left, the last",
        "sealed",
        "commit",
    ]


def test_the_steps_that_are_asked_for_leave_a_trace_and_say_where(tmp_path: Path) -> None:
    made = trained(6, profile=Profile(frozenset({2}), tmp_path / "profile"))
    said = [event.text for event in made.said if isinstance(event, Noted)]
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["step_2_rank_0.json"]
    assert said == [f"profile of train step 2: {tmp_path}/profile/step_2_rank_*.json"]


def test_its_events_are_the_steps_what_they_learned_from_and_the_checkpoints() -> None:
    said = trained(5, save_interval=2, save_behind=False).said
    learned = [(event.step, len(event.experiences)) for event in said if isinstance(event, Trained)]
    assert learned == [(1, 2), (2, 2), (3, 1)]
    kinds = [(type(event), event.step) for event in said]
    steps = [(kind, step) for step in (1, 2, 3) for kind in (Trained, StepDone)]
    assert kinds == [*steps[:4], (Saved, 2), *steps[4:], (Saved, 3)]


def test_what_no_step_learns_from_at_the_end_is_said() -> None:
    """Stale experiences after the last train step were in no metric and no line."""

    async def main() -> SimpleNamespace:
        made = await make(3)
        take = made.buffer.take

        async def noted(*args: Any, **options: Any) -> list[Experience]:
            try:
                return await take(*args, **options)
            except Closed as end:
                end.add_note("the last 2 experiences were not trained")
                raise

        made.buffer.take = noted
        try:
            await asyncio.wait_for(made.trainer.train(), HANG_S)
        finally:
            made.trainer.device.close()
        return made

    said = [event.text for event in asyncio.run(main()).said if isinstance(event, Noted)]
    assert said == ["the last 2 experiences were not trained"]


def test_a_pair_counts_the_tokens_of_both_its_sequences() -> None:
    pair = Experience([1, 2, 3], prompt_length=3, chosen=[4, 5], rejected=[6])
    assert _tokens_of(pair) == 9
    assert _tokens_of(Experience([1, 2, 3], prompt_length=2)) == 3
