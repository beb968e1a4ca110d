"""FileBuffer: the order of rows over epochs, and rows that give nothing."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.buffer.samples import run, sample
from trireme.buffer.buffer import Closed
from trireme.buffer.file import FileBuffer
from trireme.experience import EID, Experience


class Rows:
    """Ten rows, some of which are too long."""

    def __init__(self, too_long: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.too_long = too_long
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return 10

    def __call__(self, index: int, *, eid: EID) -> Experience | None:
        if index in self.too_long:
            return None
        e = sample(1, 0, 0)
        e.eid = eid
        return e


async def tasks(buffer: FileBuffer, n: int) -> list[int]:
    return [int(e.eid.task) for e in await buffer.take(n)]


def test_each_epoch_has_every_row_once_in_an_order_of_its_own() -> None:
    async def main() -> None:
        buffer = FileBuffer("sft", Rows(), seed=1)
        first, second = await tasks(buffer, 10), await tasks(buffer, 10)
        assert sorted(first) == sorted(second) == list(range(10))
        assert first != second

    run(main())


def test_the_order_depends_on_the_seed_alone() -> None:
    async def order(seed: int) -> list[int]:
        return await tasks(FileBuffer("sft", Rows(), seed=seed), 25)

    assert run(order(3)) == run(order(3))
    assert run(order(3)) != run(order(4))


def test_batches_cross_epochs_and_the_last_is_smaller() -> None:
    async def main() -> None:
        buffer = FileBuffer("sft", Rows(), total_epochs=2, shuffle=False)
        sizes = []
        with pytest.raises(Closed):
            while True:
                sizes.append(len(await buffer.take(8)))
        assert sizes == [8, 8, 4]

    run(main())


def test_a_resume_in_the_middle_of_an_epoch_goes_on_with_the_next_row() -> None:
    async def main() -> None:
        whole = FileBuffer("sft", Rows({2, 5}), seed=7)
        await whole.take(11)
        half = FileBuffer("sft", Rows({2, 5}), seed=7)
        half.load_state(whole.state())
        assert await tasks(half, 9) == await tasks(whole, 9)

    run(main())


def test_rows_that_are_too_long_are_passed_over() -> None:
    async def main() -> None:
        buffer = FileBuffer("sft", Rows({0, 1, 2}), total_epochs=1, shuffle=False)
        assert await tasks(buffer, 4) == [3, 4, 5, 6]

    run(main())


def test_a_data_set_without_a_row_to_train_on_says_so() -> None:
    buffer = FileBuffer("sft", Rows(set(range(10))))
    says = "no row of its 10 leaves anything to train: 10 too long for model.max_model_len"
    with pytest.raises(ValueError, match=f"{says}$"):
        run(buffer.take(4))


def test_rows_that_are_left_out_are_counted_by_cause(caplog: pytest.LogCaptureFixture) -> None:
    class Untrained(Rows):
        def __call__(self, index: int, *, eid: EID) -> Experience | None:
            self.counts["untrained"] += index == 3
            return None if index == 3 else super().__call__(index, eid=eid)

    buffer = FileBuffer("sft", Untrained({0, 1}), total_epochs=2, shuffle=False)
    assert len(run(buffer.take(17))) == 14
    [said] = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert "'sft' are left out: 4 too long" in said and ", 2 without a trained token" in said


def test_nothing_can_be_put_into_a_data_set() -> None:
    with pytest.raises(ValueError, match="reads a data set"):
        run(FileBuffer("sft", Rows()).put([sample(1, 0, 0)]))
