"""Weight groups over gloo: what is sent arrives, and who does not come is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.e2e.job import wait_for
from tests.engines.test_rendezvous import refuses
from tests.limits import HANG_S
from trireme.ext.remote.bucket_handles import Borrower, Lender
from trireme.ext.remote.weight_group import Meeting, NotTaken, WeightGroup


def pair(timeout: float = HANG_S, backend: str = "gloo") -> tuple[WeightGroup, WeightGroup]:
    """The trainer and one engine, met."""
    trainer = WeightGroup(Meeting("127.0.0.1", 0, 2, 0, backend, timeout))
    engine = WeightGroup(Meeting("127.0.0.1", trainer.port, 2, 1, backend, timeout))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda group: group.connect(), (trainer, engine)))
    return trainer, engine


@pytest.mark.parametrize("backend", ["gloo", "ipc"])
def test_tensors_of_all_kinds_arrive_in_buckets_as_they_were(backend: str) -> None:
    trainer, engine = pair(backend=backend)
    sent = {
        "odd": torch.arange(3, dtype=torch.uint8),
        "next": torch.randn(7, 5),
        "half": torch.randn(3).to(torch.bfloat16),
        "large": torch.randn(300, 10),
        "number": torch.tensor(5),
        "empty": torch.zeros(0, 4),
    }
    thread = threading.Thread(
        target=trainer.send, args=(sent.items(),), kwargs={"bucket_bytes": 99}
    )
    thread.start()
    found = dict(engine.receive())
    thread.join()
    assert list(found) == list(sent)
    for name, tensor in sent.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype


def test_the_store_of_a_group_on_one_address_is_not_open_on_others() -> None:
    trainer = WeightGroup(Meeting("127.0.0.1", 0, 2, 0, timeout=HANG_S))
    assert not refuses("127.0.0.1", trainer.port)
    assert refuses("127.0.0.2", trainer.port)


def test_who_does_not_come_is_named_on_both_sides() -> None:
    trainer = WeightGroup(Meeting("127.0.0.1", 0, 3, 0, timeout=1))
    engine = WeightGroup(Meeting("127.0.0.1", trainer.port, 3, 1, timeout=1))
    names = {1: "worker 0 of http://a", 2: "worker 0 of http://b"}
    with ThreadPoolExecutor() as pool:
        ours, theirs = pool.submit(trainer.connect, names), pool.submit(engine.connect)
        with pytest.raises(TimeoutError, match=r"worker 0 of http://b did not join .* in 1 s"):
            ours.result()
        with pytest.raises(TimeoutError, match="rank 2 did not join the weight group"):
            theirs.result()
    with pytest.raises(
        RuntimeError, match=r"meeting point 127.0.0.1:1 could not be reached in 1 s"
    ):
        WeightGroup(Meeting("127.0.0.1", 1, 2, 1, timeout=1))


def test_a_lent_bucket_is_written_over_only_when_the_engine_has_copied_it() -> None:
    trainer, engine = pair(backend="ipc")
    sent = {f"{n}": torch.full((64,), float(n)) for n in range(20)}
    for _ in range(2):  # a second push begins anew
        with ThreadPoolExecutor() as pool:
            sending = pool.submit(trainer.send, sent.items(), bucket_bytes=512)
            received = {}
            for name, tensor in engine.receive():
                received[name] = tensor  # held, as an engine that loads whole layers does
                assert not sending.done() or name in ("18", "19")
            sending.result(timeout=HANG_S)
        assert list(received) == list(sent)
        assert all(torch.equal(received[name], sent[name]) for name in sent)


def test_an_engine_that_does_not_take_what_it_is_lent_is_named_and_can_be_given_up() -> None:
    trainer, _ = pair(timeout=1, backend="ipc")
    trainer.connect({1: "engine 0"})
    with pytest.raises(NotTaken, match=r"^engine 0 did not reach bucket 1 of push 1 in 1 s$"):
        trainer.send([("a", torch.zeros(8))])
    trainer, _ = pair(timeout=HANG_S, backend="ipc")
    with pytest.raises(NotTaken, match="given up"):
        trainer.send([("a", torch.zeros(8))], given_up=lambda: True)


LENDS = """
import sys, torch
from trireme.ext.remote.weight_group import Meeting, WeightGroup
group = WeightGroup(Meeting("127.0.0.1", int(sys.argv[1]), 2, 1, "ipc", timeout=1200))
group.connect()
print(sum(float(tensor.sum()) for _, tensor in group.receive()), flush=True)
"""


def test_another_process_reads_the_lent_bytes() -> None:
    trainer = WeightGroup(Meeting("127.0.0.1", 0, 2, 0, "ipc", timeout=HANG_S))
    trainer.connect()
    process = subprocess.Popen(
        [sys.executable, "-c", LENDS, f"{trainer.port}"], stdout=subprocess.PIPE, text=True
    )
    trainer.send([(f"{n}", torch.ones(1000)) for n in range(7)], bucket_bytes=8000)
    assert process.communicate(timeout=HANG_S)[0].strip() == "7000.0"


def test_memory_that_is_gone_or_too_small_is_said() -> None:
    lender = Lender(torch.device("cpu"))
    handle = lender.handle(lender.new_bytes(100))
    assert Borrower().copy(handle).numel() == 100
    with pytest.raises(RuntimeError, match="shared memory cannot be read: it has fewer than 101"):
        Borrower().copy(handle | {"size": 101})
    lender.abort()
    with pytest.raises(RuntimeError, match="shared memory cannot be read"):
        Borrower().copy(handle)


class Ipc:
    """CUDA's handles as torch deals with them, in one process: each sharing wraps a storage once
    more and takes an event, of which there are 1,000; what is mapped must not be freed. All that
    it shares lies in one segment of memory, which has one handle.
    """

    def __init__(self) -> None:
        self.shared: list[weakref.ref[torch.UntypedStorage]] = []
        self.mapped = self.most_mapped = self.opened = 0

    def reduce_tensor(self, tensor: Tensor) -> tuple[None, list[Any]]:
        assert tensor.storage_offset() == 0
        self.shared.append(weakref.ref(tensor.untyped_storage()))
        parts: list[Any] = [0] * 15
        parts[7], parts[11], parts[13] = b"segment", b"counters", b"event"
        parts[8], parts[9] = tensor.untyped_storage().nbytes(), (len(self.shared) - 1) * 2**21
        return None, parts

    def rebuild_cuda_tensor(self, _: Any, size: torch.Size, *parts: Any) -> Tensor:
        storage = self.shared[parts[7] // 2**21]()
        assert storage is not None, "its owner has freed it"
        view = torch.empty(0, dtype=torch.uint8).set_(storage, 0, tuple(size), (1,))
        self.mapped += 1
        self.opened += 1
        self.most_mapped = max(self.mapped, self.most_mapped)
        weakref.finalize(view, self._closed)
        return view

    def _closed(self) -> None:
        self.mapped -= 1


@contextmanager
def lending_as_cuda(ipc: Ipc) -> Iterator[None]:
    reductions = "torch.multiprocessing.reductions"
    with (
        patch.object(Lender, "on_gpu", True),
        patch(f"{reductions}.reduce_tensor", ipc.reduce_tensor),
        patch(f"{reductions}.rebuild_cuda_tensor", ipc.rebuild_cuda_tensor),
        patch("torch.cuda.current_stream", lambda _: SimpleNamespace(synchronize=lambda: None)),
        patch("torch.cuda.current_device", lambda: 0),
    ):
        yield


def test_a_gpus_bucket_is_shared_and_mapped_once_a_push_and_freed_after_it() -> None:
    """Shared anew for each bucket, torch would wrap one memory hundreds of thousands of times, and
    end in a stack overflow when it is freed.
    """
    ipc = Ipc()
    trainer, engine = pair(backend="ipc")
    sent = {f"{n}": torch.full((64,), float(n)) for n in range(20)}
    sent["large"] = torch.randn(1000)
    with lending_as_cuda(ipc), ThreadPoolExecutor() as pool:
        for push in (1, 2):
            sending = pool.submit(trainer.send, sent.items(), bucket_bytes=512)
            received = dict(engine.receive())
            sending.result(timeout=HANG_S)
            assert all(torch.equal(received[name], sent[name]) for name in sent)
            assert len(ipc.shared) == ipc.opened == 2 * push  # and once more for the large one
            assert ipc.mapped == 0 and ipc.most_mapped == 1
            assert all(storage() is None for storage in ipc.shared)


def test_the_end_of_a_push_waits_until_nothing_is_mapped() -> None:
    ipc = Ipc()
    trainer, engine = pair(timeout=1, backend="ipc")
    trainer.connect({1: "engine 0"})
    with lending_as_cuda(ipc), ThreadPoolExecutor() as pool:
        sending = pool.submit(trainer.send, [("a", torch.zeros(8))])
        weights: Any = engine.receive()
        next(weights)  # it has the bucket, and reads no further
        with pytest.raises(NotTaken, match="engine 0 did not reach bucket 2"):
            sending.result(timeout=HANG_S)
        assert ipc.mapped == 1
        weights.close()
        assert ipc.mapped == 0


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ("", []),
        ("max_split_size_mb:512", []),
        (
            "max_split_size_mb:512,expandable_segments:True",
            ["max_split_size_mb:512,expandable_segments:False", None],
        ),
    ],
)
def test_memory_that_is_lent_lies_in_no_segment_that_expands(
    options: str, changed: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch forgets every option that is not said again."""
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append, raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", options)
    with patch.object(Lender, "on_gpu", True):
        Lender(torch.device("cpu")).new_bytes(8)
    assert told == [each or options for each in changed]


@pytest.mark.gpu
def test_another_process_reads_the_lent_memory_of_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    device = torch.device("cuda", 0)
    trainer = WeightGroup(Meeting("127.0.0.1", 0, 2, 0, "ipc", timeout=HANG_S), device)
    trainer.connect()
    process = subprocess.Popen(
        [sys.executable, "-c", LENDS, f"{trainer.port}"], stdout=subprocess.PIPE, text=True
    )
    weights = [(f"{n}", torch.ones(1000, device=device)) for n in range(7)]
    trainer.send(weights, bucket_bytes=8000)
    assert process.communicate(timeout=HANG_S)[0].strip() == "7000.0"


def test_a_sender_that_fails_is_heard_at_once() -> None:
    trainer, engine = pair()

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.zeros(100)
        raise ValueError("no second one")

    with ThreadPoolExecutor() as pool:
        sending = pool.submit(trainer.send, broken(), bucket_bytes=8)
        with pytest.raises(RuntimeError, match="failed while it sent its weights: ValueError: no"):
            list(engine.receive())
        with pytest.raises(ValueError, match="no second one"):
            sending.result()


def test_a_sender_that_is_gone_is_seen_by_the_time_out() -> None:
    trainer, engine = pair(timeout=1)
    with pytest.raises(RuntimeError, match="has broken: the trainer sent nothing in 1 s"):
        list(engine.receive())
    with pytest.raises(RuntimeError, match="its members have not joined"):
        list(engine.receive())
    trainer, engine = pair()
    del trainer  # whose store goes with it
    with pytest.raises(RuntimeError, match="has broken: the trainer is gone"):
        list(engine.receive())


class NeverDone:
    """A broadcast over NCCL to a member that is lost: `wait` returns, and nothing comes."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return False


class LikeNccl:
    """A process group whose collectives end as NCCL's do where a member is lost: never."""

    def __init__(self, work: Callable[[], Any] = NeverDone) -> None:
        self.aborted, self.work = False, work

    def broadcast(self, tensor: Tensor, root: int) -> Any:
        return self.work()

    def abort(self) -> None:
        self.aborted = True


def test_a_broadcast_that_never_ends_names_who_did_not_come_and_is_aborted() -> None:
    trainer = WeightGroup(Meeting("127.0.0.1", 0, 3, 0, timeout=1))
    engines = [WeightGroup(Meeting("127.0.0.1", trainer.port, 3, r, timeout=1)) for r in (1, 2)]
    names = {1: "worker 0 of http://a", 2: "worker 0 of http://b"}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda group: group.connect(names), (trainer, *engines)))
        doubles: list[Any] = [LikeNccl(), LikeNccl()]
        trainer._group, engines[0]._group = doubles
        sending = pool.submit(trainer.send, [("a", torch.zeros(8))])
        taking = pool.submit(lambda: list(engines[0].receive()))  # the other never asks
        late = r"worker 0 of http://b did not reach bucket 1 of push 1 in 1 s"
        for side in (sending, taking):
            with pytest.raises(RuntimeError, match=f"the weight group has broken: {late}"):
                side.result(timeout=HANG_S)
    assert all(double.aborted for double in doubles)


class Failed:
    """A broadcast over NCCL that the network has broken: complete, and `wait` says nothing."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def exception(self) -> Exception:
        return RuntimeError("NCCL communicator encountered error: remote process exited\nframe #0")


def test_a_broadcast_that_ends_in_an_error_of_nccl_brings_no_tensor() -> None:
    trainer, engine = pair()
    doubles: list[Any] = [LikeNccl(Failed), LikeNccl(Failed)]
    trainer._group, engine._group = doubles
    for member in (trainer, engine):
        member._meeting = replace(member._meeting, backend="nccl")
    said = "the weight group has broken: NCCL communicator encountered error: remote process exited"
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(trainer.send, [("a", torch.zeros(8))])
        taking = pool.submit(lambda: list(engine.receive()))
        for side in (sending, taking):
            with pytest.raises(RuntimeError, match=f"{said}$"):
                side.result(timeout=HANG_S)
    assert all(double.aborted for double in doubles)


def test_nccls_watchdog_ends_no_process_whose_weight_group_has_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, seen = "TORCH_NCCL_ASYNC_ERROR_HANDLING", []

    class Nccl:
        class Options:
            _timeout = None

        def __new__(cls, *_: Any) -> Any:
            seen.append(os.environ.get(name))
            return LikeNccl()

    monkeypatch.setattr("torch._C._distributed_c10d.ProcessGroupNCCL", Nccl, raising=False)
    for asked, got in ((None, "2"), ("1", "1")):
        if asked is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, asked)
        trainer = WeightGroup(Meeting("127.0.0.1", 0, 1, 0, "nccl"), torch.device("cpu"))
        trainer.connect()
        assert seen.pop() == got and os.environ.get(name) == asked


MEMBER = """
import os, signal, sys
from trireme.ext.remote.weight_group import Meeting, WeightGroup
group = WeightGroup(Meeting("127.0.0.1", int(sys.argv[1]), 2, 1, timeout=1200))
group.connect()
for name, _ in group.receive():
    print(name, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_member_killed_amid_a_push_ends_the_push_with_a_sentence() -> None:
    trainer = WeightGroup(Meeting("127.0.0.1", 0, 2, 0, timeout=HANG_S))
    tensors = [(f"{n}", torch.zeros(2**20)) for n in range(50)]
    member = subprocess.Popen([sys.executable, "-c", MEMBER, f"{trainer.port}"])
    try:
        trainer.connect({1: "worker 0 of http://a"})
        with pytest.raises(RuntimeError, match="the weight group has broken: "):
            trainer.send(tensors, bucket_bytes=2**22)
        assert member.wait(HANG_S) == -signal.SIGKILL
        with pytest.raises(RuntimeError, match="its members have not joined"):
            trainer.send(tensors)
    finally:
        member.kill()


def test_headers_of_earlier_pushes_do_not_stay_in_the_store() -> None:
    trainer, engine = pair()
    counts = []
    for _ in range(4):
        with ThreadPoolExecutor() as pool:
            sending = pool.submit(trainer.send, [("a", torch.zeros(9)), ("b", torch.zeros(9))])
            assert len(dict(engine.receive())) == 2
            sending.result()
        counts.append(trainer._store.num_keys())
    assert counts[1] == counts[2] == counts[3]


def test_a_push_may_follow_before_the_last_one_is_read() -> None:
    trainer, engine = pair()
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(lambda: [trainer.send([("a", torch.ones(9))]) for _ in range(2)])
        receiving = engine.receive()
        next(receiving)
        wait_for(lambda: trainer._store.check(["push/2/0"]))
        assert list(receiving) == []
        assert [name for name, _ in engine.receive()] == ["a"]
        sending.result()
