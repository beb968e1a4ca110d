"""VllmEngine: implements the engine's contract with vLLM's asynchronous engine, in vLLM's
environment.

- Every sample is a separate request to vLLM, whose prefix cache shares their prompt.
- End tokens and stop strings are detected here, as in the embedded engine, so that both stop at the
  same token.
- New weights: vLLM is frozen, its workers load them, its caches are cleared (running requests are
  prefilled again), and it resumes only when all workers have succeeded. A failure leaves it frozen
  and failed, and every caller gets the error.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase

from trireme.aio import first_failure
from trireme.config.engine_kind import ROUTING
from trireme.config.lookup import model_shapes, names_in, need_weight_files
from trireme.data.picture_reader import reader_for
from trireme.engines.adapter import ENDS, is_adapter
from trireme.engines.engine import Completion, EngineTraits, Health, OnToken, Sampling, broken
from trireme.engines.request import Request, checked_rows, make_requests
from trireme.engines.torch.composite import is_composite, towers_in_files
from trireme.engines.torch.shell import end_tokens_of
from trireme.ext.remote.weight_group import Meeting, WeightGroup
from trireme.ext.vllm.options import (
    ADAPTER,
    OTHER_TEMPERATURE,
    ROUTED,
    SEES,
    STREAM,
    arguments,
    has_temperature,
)
from trireme.ext.vllm.pictures import PictureInputs
from trireme.pictures import BEGIN, Picture
from trireme.serialize import array_from_wire

ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # its sampler is another, see vllm/sampler.py
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # by the one token that scoring a full row needs
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}

WHOLE, CACHE = ("weights", "kv_cache"), ("kv_cache",)
"""vLLM's names for the parts of a sleeping engine that are not in the device's memory: all, or the
second part."""

AT_ONCE = 16
"""Tokens that vLLM hands over together where nobody reads along: each time costs Python some 40
microseconds, which at a token a time is more than a small model's step. After a stop string so many
less one are thrown away."""


class VllmEngine:
    """An engine that generates with a vLLM server of this process."""

    servers = None

    def __init__(
        self,
        llm: Any,
        *,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        max_model_len: int,
        seed: int,
        sockets: tempfile.TemporaryDirectory[str],
        group_size: int = 1,
        keep_kv: bool = False,
        sleeps: bool = False,
        gives_up: bool = False,
        adapts: bool = False,
        pictures: PictureInputs | None = None,
        records_routing: bool = False,
    ) -> None:
        """`llm` is an AsyncLLM whose workers are prepared: see `start`; it has `group_size` of
        them, and `sockets` go with it. `keep_kv` continues with old keys and values after an update
        in flight. `sleeps`: while paused, its keys and values are freed and its weights are in the
        machine's memory, or nowhere if it `gives_up` old ones and new ones follow. `adapts`: pushes
        bring a LoRA adapter. `pictures` makes the inputs of prompts that show some; None: it has no
        tower. `records_routing`: completions have the experts that computed their tokens.
        """
        self._records_routing = records_routing
        self.traits = EngineTraits(sees=pictures is not None)
        self._pictures = pictures
        self.group_size = group_size
        self._llm: Any = llm
        self._sockets = sockets
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._seed = seed
        self._keep_kv = keep_kv
        self._sleeps = sleeps
        self._gives_up = gives_up
        self._lacks_weights = False
        self._model = model
        self._names = tensor_names(model)
        self._adapts = adapts
        self._adapter: Any = None
        """The LoRA request that is attached to every generation, once there is one."""
        self._ends = end_tokens_of(model, tokenizer)
        config = AutoConfig.from_pretrained(model)
        self._vocabulary: int = config.get_text_config().vocab_size
        self._rows: dict[asyncio.Future[Completion], Request] = {}
        self._given_up: list[str] = []
        """Names of cancelled requests, whose experts nobody will ask for."""
        self._count = itertools.count()
        self._version = 0
        self._generated = self._prefilled = self._cached = 0
        self._paused = self._closed = False
        self._asleep: tuple[str, ...] = ()
        self._failure: BaseException | None = None
        self._own: WeightGroup | None = None
        """A group with our workers, for weights that arrive by HTTP."""
        self._updating = asyncio.Lock()
        self._scoring = asyncio.Lock()
        self._score_temperature = 1.0

    @classmethod
    async def start(
        cls,
        model: str,
        *,
        tokenizer: PreTrainedTokenizerBase,
        max_model_len: int,
        dtype: str,
        seed: int = 42,
        options: Mapping[str, Any] | None = None,
    ) -> VllmEngine:
        """Start vLLM on a model's folder. Raises TypeError for arguments that it does not know."""
        # its sockets, some of which vLLM leaves behind
        sockets = tempfile.TemporaryDirectory(prefix="trireme-vllm-")
        for name, value in (ENVIRONMENT | {"VLLM_RPC_BASE_PATH": sockets.name}).items():
            os.environ.setdefault(name, value)
        vllm: Any = import_module("vllm")
        core: Any = import_module("vllm.v1.engine.async_llm")
        platforms: Any = import_module("vllm.platforms")

        options = dict(options or {})
        reader = reader_for(model) if options.pop(SEES, False) else None
        if reader is not None:
            # vLLM makes up pictures to measure its tower, with a tokenizer of its own; those that
            # are sent to it are normalized, and no cache of its own has to know them
            options |= {"skip_tokenizer_init": False, "mm_processor_cache_gb": 0}
            options["mm_device_do_normalize"] = False
        elif is_composite(AutoConfig.from_pretrained(model)):
            options["language_model_only"] = True
        sleeps = bool(options.get("enable_sleep_mode"))
        keep_kv = bool(options.pop("keep_kv", False))
        # pushes of an adapter, or of a composite's text, leave out what level 2 would drop
        partial = "max_lora_rank" in options or is_composite(AutoConfig.from_pretrained(model))
        gives_up = options.pop("sleep_level", 1) == 2 and not partial
        if records := bool(options.pop(ROUTING, False)):
            options["enforce_eager"] = True  # what is captured does not run again in a CUDA graph
        if "max_lora_rank" in options:
            # with an adapter on the head vLLM cannot score prompts: it treats them as one row each
            shapes = model_shapes(Path(model)).items()
            layers = {name.split(".")[-2] for name, shape in shapes if len(shape) == 2}
            options["lora_target_modules"] = sorted(layers - ENDS)
        engine_arguments = arguments(
            model,
            max_model_len=max_model_len,
            dtype=dtype,
            seed=seed,
            options=options,
            on_cpu=platforms.current_platform.is_cpu(),
        )
        parallel = ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size")
        # vLLM's batch sizes follow from it: by default they are the smallest, 128 requests at once
        context = import_module("vllm.usage.usage_lib").UsageContext.OPENAI_API_SERVER
        llm = core.AsyncLLM.from_engine_args(
            vllm.AsyncEngineArgs(**engine_arguments), usage_context=context
        )
        engine = cls(
            llm,
            model=model,
            tokenizer=tokenizer,
            max_model_len=max_model_len,
            seed=seed,
            group_size=math.prod(engine_arguments.get(name, 1) for name in parallel),
            keep_kv=keep_kv,
            sleeps=sleeps,
            gives_up=gives_up,
            adapts=bool(engine_arguments.get("enable_lora")),
            sockets=sockets,
            pictures=None
            if reader is None
            else PictureInputs(llm.renderer.get_mm_processor(), reader),
            records_routing=records,
        )
        await llm.collective_rpc("trireme_prepare", args=(sorted(engine._names), dtype))
        if records:
            await llm.collective_rpc("trireme_record_routing")
        return engine

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        key: tuple[Any, ...] = (),
        on_token: OnToken | None = None,
        pictures: Sequence[Picture] = (),
    ) -> list[Completion]:
        """Sample `sampling.n` completions of the prompt `ids`, which may show `pictures`."""
        self._check()
        if not has_temperature(sampling.temperature):
            raise ValueError(f"temperature is {sampling.temperature:g}: {OTHER_TEMPERATURE}")
        requests = make_requests(
            ids,
            sampling,
            key or ((-1, next(self._count)),),
            seed=self._seed,
            room=self._max_model_len,
            max_model_len=self._max_model_len,
            vocabulary=self._vocabulary,
            ends=self._ends,
            pictures=pictures,
        )
        prompt = self._input(requests[0].prompt, requests[0].pictures)  # with pixels, once
        rows = {asyncio.ensure_future(self._sample(r, prompt, on_token)): r for r in requests}
        self._rows |= rows
        try:
            return list(await asyncio.gather(*rows))
        finally:
            for row in rows:
                row.cancel()  # if the call was cancelled, or a sibling has failed
                del self._rows[row]

    async def logprobs(
        self,
        ids: Sequence[Sequence[int]],
        *,
        temperature: float = 1.0,
        pictures: Sequence[Picture] = (),
    ) -> list[list[float]]:
        """Score the rows of token ids, 0 for tokens of `pictures`. Raises RuntimeError while
        paused: nothing is computed then.
        """
        self._check()
        if self._paused:
            raise RuntimeError("the engine is paused: it scores nothing until it is resumed")
        rows = checked_rows(
            ids,
            temperature,
            vocabulary=self._vocabulary,
            max_model_len=self._max_model_len,
            pictures=pictures,
        )
        temperature = temperature or 1.0  # greedy ones are scored by the model's own distribution
        async with self._scoring:  # all rows of one time have one temperature
            if temperature != self._score_temperature:
                await self._rpc("trireme_score_at", temperature)
                self._score_temperature = temperature
            return list(await asyncio.gather(*(self._score(row, pictures) for row in rows)))

    async def update_weights(self, source: Any, version: int) -> None:
        """Put new weights to use as `version`. Raises ValueError if names are not the model's."""
        self._check()
        if source is None:
            raise ValueError("this engine has weights of its own: update_weights needs a source")
        if isinstance(source, str | Path):
            self._examine(tensor_names(source))
            await self._renew(version, lambda: self._take_in(path=str(source)))
            return
        if not is_adapter(source):
            self._examine(set(source))
        await self._renew(version, lambda: self._hand_out(source))

    async def join_group(self, meeting: Meeting) -> None:
        """Join a trainer's weight group; each worker has its own rank. See
        server/group_routes.py.
        """
        self._check()
        await self._join("trainer", asdict(meeting))

    async def receive_weights(self) -> None:
        """Freeze, and receive the weights that the trainer broadcasts. `commit_weights` resumes.

        Asleep next to a trainer, it wakes with its weights only: their values arrive now, and there
        is no room yet for keys and values.
        """
        self._check()
        async with self._updating:
            if self._asleep == WHOLE:
                await self._llm.wake_up(tags=["weights"])
                self._asleep = CACHE
            await self._freeze_and(lambda: self._take_in(leader="trainer"))

    async def commit_weights(self, version: int) -> None:
        """Use the received weights, and resume."""
        self._check()
        async with self._updating:
            await self._go_on(version)

    async def fingerprint(self) -> dict[str, float] | None:
        """Return the fingerprints of the last received weights, as the layers use them; None at
        first. A tensor of which the workers have different ones is missing.
        """
        self._check()
        first, *others = await self._rpc("trireme_fingerprint")
        if any(other is None for other in (first, *others)):
            return None if first is None and not any(others) else {}
        agreed = set(first.items()).intersection(*(other.items() for other in others))
        return {name: mark for name, mark in first.items() if (name, mark) in agreed}

    async def pause(self, *, weights_follow: bool = False) -> None:
        """Stop generating and keep all requests; with sleep mode, free the GPU's memory. vLLM's
        level 1 copies the weights to the machine's memory, level 2 drops them.
        """
        self._check()
        async with self._updating:
            self._paused = True
            if self._sleeps:  # if vLLM cannot sleep, on a CPU, this is a pause
                if not self._asleep:  # asleep it stays as deep as it is
                    self._lacks_weights = weights_follow and self._gives_up
                    level = 2 if self._lacks_weights else 1
                    await self._llm.sleep(level=level, mode="keep")
                    self._asleep = WHOLE
            else:
                await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        """Continue after `pause`. Raises RuntimeError if weights that were to follow have not."""
        self._check()
        if self._lacks_weights:
            raise RuntimeError(
                "vLLM sleeps without weights, since new ones were to follow, and none have come: "
                "expected a push first (explorer.rollout_model.sleep_level: 1 keeps the old ones)"
            )
        async with self._updating:
            self._paused = False
            if self._sleeps:  # an engine that is awake cannot be woken again
                await self._llm.wake_up(tags=list(self._asleep) or None)
                self._asleep = ()
            else:
                await self._llm.resume_generation()

    async def abort(self, key: tuple[Any, ...] = ()) -> int:
        """Abort the requests whose key begins with `key`, and return their number."""
        count = 0
        for row, request in self._rows.items():
            if request.key[: len(key)] == key and request.stop_reason is None and not row.done():
                request.stop_reason = "aborted"
                self._end_soon(row, request)
                count += 1
        return count

    def health(self) -> Health:
        """Report the version, the numbers of requests, and the token counts."""
        self._check()
        live = len(self._rows)
        return Health(
            version=self._version,
            running=0 if self._paused else live,
            waiting=live if self._paused else 0,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            cached_tokens=self._cached,
            paused=self._paused,
        )

    async def close(self) -> None:
        """Abort all requests and shut vLLM down."""
        if self._closed:
            return
        await self.abort()
        self._closed = True
        await asyncio.gather(*self._rows, return_exceptions=True)
        self._llm.shutdown()
        # otherwise the interpreter's end would shut it down again, with half of vLLM gone
        self._llm = None
        self._sockets.cleanup()

    def _end_soon(self, row: asyncio.Future[Completion], request: Request) -> None:
        """End a row unless a token ends it first. One that came just now begins before that: else
        it would end without a reply.
        """

        def end() -> None:
            if request.stop_reason in (None, "aborted"):
                row.cancel()

        asyncio.get_running_loop().call_soon(end)

    async def _sample(
        self, request: Request, prompt: Mapping[str, Any], on_token: OnToken | None
    ) -> Completion:
        name = f"{next(self._count)}"
        params = _params(request, at_once=1 if on_token is not None else AT_ONCE)
        if self._records_routing:
            params.extra_args[ROUTED] = name
        if request.pictures and self._pictures is not None:
            params._bad_words_token_ids = [[token] for token in self._pictures.reader.unsampled]
        stream = self._llm.generate(dict(prompt), params, name, lora_request=self._adapter)
        first = True
        try:
            async for output in stream:
                if first:
                    cached = output.num_cached_tokens or 0
                    self._cached += cached
                    self._prefilled += len(request.prompt) - cached
                    first = False
                if self._take(request, output.outputs[0], on_token):
                    break
        except asyncio.CancelledError:
            if request.stop_reason is None and self._failure is not None:
                raise broken(self._failure) from None
            if request.stop_reason is None:
                raise
        except Exception as error:
            raise self._failed(error) from error
        finally:
            if request.stop_reason is None and self._records_routing:
                self._given_up.append(name)
            await stream.aclose()
            if request.stop_reason is not None:
                await self._llm.abort(name)  # it may be on its way past a stop string
        if request.stop_reason is None:
            raise RuntimeError(f"vLLM has ended request {request.key} without a reason")
        if self._records_routing and self._failure is None:
            request.routed_experts = await self._routing(request, name)
        return request.completion(self._tokenizer)

    async def _routing(self, request: Request, name: str) -> np.ndarray | None:
        """Return the experts of a request's tokens; None if vLLM has lost them, or computes them
        again. Raises RuntimeError if its kernels reported none.
        """
        given_up, self._given_up = self._given_up, []
        try:
            wire = (await self._rpc("trireme_routing", name, given_up))[0]
        except Exception as error:
            raise self._failed(error) from error
        length = len(request.ids) - 1
        if wire is None or len(experts := array_from_wire(wire)) < length:
            return None
        experts = experts[:length]
        if experts.shape[2] > 1 and (experts[:, :, 0] == experts[:, :, 1]).any():
            raise RuntimeError(
                "vLLM has recorded one expert twice for a token: its kernels for this model do not "
                "report experts, expected algorithm.enable_router_replay false"
            )
        return experts

    def _take(self, request: Request, part: Any, on_token: OnToken | None) -> bool:
        """Add new tokens; returns whether they end the request."""
        rows = part.logprobs
        for index, token in enumerate(part.token_ids):
            begin, end = rows.start_indices[index], rows.end_indices[index]
            pairs = list(zip(rows.token_ids[begin:end], rows.logprobs[begin:end], strict=True))
            (_, logprob), (mark, sampler_logprob), *best = pairs
            alternatives = dict(best[: request.sampling.logprobs])
            ended = request.add(token, logprob, sampler_logprob, -1 - mark, self._tokenizer)
            self._generated += 1
            if request.sampling.logprobs:
                request.alternatives.append(alternatives)
            if on_token is not None:
                on_token(request.sample, token, logprob, alternatives)
            if ended:
                return True
        return False

    def _input(self, ids: list[int], pictures: Sequence[Picture]) -> dict[str, Any]:
        shown = [token for token in ids if token >= BEGIN] if pictures else []
        if not shown:
            return {"prompt_token_ids": ids}
        assert self._pictures is not None, "an engine without a tower is sent no pictures"
        return self._pictures.of(ids, pictures)

    async def _score(self, row: list[int], pictures: Sequence[Picture]) -> list[float]:
        vllm: Any = import_module("vllm")
        params = vllm.SamplingParams(
            max_tokens=1, prompt_logprobs=0, detokenize=False, flat_logprobs=True, temperature=0
        )
        name = f"score-{next(self._count)}"
        try:
            stream = self._llm.generate(
                self._input(row, pictures), params, name, lora_request=self._adapter
            )
            async for output in stream:
                if output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(row):
                    scored = zip(row[1:], output.prompt_logprobs.logprobs, strict=True)
                    return [0.0, *(0.0 if token >= BEGIN else p for token, p in scored)]
        except Exception as error:
            raise self._failed(error) from error
        raise RuntimeError("vLLM has scored no token of a row")

    async def _renew(self, version: int, take: Callable[[], Any]) -> None:
        """Freeze, let the workers load their weights, resume. A failure leaves it frozen."""
        async with self._updating:
            await self._freeze_and(take)
            await self._go_on(version)

    async def _join(self, leader: str, meeting: dict[str, Any]) -> None:
        """Make each worker join a group with its own rank."""
        base: Any = import_module("vllm.distributed.weight_transfer.base")
        joining = {"meeting": meeting, "leader": leader}
        await self._llm.init_weight_transfer_engine(base.WeightTransferInitRequest(joining))

    async def _take_in(self, **update: str) -> None:
        """Make the workers load new weights, or an adapter. `update`: see Arriving."""
        if self._adapts:
            await self._rpc("trireme_adapt", update)
            return
        base: Any = import_module("vllm.distributed.weight_transfer.base")
        await self._llm.start_weight_update()
        await self._llm.update_weights(base.WeightTransferUpdateRequest(update))
        await self._llm.finish_weight_update()
        await self._rpc("trireme_settle")

    async def _hand_out(self, tensors: Mapping[str, Tensor]) -> None:
        """Broadcast them to our workers, a bucket at a time: neither a file nor a shared memory
        folder, of which a container has 64 MB, has to contain them all.
        """
        if self._own is None:
            own = WeightGroup(Meeting("127.0.0.1", 0, 1 + self.group_size, 0))
            meeting = asdict(Meeting("127.0.0.1", own.port, 1 + self.group_size, 1))
            await first_failure(asyncio.to_thread(own.connect), self._join("engine", meeting))
            self._own = own
        try:
            await first_failure(
                asyncio.to_thread(self._own.send, tensors.items()), self._take_in(leader="engine")
            )
        except BaseException:
            self._own = None
            raise

    async def _freeze_and(self, take: Callable[[], Any]) -> None:
        await self._llm.pause_generation(mode="keep", clear_cache=not self._keep_kv)
        try:
            await take()
            if self._adapts and self._adapter is None and self._rows:
                raise RuntimeError(
                    f"the first adapter arrived while {len(self._rows)} requests were in flight "
                    "without one: expected it before they begin"
                )
        except Exception as error:
            self._failure = error
            for row, request in self._rows.items():  # no token of theirs will come
                self._end_soon(row, request)
            raise
        self._lacks_weights = False
        if self._adapts and self._adapter is None:
            requests: Any = import_module("vllm.lora.request")
            self._adapter = requests.LoRARequest(*ADAPTER, "is loaded")

    async def _go_on(self, version: int) -> None:
        await self._rpc("trireme_set_version", version)
        self._version = version
        if not self._paused:
            await self._llm.resume_generation()

    def _examine(self, names: set[str]) -> None:
        held = {part for name in names for part in _parts_of(names_in(self._names, name))}
        missing = sorted(self._names - held)
        if missing and set(missing) == set(towers_in_files(self._model).values()):
            missing = []  # they stay what they are, see transfer.py
        foreign = sorted(held - self._names - {"lm_head.weight"})
        if missing or foreign:
            raise ValueError(
                f"these weights do not belong to this model: {len(missing)} tensors are missing "
                f"({', '.join(missing[:3])}), {len(foreign)} are not known "
                f"({', '.join(foreign[:3])})"
            )

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        return await self._llm.collective_rpc(method, args=args)

    def _failed(self, error: Exception) -> Exception:
        """Return vLLM's own refusal of a request as it is; the end of its process as our error."""
        if not self._llm.errored:
            return error
        self._failure = self._failure or error
        return broken(self._failure)

    def _check(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")
        if self._failure is None and self._llm.errored:
            self._failure = self._llm.dead_error
        if self._failure is not None:
            raise broken(self._failure)


def tensor_names(path: str | Path) -> set[str]:
    """Names in a folder's safetensors files, or in one file."""
    names: set[str] = set()
    for file in need_weight_files(path):
        with safe_open(file, framework="pt") as tensors:
            names |= set(tensors.keys())
    return names


def _parts_of(held: str | list[list[str]]) -> Sequence[str]:
    return [held] if isinstance(held, str) else [part for parts in held for part in parts]


def _params(request: Request, *, at_once: int) -> Any:
    """Convert to vLLM's parameters. End tokens are passed as ids, so that a minimum length holds
    for all of them. `at_once`: the number of new tokens that vLLM hands over together.
    """
    vllm: Any = import_module("vllm")
    kinds: Any = import_module("vllm.sampling_params").RequestOutputKind
    s = request.sampling
    return vllm.SamplingParams(
        max_tokens=request.max_tokens,
        min_tokens=min(s.min_tokens, request.max_tokens),
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=max(s.top_k, 0),
        min_p=s.min_p,
        repetition_penalty=s.repetition_penalty,
        stop_token_ids=sorted(request.ends),
        ignore_eos=True,
        extra_args={STREAM: request.stream},
        logprobs=1 + s.logprobs,
        flat_logprobs=True,
        detokenize=False,
        output_kind=kinds.DELTA,
        stream_interval=at_once,
    )
