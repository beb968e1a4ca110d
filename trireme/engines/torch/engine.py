"""TorchEngine: the embedded engine, continuous batching on Hugging Face models in this process.

One coroutine drives the decoder through the device's thread: pick requests, advance, return the
finished ones. Requests join and leave between advances. Invariants:
- A request that the decoder cannot continue ends alone. If the model itself fails, even on a prompt
  of one token, every waiting and every later caller gets the error: none hangs.
- With a barrier, an advance starts only when every live rollout waits for the engine (barrier.py),
  and requests enter in the order of their keys. The replies of an advance are given out when the
  next one starts, so that workflows and rewards run while the engine computes: what they ask for
  enters one advance later, however fast they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trireme.engines.adapter import adapter_over, is_adapter
from trireme.engines.barrier import RolloutBarrier
from trireme.engines.device import Device
from trireme.engines.engine import Completion, EngineTraits, Health, OnToken, Sampling, broken
from trireme.engines.request import Request, checked_rows, make_requests
from trireme.engines.torch.decoder import Decoder
from trireme.engines.torch.shell import TorchSettings, end_tokens, load_weights
from trireme.engines.weights import fingerprint
from trireme.log import get_logger
from trireme.pictures import Picture

logger = get_logger("engine")

STEPS_PER_HOP = 8
"""Tokens decoded per visit to the device's thread if no other work is waiting; of a small model in
one call, which work that comes meanwhile waits for."""


class TorchEngine:
    """The embedded engine: continuous batching over a torch module."""

    servers = None

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: PreTrainedTokenizerBase,
        device: Device,
        settings: TorchSettings,
        barrier: RolloutBarrier | None = None,
        share_with: PreTrainedModel | None = None,
    ) -> None:
        """`share_with` is a module whose tensors are read in place of loading `model`; of one with
        an adapter the base, to whose outputs pushed adapters are added.
        """
        self.module = settings.module(model, share_with)
        self._settings = settings
        self._adapter = adapter_over(share_with)
        self._shared = share_with is not None and self._adapter.merges
        self._decoder = Decoder(
            self.module,
            tokenizer,
            kv_tokens=settings.kv_tokens,
            prefix_tokens=settings.prefix_tokens,
            fast=settings.fast,
            records_routing=settings.records_routing,
        )
        self.traits = EngineTraits(sees=self._decoder.vision is not None)
        self._tokenizer = tokenizer
        self._device = device
        self._barrier = barrier
        self._ends = end_tokens(self.module, tokenizer)
        self._waiting: list[Request] = []
        self._futures: dict[int, asyncio.Future[Completion]] = {}
        self._rollouts: dict[tuple[Any, ...], list[Request]] = {}  # by batch, task and run
        self._ended: list[Request] = []
        """Requests of the last advance whose callers have not got their replies yet."""
        self._changed: asyncio.Event | None = None
        self._driver: asyncio.Task[None] | None = None
        self._updates = 0
        self._paused = self._closed = False
        self._failure: BaseException | None = None
        self._anonymous = 0
        if barrier is not None:
            barrier.on_change(self._wake)

    @property
    def version(self) -> int:
        """Return the weight version of the next token."""
        return self._decoder.version

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        key: tuple[Any, ...] = (),
        on_token: OnToken | None = None,
        pictures: Sequence[Picture] = (),
    ) -> list[Completion]:
        """Generate `sampling.n` completions of the prompt."""
        self._check()
        requests = self._make(list(ids), sampling, key, pictures)
        loop = asyncio.get_running_loop()
        if on_token is not None:
            for request in requests:
                tell: Any = loop.call_soon_threadsafe
                request.on_token = partial(tell, on_token, request.sample)
        if self._barrier is not None and self._barrier.needs_no_more(key[:3]):
            for request in requests:
                request.is_last = True
        futures = [loop.create_future() for _ in requests]
        for request, future in zip(requests, futures, strict=True):
            self._futures[id(request)] = future
            self._rollouts.setdefault(request.key[:3], []).append(request)
        self._waiting += requests
        self._start()
        try:
            if len(futures) == 1:  # gather takes several times as long
                return [await futures[0]]
            return list(await asyncio.gather(*futures))
        finally:
            for request in requests:  # if the call was cancelled
                if self._futures.pop(id(request), None) is not None:
                    self._drop(request)
                self._rollouts[request.key[:3]].remove(request)
                if not self._rollouts[request.key[:3]]:
                    del self._rollouts[request.key[:3]]

    async def logprobs(
        self,
        ids: Sequence[Sequence[int]],
        *,
        temperature: float = 1.0,
        pictures: Sequence[Picture] = (),
    ) -> list[list[float]]:
        """Return each row's log-probabilities under the current weights."""
        self._check()
        rows = checked_rows(
            ids,
            temperature,
            vocabulary=self._decoder.vocabulary,
            max_model_len=self._settings.max_model_len,
            pictures=pictures,
        )
        return await self._between(self._decoder.score, rows, temperature, pictures)

    async def update_weights(self, source: Any, version: int) -> None:
        """Load new weights between two steps. Raises ValueError if names or shapes are not the
        model's.
        """
        self._check()
        if source is None and not self._shared:
            raise ValueError("this engine has weights of its own: update_weights needs a source")
        await self._between(self._take_weights, source, version)

    async def fingerprint(self) -> dict[str, float]:
        """Return a number for each tensor, an adapter's separate from its base."""
        return await self._between(
            lambda: fingerprint(self._adapter.apart(self.module.state_dict()), self._settings.dtype)
        )

    async def pause(self, *, weights_follow: bool = False) -> None:
        """Stop after the current step, until `resume`; without running requests, free keys and
        values.
        """
        self._paused = True
        await self._between(self._decoder.rest)

    async def resume(self) -> None:
        """Continue after a pause."""
        self._paused = False
        self._wake()

    async def abort(self, key: tuple[Any, ...] = ()) -> int:
        """Abort the requests whose key begins with `key`; return their number."""
        several = self._rollouts.values() if len(key) < 3 else [self._rollouts.get(key[:3], [])]
        aborted = [r for requests in several for r in requests if r.key[: len(key)] == key]
        count = 0
        for request in aborted:
            if not request.has_ended:
                self._drop(request)
                count += 1
            self._finish(request)  # also gives out a whole reply that was held
        return count

    def health(self) -> Health:
        """Return the version and the counts of requests and tokens."""
        self._check()
        decoder = self._decoder
        return Health(
            version=decoder.version,
            running=sum(not request.has_ended for request in decoder.active),
            waiting=len(self._waiting),
            generated_tokens=decoder.generated,
            prefilled_tokens=decoder.prefilled,
            cached_tokens=decoder.cached,
            paused=self._paused,
        )

    async def close(self) -> None:
        """Abort all requests and free the engine's memory."""
        if self._closed:
            return
        await self.abort()
        self._closed = True
        if self._driver is not None:
            self._driver.cancel()
            await asyncio.gather(self._driver, return_exceptions=True)
        await self._device.run(self._decoder.close)
        self._adapter.forget()
        del self.module

    def _make(
        self,
        ids: list[int],
        sampling: Sampling,
        key: tuple[Any, ...],
        pictures: Sequence[Picture],
    ) -> list[Request]:
        """Make one request per sample. Raises ValueError for a prompt that leaves no room."""
        if not key:
            self._anonymous += 1
            key = ((-1, self._anonymous),)
        return make_requests(
            ids,
            sampling,
            key,
            seed=self._settings.seed,
            room=self._settings.kv_tokens,
            max_model_len=self._settings.max_model_len,
            vocabulary=self._decoder.vocabulary,
            ends=self._ends,
            pictures=pictures,
        )

    async def _drive(self) -> None:
        assert self._changed is not None
        try:
            while True:
                while not self._ready():
                    self._changed.clear()
                    await self._changed.wait()
                admitted = self._pick()
                self._give_out()
                self._ended = await self._device.run(self._advance, admitted)
                if self._barrier is None or self._goes_on_elsewhere():
                    self._give_out()
                # Callers that just got a reply may send a request before the next advance.
                await asyncio.sleep(0)
        except BaseException as error:
            if self._closed:
                raise
            self._failure = error
            for future in self._futures.values():
                if not future.done():
                    future.set_exception(broken(error))

    def _advance(self, admitted: list[Request]) -> list[Request]:
        return self._decoder.advance(admitted, steps=STEPS_PER_HOP, hurry=self._is_waited_for)

    def _is_waited_for(self) -> bool:
        """Return whether an advance should end early: for other work on the device, or for a
        request that could be admitted. Never with a barrier: how soon someone asks, the reward of a
        rollout that needs no further reply for example, would decide what is computed together.
        """
        if self._barrier is not None:
            return False
        if self._updates > 0:
            return True
        if not (first := self._waiting[:1]):  # at once: the event loop may remove it meanwhile
            return False
        rows = [*self._decoder.active, *first]
        return self._holds(len(rows), max(r.room for r in rows))

    def _ready(self) -> bool:
        """Return whether the next advance may start. If none will, give out the replies that are
        held for it.
        """
        if self._paused:
            self._give_out()
        waiting = (key for key, requests in self._rollouts.items() if self._unanswered(requests))
        if self._barrier is not None and not self._barrier.open(waiting):  # also if none is left
            return False
        if not self._waiting and not self._decoder.active:
            self._give_out()
            return False
        return not (self._paused or self._updates)

    def _unanswered(self, requests: Sequence[Request]) -> bool:
        """Return whether one of these requests, a rollout's, still lacks its reply."""
        return not self._futures.keys().isdisjoint(map(id, requests))

    def _goes_on_elsewhere(self) -> bool:
        """Return whether a rollout has a reply and another request that is still running: the
        barrier does not wait for what it asks for next, so that it must get its reply at once.
        """
        going = [
            (request, other)
            for request in self._ended
            for other in self._rollouts.get(request.key[:3], ())
            if not other.has_ended
        ]
        for request, other in going:
            if self._barrier is not None and request.key != other.key:
                self._barrier.warn_of_calls_at_once(request.key[:3])
        return bool(going)

    def _give_out(self) -> None:
        """Give the callers of the last advance their replies."""
        ended, self._ended = self._ended, []
        for request in ended:
            self._finish(request)

    def _pick(self) -> list[Request]:
        if self._barrier is not None:
            self._waiting.sort(key=lambda r: r.order)
        rows = len(self._decoder.active)
        longest = max((r.room for r in self._decoder.active), default=0)
        count = 0
        for request in self._waiting:
            longest = max(longest, request.room)
            if not self._holds(rows + count + 1, longest):
                break
            count += 1
        picked, self._waiting = self._waiting[:count], self._waiting[count:]
        return picked

    def _holds(self, rows: int, longest: int) -> bool:
        return rows == 1 or (
            rows <= self._settings.max_rows and rows * longest <= self._settings.kv_tokens
        )

    def _drop(self, request: Request) -> None:
        """Remove a request from the queue, or mark it so that the decoder frees its row."""
        if request.stop_reason is None:
            request.stop_reason = "aborted"
        if request in self._waiting:
            self._waiting.remove(request)
        self._wake()

    def _finish(self, request: Request) -> None:
        future = self._futures.pop(id(request), None)
        rollout = request.key[:3]
        if self._barrier is not None and not self._unanswered(self._rollouts.get(rollout, ())):
            self._barrier.answered(rollout)
        if future is None or future.done():
            return
        try:
            if request.error is not None:
                raise request.error
            future.set_result(request.completion(self._tokenizer))
        except BaseException as error:  # a tokenizer's panic is not an Exception
            failure = RuntimeError(
                f"the engine cannot go on with request {'/'.join(map(str, request.key))}: "
                f"{type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            future.set_exception(failure)
            logger.warning("%s", failure)

    async def _between(self, function: Any, *args: Any) -> Any:
        """Run on the device between two advances; without a barrier a running one ends early."""
        self._updates += 1
        try:
            return await self._device.run(function, *args)
        finally:
            self._updates -= 1
            self._wake()

    def _take_weights(self, source: Any, version: int) -> None:
        if isinstance(source, Mapping) and is_adapter(source):
            self._adapter.take(self.module, source)
        elif source is not None and not self._adapter.merges:
            raise ValueError(
                "this engine reads the base of the trainer's adapter: update_weights takes an "
                "adapter alone, since other weights would overwrite that base"
            )
        elif source is not None:
            load_weights(self.module, source)
            self._adapter.forget()
        self._decoder.renew(version, keep=self._settings.keep_kv)

    def _start(self) -> None:
        if self._driver is None:
            self._changed = asyncio.Event()
            self._driver = asyncio.get_running_loop().create_task(self._drive())
        self._wake()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()

    def _check(self) -> None:
        if self._failure is not None:
            raise broken(self._failure)
        if self._closed:
            raise RuntimeError("the engine is closed")
