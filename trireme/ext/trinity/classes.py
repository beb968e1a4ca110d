"""Classes: the parts of an algorithm in the class form of Trinity-RFT's plug-ins.

A class is converted to a function, the form of Trireme's parts. A loss, of the policy or its
entropy, receives tensors [B, T] with their mask and returns an average: each token of a micro-batch
then has that average as its loss, so that a micro-batch weighs as much as its tokens do in the
whole batch.

An object of the class is made once for each part of an algorithm: its counts or averages continue
from call to call. Checkpoints do not store them.
"""

from __future__ import annotations

import copy
import inspect
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from numbers import Real
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trireme.algorithms.kl import LOSS_AGG_MODES
from trireme.algorithms.part import PARTS
from trireme.algorithms.recipes import Recipe, Schema
from trireme.algorithms.sample import Takes, staleness_control
from trireme.experience import TOKEN_FIELDS, Experience, group_by
from trireme.log import get_logger
from trireme.registry import refuse_unknown_options
from trireme.usercode import Refused, UserCode

logger = get_logger("trainer")

_OURS = {
    "logprob": "logprobs",
    "old_logprob": "old_logprobs",
    "ref_logprob": "ref_logprobs",
    "entropy": "entropies",
    "token_level_rewards": "token_rewards",
}
"""An argument's name there and here."""
_TAKEN = "taken"  # among the counts of what a strategy reads: its experiences, which no metric is
_MODE = "loss_agg_mode"
"""How a loss averages: an option of the class, of each call, or of neither."""
_ADVANTAGE = "algorithm.advantage_fn '{}'"
_NO_OPTION = ("self", "backend", "buffer_config", "kl_coef", "adaptive", "target_kl", "horizon")


class PolicyLossFn(ABC):
    """A policy loss. Define `__call__(self, logprob, old_logprob, action_mask, advantages,
    **kwargs)`.
    """

    def __init__(self, backend: str = "verl") -> None:
        self.backend = backend

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
        """Return the average over the tokens of the mask, and metrics."""

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """Return options of the constructor."""
        return {}


class AdvantageFn(ABC):
    """An advantage. Define `__call__(self, exps)`, which sets `advantages` and `returns` of
    experiences.
    """

    @abstractmethod
    def __call__(self, exps: Any, **kwargs: Any) -> Any:
        """Return the experiences that stay, and metrics."""

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """Return options of the constructor."""
        return {}

    @classmethod
    def compute_in_trainer(cls) -> bool:
        """Return whether it takes the tensors of Trinity-RFT's trainer instead of experiences."""
        return True


class GroupAdvantage(AdvantageFn):
    """A group advantage. Define `calculate_group_advantage(self, group_id, exps)` over the rollouts
    of one task.
    """

    @classmethod
    def compute_in_trainer(cls) -> bool:
        """Return False: it takes experiences."""
        return False

    def group_experiences(self, exps: list[Experience]) -> dict[str, list[Experience]]:
        """Group the experiences by task."""
        return group_by(exps, "task")

    @abstractmethod
    def calculate_group_advantage(
        self, group_id: str, exps: list[Experience]
    ) -> tuple[list[Experience], dict[str, Any]]:
        """Return the group's experiences that stay, and metrics."""

    def __call__(
        self, exps: list[Experience], **kwargs: Any
    ) -> tuple[list[Experience], dict[str, Any]]:
        """Group by group; metrics are averaged."""
        kept: list[Experience] = []
        seen: dict[str, list[float]] = {}
        for group_id, members in self.group_experiences(exps).items():
            returned = self.calculate_group_advantage(group_id, members)
            stay, metrics = _split(returned, _ADVANTAGE.format(type(self).__name__), "experiences")
            kept += stay
            for name, value in metrics.items():
                seen.setdefault(name, []).append(value)
        return kept, {name: sum(values) / len(values) for name, values in seen.items()}


class KLFn(ABC):
    """A divergence. Define `calculate_kl(self, logprob, ref_logprob)`, one number per token."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    @abstractmethod
    def calculate_kl(self, logprob: Tensor, ref_logprob: Tensor, *args: Any) -> Tensor:
        """Return the divergence of each token."""

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """Return options of the constructor."""
        return {}


class EntropyLossFn(ABC):
    """An entropy loss. Define `__call__(self, entropy, action_mask, **kwargs)`; its result is
    subtracted from the loss.
    """

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
        """Return the average over the tokens of the mask times the coefficient, and metrics."""

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """Return options of the constructor."""
        return {"entropy_coef": 0.0}


class Storage:
    """The reference to a store in `buffer_config`. A copy, with another `batch_size` for example,
    refers to the same store.
    """

    def __init__(self, name: str, store: Takes, batch_size: int, reads: dict[str, float]) -> None:
        self.name, self.batch_size, self.schema_type = name, batch_size, "experience"
        self._store, self._reads = store, reads

    def __deepcopy__(self, memo: Any) -> Storage:
        return copy.copy(self)

    async def read(
        self, batch_size: int | None = None, min_model_version: int = 0
    ) -> list[Experience]:
        """Return `batch_size` experiences, in the store's order; fewer only if these are the last.
        Experiences sampled by older weights are dropped, and counted.
        """
        taken, counts = await staleness_control(
            self._store, batch_size or self.batch_size, min_model_version, max_staleness=0
        )
        for name, count in {**counts, _TAKEN: len(taken)}.items():
            self._reads[name] = self._reads.get(name, 0.0) + count
        return taken

    read_async = read

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the store's own position is in every checkpoint."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do nothing."""


def reader_of(storage: Storage, *_: Any) -> Storage:
    """Return the reader of a store of `buffer_config`: the storage itself."""
    return storage


class SampleStrategy(ABC):
    """A sample strategy. Define `async sample(self, step)`, which reads the stores of
    `buffer_config.trainer_input`.
    """

    def __init__(self, buffer_config: Any, **options: Any) -> None:
        self.buffer_config = buffer_config

    @abstractmethod
    async def sample(
        self, step: int, **kwargs: Any
    ) -> tuple[list[Experience], dict[str, Any], Any]:
        """Return the experiences of a train step, metrics, and samples to show, which are
        not read.
        """

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """Return options of the constructor."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resume needs besides the stores; checkpoints do not store it."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # noqa: B027
        """Do nothing."""

    def set_model_version_metric(
        self, exp_list: Sequence[Experience], metrics: dict[str, Any]
    ) -> None:
        """Add the mean version of the weights that sampled them."""
        if versions := [e.version for e in exp_list if e.version >= 0]:
            metrics["sample/model_version"] = sum(versions) / len(versions)


class DefaultSampleStrategy(SampleStrategy):
    """The next experiences of the store."""

    def __init__(self, buffer_config: Any, **options: Any) -> None:
        super().__init__(buffer_config)
        self.exp_buffer = reader_of(buffer_config.trainer_input.experience_buffer)

    async def sample(
        self, step: int, **kwargs: Any
    ) -> tuple[list[Experience], dict[str, Any], Any]:
        """Return as many experiences as a train batch has."""
        return await self.exp_buffer.read(), {}, []


@contextmanager
def timed(metrics: dict[str, Any], name: str) -> Iterator[None]:
    """Set the metric to the seconds that the block takes."""
    begun = time.monotonic()
    yield
    metrics[name] = time.monotonic() - begun


class AlgorithmType(ABC):  # noqa: B024 (what is to be given are attributes and a class method)
    """An algorithm. Define `default_config`; its models follow from the parts that it names."""

    schema: str = "experience"

    @classmethod
    def default_config(cls) -> dict[str, Any]:
        """Return keys of the YAML's `algorithm` section."""
        return {}


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Return the mean over the mask."""
    return (values * mask).sum(axis) / (mask.sum(axis) + 1e-8)


def masked_sum(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Return the sum over the mask."""
    return (values * mask).sum(axis)


def gather_metrics(
    metric_list: Sequence[Mapping[str, Any]],
    prefix: str = "",
    output_stats: Sequence[str] = ("mean", "max", "min"),
) -> dict[str, float]:
    """Return `prefix/name/mean` and the like of the numbers that dictionaries have under a name."""
    columns: dict[str, list[float]] = {}
    for metrics in metric_list:
        for name, value in metrics.items():
            if isinstance(value, Real):
                columns.setdefault(name, []).append(float(value))
    stats: dict[str, Callable[[list[float]], float]] = {
        "mean": statistics.fmean,
        "max": max,
        "min": min,
        "std": lambda values: statistics.stdev(values) if len(values) > 1 else 0.0,
        "sum": sum,
    }
    if unknown := set(output_stats) - set(stats):
        raise ValueError(f"output_stats has '{min(unknown)}': expected some of {', '.join(stats)}")
    return {
        f"{prefix}/{name}/{stat}".removeprefix("/"): stats[stat](values)
        for name, values in columns.items()
        for stat in output_stats
    }


def prefix_metrics(
    src_metrics: Mapping[str, Any], prefix: str, dst_metrics: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Add metrics under `prefix/` to `dst_metrics`."""
    out = {} if dst_metrics is None else dst_metrics
    out.update({f"{prefix}/{name}": value for name, value in src_metrics.items()})
    return out


def aggregate_loss(
    values: Tensor,
    mask: Tensor,
    loss_agg_mode: str = "token-mean",
    normalizer: float | None = None,
) -> Tensor:
    """Average losses [B, T], by the names of `algorithm.loss_agg_mode`."""
    if loss_agg_mode == "token-mean":
        return masked_mean(values, mask)
    sums = masked_sum(values, mask, axis=-1)
    if loss_agg_mode == "seq-mean-token-sum":
        return sums.mean()
    if loss_agg_mode == "seq-mean-token-mean":
        return masked_mean(values, mask, axis=-1).mean()
    if loss_agg_mode == "seq-mean-token-sum-norm":
        return sums.sum() / (normalizer or mask.shape[-1])
    raise ValueError(f"loss_agg_mode is '{loss_agg_mode}': expected one of {LOSS_AGG_MODES}")


def recipe_of(name: str, kind: type[AlgorithmType]) -> Recipe:
    """Make the recipe of an algorithm in the class form. Raises ValueError for an unknown key."""
    keys = dict(kind.default_config())
    schemas: dict[str, Schema] = {"experience": "experience", "sft": "sft", "dpo": "dpo"}
    schema = schemas.get(kind.schema)
    if schema is None:
        raise ValueError(
            f"algorithm '{name}' has the schema '{kind.schema}': expected experience, sft or dpo"
        )
    size = keys.pop("repeat_times", 1)
    options = {part: keys.pop(f"{part}_args", None) for part in PARTS}
    known = {field.name for field in fields(Recipe)}
    refuse_unknown_options(f"default_config of algorithm '{name}'", keys, known)
    keys.setdefault("policy_loss_fn", "ppo")
    given = {part: args for part, args in options.items() if args}
    return Recipe(name, **keys, schema=schema, group_size=size or 1, options=given)


def as_function(kind: str, name: str, part: Any) -> Any:
    """Convert a class of one of these forms to the function of a part; anything else is returned
    unchanged.

    `name` is the YAML's. Raises ValueError for a class of another form.
    """
    if not inspect.isclass(part):
        return part
    adapt: Callable[[type], Callable[..., Any]] | None = {
        "policy_loss_fn": _average,
        "entropy_loss_fn": _average,
        "sample_strategy": _sample,
        "advantage_fn": _advantage,
        "kl_loss_fn": _kl,
        "kl_penalty_fn": _kl,
        "teacher_kl_fn": _kl,
    }.get(kind)
    if adapt is None:
        raise ValueError(f"algorithm.{kind} '{part.__name__}' is a class: expected a function")
    if kind == "advantage_fn":
        _refuse_tensors(name, part)
    function = adapt(part)
    function.__name__, function.__module__ = part.__name__, part.__module__
    return function


def _average(part: type) -> Callable[..., Any]:
    whose = f"the loss '{part.__name__}'"
    wanted, made = _arguments(part.__call__), _made_once(part)
    per_call = wanted.pop(_MODE, None) is not None
    others = {} if _MODE in inspect.signature(part).parameters or not per_call else {_MODE: None}

    def loss(sample_ids: Tensor, **given: Any) -> tuple[Tensor, dict[str, Tensor]]:
        data = {name: given.pop(_OURS.get(name, name), None) for name in wanted}
        counts = sample_ids.unique_consecutive(return_counts=True)[1].tolist()
        rows = {
            name: pad_sequence(list(values.split(counts)), batch_first=True)
            for name, values in data.items()
            if values is not None
        }
        ones = torch.ones_like(sample_ids, dtype=torch.bool).split(counts)
        mask = pad_sequence(list(ones), batch_first=True)
        mode = given.pop(_MODE, None) if others else given.get(_MODE)
        named = {_MODE: mode} if per_call and mode else {}  # else it has a default of its own
        returned = made(**given)(**rows, action_mask=mask, **named)
        average, metrics = _split(returned, whose, "a loss")
        if not isinstance(average, Tensor) or average.numel() != 1:
            shape = list(average.shape) if isinstance(average, Tensor) else type(average).__name__
            raise Refused(
                f"{whose} gave a loss of the shape {shape}: expected one number, the average over "
                "the mask"
            )
        reported = {
            name.rpartition("/")[2]: torch.full(sample_ids.shape, value, dtype=torch.float32)
            for name, value in metrics.items()
        }
        return average.reshape(()).expand(sample_ids.shape), reported

    loss.averages = True
    names = {_OURS.get(name, name): required for name, required in wanted.items()}
    _sign(loss, part, {"sample_ids": True, **names}, others)
    return loss


def _split(returned: Any, whose: str, what: str) -> tuple[Any, dict[str, float]]:
    """Return the two values that a class returned, metrics as numbers. Raises Refused for any other
    form.
    """
    pair = isinstance(returned, tuple) and len(returned) == 2
    if not pair or not isinstance(returned[1], Mapping) or returned[0] is None:
        raise Refused(
            f"{whose} returned {returned!r:.80}: expected a tuple of {what} and a dictionary of "
            "metrics"
        )
    metrics: dict[str, float] = {}
    for name, value in returned[1].items():
        try:
            metrics[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise Refused(
                f"{whose} gave the metric '{name}' as {value!r:.60}: expected a number"
            ) from None
    return returned[0], metrics


def _refuse_tensors(name: str, part: type) -> None:
    """Raise ValueError for an advantage class of verl's tensors, or one that does not declare its
    form.
    """
    whose = f"algorithm.advantage_fn '{name}' ({part.__name__})"
    told = getattr(part, "compute_in_trainer", None)
    inherited = AdvantageFn.compute_in_trainer.__func__
    if told is None or getattr(told, "__func__", None) is inherited:
        raise ValueError(
            f"{whose} does not say where it computes: if it takes experiences, add a classmethod "
            "compute_in_trainer that returns False"
        )
    if told():
        raise ValueError(
            f"{whose} computes in Trinity-RFT's trainer: expected a function "
            "(docs/algorithms.md), a GroupAdvantage, or a class of experiences whose "
            "compute_in_trainer gives False"
        )


def _advantage(part: type) -> Callable[..., Any]:
    made = _made_once(part)

    def advantages(
        experiences: list[Experience], **options: Any
    ) -> tuple[list[Experience], dict[str, float]]:
        whose = _ADVANTAGE.format(part.__name__)
        kept, metrics = _split(made(**options)(experiences), whose, "experiences")
        for e in kept:
            for name in ("advantages", "returns"):
                setattr(e, name, _padded(e, name, part.__name__))
        return kept, metrics

    advantages.of_experiences = True
    _sign(advantages, part, {"groups": True})
    return advantages


def _padded(e: Experience, name: str, whose: str) -> Tensor:
    """Return a field of an experience at the length of its tokens; plug-ins set that of the
    reply.
    """
    values = getattr(e, name)
    if values is None and name == "returns" and e.advantages is not None:
        return e.advantages.clone()
    size = len(e.tokens)
    if values is None or len(values) not in (size, size - e.prompt_length):
        has = "none" if values is None else f"{len(values)} numbers"
        raise ValueError(
            f"algorithm.advantage_fn '{whose}' gave experience {e.eid.uid} {has} as {name}: "
            f"expected {size - e.prompt_length}, one for each token of the reply"
        )
    values = torch.as_tensor(values, dtype=torch.float32)
    return torch.cat([values.new_zeros(size - len(values)), values])


def _kl(part: type) -> Callable[..., Any]:
    made, wanted = _made_once(part), _arguments(getattr(part, "calculate_kl"))  # noqa: B009

    def divergence(
        logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor | None = None, **options: Any
    ) -> Tensor:
        older = {"old_logprob": old_logprobs} if "old_logprob" in wanted else {}
        return made(**options).calculate_kl(logprobs, ref_logprobs, **older)

    older = {"old_logprobs": wanted["old_logprob"]} if "old_logprob" in wanted else {}
    _sign(divergence, part, {"logprobs": True, "ref_logprobs": True, **older})
    return divergence


def _sample(part: type) -> Callable[..., Any]:
    whose = f"algorithm.sample_strategy '{part.__name__}'"
    if not inspect.iscoroutinefunction(inspect.unwrap(getattr(part, "sample", part))):
        raise ValueError(f"{whose}: expected `async def sample(self, step, **kwargs)` of the class")
    made, reads = _made_once(part), dict[str, float]()

    async def sample(
        buffer: Takes, num: int, step: int, auxiliary: Mapping[str, Takes], **options: Any
    ) -> tuple[list[Experience], dict[str, float]]:
        reads.clear()
        with UserCode(whose, part):
            strategy = made(buffer_config=_buffer_config(buffer, num, auxiliary, reads), **options)
            try:
                given = await strategy.sample(step)
            except EOFError:
                if had := reads.get(_TAKEN):
                    told = f"{whose}: the data ended during its reads for train step {step}: the"
                    logger.warning("%s %d experiences that it had read are not trained", told, had)
                raise
            chosen = given[0] if isinstance(given, tuple) and len(given) in (2, 3) else None
            if not chosen or not all(isinstance(e, Experience) for e in chosen):
                raise Refused(
                    f"{whose} gave {given!r:.80} for train step {step}: expected a tuple of a list "
                    "of experiences, at least one, a dictionary of metrics, and samples to show"
                )
            counts = {name: count for name, count in reads.items() if name != _TAKEN}
            metrics = counts | {name: float(value) for name, value in given[1].items()}
        for e in chosen:  # plug-ins may set fields at the length of the reply
            for name in TOKEN_FIELDS:
                if (values := getattr(e, name)) is not None:
                    setattr(e, name, e.aligned(name, values))
        return list(chosen), metrics

    _sign(sample, part, {"buffer": True, "num": True, "step": True, "auxiliary": True})
    return sample


def _buffer_config(
    buffer: Takes, num: int, auxiliary: Mapping[str, Takes], reads: dict[str, float]
) -> Any:
    """Return the YAML's `buffer` as a strategy's constructor reads it, with the stores in it."""
    others = {name: Storage(name, store, num, reads) for name, store in auxiliary.items()}
    own = Storage("experience_buffer", buffer, num, reads)
    stores = SimpleNamespace(experience_buffer=own, auxiliary_buffers=others)
    return SimpleNamespace(train_batch_size=num, batch_size=num, trainer_input=stores)


def _made_once(part: type) -> Callable[..., Any]:
    """Return the class's object: made at the first call, whose options are those of every call."""
    found: list[Any] = []

    def made(**options: Any) -> Any:
        if not found:
            found.append(part(**{**_defaults(part), **options}))
        return found[0]

    return made


def _arguments(call: Callable[..., Any]) -> dict[str, bool]:
    """Map the data that a class's call names to whether it needs them; the mask is always
    available.
    """
    parameters = list(inspect.signature(call).parameters.values())[1:]
    plain = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return {p.name: p.default is p.empty for p in plain if p.name != "action_mask"}


def _sign(
    function: Any, part: type, data: Mapping[str, bool], others: Mapping[str, Any] | None = None
) -> None:
    """Declare which data and options the function takes: those of the class, and `others`."""
    known: Sequence[inspect.Parameter] = list(inspect.signature(part).parameters.values())
    defaults = _defaults(part)
    options = {
        p.name: defaults.get(p.name, p.default)
        for p in known
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name not in _NO_OPTION
    }
    if any(p.kind is p.VAR_KEYWORD for p in known):
        options = {**defaults, **options}
    elif unknown := set(defaults) - set(options):
        raise ValueError(
            f"default_args of {part.__name__} has '{min(unknown)}', which its constructor does not "
            f"take: it takes {', '.join(options) or 'nothing'}"
        )
    options |= others or {}
    kind = inspect.Parameter
    function.__signature__ = inspect.Signature(
        [
            *(kind(name, kind.POSITIONAL_OR_KEYWORD) for name, needed in data.items() if needed),
            *(
                kind(name, kind.POSITIONAL_OR_KEYWORD, default=None)
                for name, needed in data.items()
                if not needed
            ),
            *(kind(name, kind.KEYWORD_ONLY, default=value) for name, value in options.items()),
        ]
    )


def _defaults(part: type) -> dict[str, Any]:
    """Return the class's default options, without those that belong to the kind here."""
    given: dict[str, Any] = getattr(part, "default_args", dict)()
    return {name: value for name, value in given.items() if name not in _NO_OPTION}
