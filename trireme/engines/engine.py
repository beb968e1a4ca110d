"""Engine: the contract of everything that generates tokens.

Every caller of an engine makes its Sampling here, so that all refuse the same options with the same
sentence.
"""

from __future__ import annotations

import asyncio
import dataclasses
import reprlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from trireme.aio import CancelledElsewhere
from trireme.pictures import Picture
from trireme.registry import did_you_mean

if TYPE_CHECKING:
    import numpy as np

    from trireme.engines.device import ColocationLock

StopReason = Literal["stop", "length", "aborted"]

COLDEST, HOTTEST = 1e-6, 100
"""Limits of the temperature: between 0 and the coldest one float32 would overflow."""
MOST_SAMPLES = 16384
"""Limit of one request to a server, over all of its prompts."""


MOST_ALTERNATIVES = 64
"""Limit of the likeliest tokens that are reported for each sampled one."""
MOST_STOPS = 1024
"""Most token ids that may end a sample."""
_HEAT = f"0 (greedy), or a number from {COLDEST:g} to {HOTTEST}"


def _not_too_cold(temperature: float) -> float:
    if 0 < temperature < COLDEST:
        raise ValueError("too close to 0")
    return temperature


def _as_tuple(value: Any) -> Any:
    if isinstance(value, str):
        return (value,)
    # more values than the limit need not be validated to be refused
    return tuple(value[: MOST_STOPS + 1]) if isinstance(value, list) else value


def _whole(least: int, most: int) -> Any:
    return Field(ge=least, le=most, description=f"an integer from {least} to {most}")


@checked_dataclass(frozen=True, config=ConfigDict(strict=True, allow_inf_nan=False))
class Sampling:
    """How to sample one request. Defaults sample from the model's own distribution.

    Types and ranges are checked on creation, so that no engine gets options that it cannot run:
    raises pydantic's ValidationError, a ValueError. `what_is_wrong` makes its sentence.
    """

    max_tokens: Annotated[int, _whole(1, 2**31 - 1)] = 128
    """Most new tokens; cut to the room that the model's length leaves."""
    min_tokens: Annotated[int, _whole(0, 2**31 - 1)] = 0
    """No end-of-sequence and no stop before this many tokens."""
    n: Annotated[int, _whole(1, 1024)] = 1
    """Independent samples of the same prompt; they share one prefill."""
    temperature: Annotated[
        float,
        Field(ge=0, le=HOTTEST, description=_HEAT),
        AfterValidator(_not_too_cold),
    ] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1, description="a number above 0, at most 1")] = 1.0
    top_k: Annotated[int, _whole(-1, 2**31 - 1)] = -1
    """-1 or 0: off."""
    min_p: Annotated[float, Field(ge=0, le=1, description="a number from 0 to 1")] = 0.0
    """Drop tokens less likely than min_p times the likeliest one."""
    repetition_penalty: Annotated[
        float, Field(ge=0.01, le=100, description="a number from 0.01 to 100")
    ] = 1.0
    """Divides positive logits (multiplies negative ones) of tokens seen in prompt or reply (CTRL).
    """
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=1024)], ...],
        BeforeValidator(_as_tuple),
        Field(max_length=64, description="at most 64 texts of 1 to 1024 characters"),
    ] = ()
    """Stop strings. The tokens that complete one stay in the ids; `Completion.text` is cut before
    it. One that is a special token of the tokenizer's is a stop token.
    """
    stop_token_ids: Annotated[
        tuple[Annotated[int, Field(ge=0, le=2**31 - 1)], ...],
        BeforeValidator(_as_tuple),
        Field(max_length=MOST_STOPS, description=f"at most {MOST_STOPS} token ids"),
    ] = ()
    ignore_eos: Annotated[bool, Field(description="true or false")] = False
    seed: Annotated[
        int | None, Field(ge=-(2**63), le=2**63 - 1, description="an integer of 64 bits")
    ] = None
    """Random stream of this request; None: derived from the engine's seed and the request's key."""
    logprobs: Annotated[int, _whole(0, MOST_ALTERNATIVES)] = 0
    """Number of likeliest alternatives to report per token, in addition to the sampled one."""


@dataclass
class Completion:
    """One sample. All lists have one entry per sampled token, an end token included."""

    ids: list[int]
    logprobs: list[float]
    """log-softmax(logits / temperature), no truncation, no penalty. Greedy: temperature 1."""
    sampler_logprobs: list[float]
    """Log-probabilities under the distribution actually drawn from: penalties, top-k, top-p and
    min-p applied. Greedy: 0.
    """
    versions: list[int]
    """The weight version that sampled each token."""
    stop_reason: StopReason
    stop: str | int | None = None
    """The stop string or token id that ended it; None at the end-of-sequence token or a cut."""
    text: str = ""
    """The ids decoded, without special tokens, cut before a stop string."""
    alternatives: list[dict[int, float]] = field(default_factory=list)
    """Per token the `Sampling.logprobs` likeliest ids with their log-probabilities, if asked for.
    """
    reported_tokens: float | None = None
    """The number of sampled tokens that an API reports, since `ids` are not its own; NaN if it
    reports none. None for any other engine."""
    routed_experts: np.ndarray | None = field(default=None, compare=False, repr=False)
    """[N, L, K] the numbers of the experts that computed tokens in each layer with experts: of the
    last N tokens of prompt and reply before the reply's last one, which no pass computed. None if
    they are not recorded."""


OnToken = Callable[[int, int, float, dict[int, float]], None]
"""Called per token: the sample's index, the token's id, its log-probability, and the
alternatives."""


@dataclass(frozen=True)
class Health:
    """A snapshot for progress displays and watchdogs."""

    version: int
    running: int
    """Requests that get further tokens: not aborted ones, even before their rows are freed."""
    waiting: int
    generated_tokens: int
    prefilled_tokens: int
    cached_tokens: int
    paused: bool = False


@dataclass(frozen=True)
class EngineTraits:
    """Properties of an engine that a run checks before it uses the engine."""

    pushes: Mapping[str, str] = field(default_factory=lambda: {"memory": "memory"})
    """The names in PUSHES of the methods by which the engine gets new weights: for `sync_method`
    memory and nccl, and for `paired`, if it shares a device with one of the trainer's ranks."""
    model: str = "tokens"
    """The name in MODELS of the model that workflows use: with `messages`, conversations reach the
    engine as they are, since its ids are not the run's (ext/external_model).
    """
    sees: bool = False
    """Whether prompts may show pictures: it is a SeeingEngine then."""
    members: int = 1
    """Engines behind this one: the rows of a call of `logprobs` go to them in turn."""


class Restartable(Protocol):
    """Servers that may be restarted while a run uses them: see ext/remote/servers.py."""

    renew: Callable[[Callable[[], bool]], Awaitable[None]] | None
    """Pushes the run's weights to all servers; None: they serve only the original model."""
    colocation: ColocationLock | None
    """The lock of a trainer that shares their devices; a server is started again in their turn."""

    async def persist(self, push: Callable[[], Awaitable[Any]]) -> Any:
        """Return the result of a push; it is repeated if a server was gone."""
        ...


class Wakes(Protocol):
    """A lock that lets engines work that share a trainer's devices: a ColocationLock, here or in
    another process.
    """

    async def for_engine(self) -> None:
        """Return once the engines may work."""
        ...


class Engine(Protocol):
    """Generates from token ids. All methods are safe to call from the event loop that owns it."""

    traits: EngineTraits

    @property
    def servers(self) -> Restartable | None:
        """The servers that it calls; None: it ends with this process."""
        ...

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        key: tuple[Any, ...] = (),
        on_token: OnToken | None = None,
    ) -> list[Completion]:
        """Return `sampling.n` completions of one prompt.

        `key` is (batch, task, run, call): in deterministic mode requests enter in its order, and it
        seeds the random stream. `on_token` is called on the event loop for each token as it is
        sampled; an engine that cannot stream ignores it. Cancelling the call aborts its rows.
        Raises ValueError for a prompt that leaves no room, RuntimeError when the engine has failed
        or is closed.
        """
        ...

    async def logprobs(
        self, ids: Sequence[Sequence[int]], *, temperature: float = 1.0
    ) -> list[list[float]]:
        """Return log p(token t | earlier) of given sequences, one number per token; index 0
        is 0.
        """
        ...

    async def update_weights(self, source: Any, version: int) -> None:
        """Load new weights between two decode steps; tokens sampled from now on carry `version`.

        `source`: None (tensors are shared: only the version changes), a state dict name -> tensor,
        which may lack the towers of a composite (see engines/torch/composite.py), a LoRA adapter
        for the engine's base weights (see engines/adapter.py), or a folder with safetensors.
        """
        ...

    async def fingerprint(self) -> dict[str, float] | None:
        """Return a number for each tensor, in the engine's dtype, an adapter's tensors listed
        separately from its base (engines/weights.py); None if the engine has none to report.
        """
        ...

    async def pause(self, *, weights_follow: bool = False) -> None:
        """Stop decoding after the current step; requests wait. Without running requests an engine
        may free keys and values. `weights_follow`: new weights arrive before `resume`, so that it
        may give up its own.
        """
        ...

    async def resume(self) -> None:
        """Continue after `pause`."""
        ...

    async def abort(self, key: tuple[Any, ...] = ()) -> int:
        """End the requests whose key begins with `key` (all for ()), and return their number; they
        return as `aborted`.
        """
        ...

    def health(self) -> Health:
        """Return the current counts; raises RuntimeError with the first cause if the engine has
        failed.
        """
        ...

    async def close(self) -> None:
        """Abort everything and free memory."""
        ...


class SeeingEngine(Engine, Protocol):
    """An engine whose prompts may show pictures: `pictures` are those of the ids."""

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        key: tuple[Any, ...] = (),
        on_token: OnToken | None = None,
        pictures: Sequence[Picture] = (),
    ) -> list[Completion]:
        """Return completions, as any engine does. Raises ValueError if a picture is missing."""
        ...

    async def logprobs(
        self,
        ids: Sequence[Sequence[int]],
        *,
        temperature: float = 1.0,
        pictures: Sequence[Picture] = (),
    ) -> list[list[float]]:
        """Return log-probabilities, as any engine does; tokens of pictures get 0."""
        ...


class ServedEngine(Engine, Protocol):
    """An engine in other processes, behind servers."""

    colocation: Wakes | None
    """The lock shared with a trainer that uses the same accelerator."""

    async def connect(self) -> None:
        """Wait until all servers are there, and awake. Raises TimeoutError naming who is not."""
        ...

    async def versions(self) -> list[int]:
        """Return the version of each server's weights; 0: those that it was started with."""
        ...


def broken(failure: BaseException) -> RuntimeError:
    """Return the error that callers of an engine get once it has failed. Cancelled, it has failed
    as well: other code has done that.
    """
    if isinstance(failure, asyncio.CancelledError):
        failure = CancelledElsewhere("its task")
    error = RuntimeError(f"the engine has failed: {type(failure).__name__}: {failure}")
    error.__cause__ = failure
    return error


_NAMES = tuple(field.name for field in dataclasses.fields(Sampling))


def with_options(base: Sampling, overrides: Mapping[str, Any]) -> Sampling:
    """Apply the options of one call to `base`; None leaves an option as it is.

    Raises ValueError, which names the option, for an unknown one, or a value of another type or out
    of its range.
    """
    options = {name: value for name, value in overrides.items() if value is not None}
    if not options:
        return base
    for name in options:
        if name not in _NAMES:
            hint = did_you_mean(name, _NAMES, "did you mean '{}'? ")
            raise ValueError(f"sampling has no option '{name}': {hint}It has: {', '.join(_NAMES)}")
    try:
        return dataclasses.replace(base, **options)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        fields: Mapping[str, Any] = Sampling.__pydantic_fields__  # pyright: ignore
        raise ValueError(
            f"sampling {name} is {brief(options.get(name)):.80}: expected "
            f"{fields[name].description}"
        ) from None


def what_is_wrong(errors: Sequence[Any]) -> str:
    """Return one of a request's errors as a sentence: the field, the given and the expected value.

    It is the first of the innermost errors: if a field may have one of several types, that of the
    type that the value resembles.
    """
    first = max(errors, key=lambda e: (len(e["loc"]), not e["type"].endswith("_type")))
    field = ".".join(str(part) for part in first["loc"] if part != "body")
    if first["type"] == "value_error":  # ours; a check of the whole body names its key
        sentence = str(first["ctx"]["error"])
        return f"the request's {field}: {sentence}" if field else sentence
    field = field or "body"
    if first["type"] == "missing":
        return f"the request's {field}: {first['msg']}"
    return f"the request's {field}: {first['msg']}, and it is {brief(first.get('input')):.80}"


_brief = reprlib.Repr()
_brief.maxlist = _brief.maxtuple = _brief.maxdict = 40
_brief.maxstring = _brief.maxother = _brief.maxlong = 100


def brief(value: Any) -> str:
    """Return the beginning of `repr` without computing the rest: a client's list may have millions
    of items.
    """
    return _brief.repr(value)
