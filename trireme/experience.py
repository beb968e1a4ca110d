"""Experience: the training data from one rollout, or from one step of it.

Invariants, everywhere inside the code:
- every per-token field has the length of `tokens`;
- `mask[t]` is true where token t is trained;
- `versions[t]` >= 0 is the weight version that sampled token t; -1 is prompt, inserted text or
  data;
- `logprobs[t]` is log-softmax(logits / temperature) of token t under the policy that sampled it,
  without truncation or penalties, so that the trainer can recompute it;
- index 0 and unsampled tokens hold 0 in `logprobs` and never enter a ratio;
- `routed_experts[t]` are the experts that computed token t in the engine; where they are not known
  it has the largest number of its dtype, which is no expert's;
- a token of a picture has an id that no vocabulary has (trireme/pictures.py), is never trained, and
  its picture is in `pictures`.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trireme.pictures import Picture
from trireme.text import storable

# Fields with one entry per token, and their types.
TOKEN_FIELDS: dict[str, torch.dtype] = {
    "mask": torch.bool,
    "logprobs": torch.float32,
    "versions": torch.int32,
    "sampler_logprobs": torch.float32,
    "loss_weight": torch.float32,
    "token_rewards": torch.float32,
    "advantages": torch.float32,
    "returns": torch.float32,
    "teacher_logprobs": torch.float32,
}
ROUTING_TYPES = (torch.uint8, torch.int16)
"""The types of `routed_experts`."""
REPORTED_TOKENS = "reported_tokens"
"""A key of `info` if an API sampled: the number of tokens that it reports, or None. `tokens` are
ours."""
_NUMPY_TYPES = {kind: np.dtype(str(kind)[6:]) for kind in {torch.int64, *TOKEN_FIELDS.values()}}


@dataclass(order=True)
class EID:
    """The position of an experience: batch (explore step), task in it, run (rollout) of it, step of
    that.
    """

    batch: int | str = 0
    task: int | str = 0
    run: int = 0
    step: int = 0
    suffix: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        """Make names of workflows and clients storable: they become keys of database rows."""
        for name in ("batch", "task", "suffix"):
            if isinstance(word := getattr(self, name), str) and not word.isalnum():
                setattr(self, name, storable(word))

    @property
    def uid(self) -> str:
        """An id that is unique in a job: `batch/task/run/step`, and the suffix if there is one."""
        return f"{self.rid}/{self.step}" + (f"/{self.suffix}" if self.suffix else "")

    @property
    def sid(self) -> str:
        """The id of the same step of all runs of a task."""
        return f"{self.tid}/{self.step}"

    @property
    def rid(self) -> str:
        """The id of all steps of one run."""
        return f"{self.tid}/{self.run}"

    @property
    def tid(self) -> str:
        """The id of all runs of one task in one explore step: a group."""
        return f"{self.batch}/{self.task}"

    @classmethod
    def random(cls) -> EID:
        """Make an id for an experience that belongs to no run."""
        return cls(suffix=secrets.token_hex(3))


@dataclass(init=False, eq=False, repr=False)
class Experience:
    """One training sample, token for token as it was sampled.

    There are two ways to make one. The internal form has `tokens [T]`, `mask [T]`, and per-token
    fields [T]. The users' form has `tokens [T]`, `prompt_length` P, and response-length fields [T -
    P] (`logprobs`, `action_mask`, `token_level_reward`, `advantages`, `returns`,
    `teacher_logprobs`); they are padded with P zeros. Without `action_mask` every token after the
    prompt is trained.

    Raises ValueError when a per-token field fits neither length.
    """

    tokens: Tensor
    mask: Tensor
    logprobs: Tensor | None
    versions: Tensor | None
    sampler_logprobs: Tensor | None
    loss_weight: Tensor | None
    token_rewards: Tensor | None
    advantages: Tensor | None
    returns: Tensor | None
    teacher_logprobs: Tensor | None
    prompt_length: int
    eid: EID
    reward: float | None
    temperature: float
    stop_reason: str | None
    truncate_status: str | None
    prompt_text: str | None
    response_text: str | None
    info: dict[str, Any]
    metrics: dict[str, float]
    messages: list[dict[str, Any]] | None
    tools: list[dict[str, Any]] | None
    chosen: Tensor | None
    rejected: Tensor | None
    multi_modal_inputs: dict[str, Tensor] | None
    pictures: tuple[Picture, ...]
    """The pictures of `tokens`, each once."""
    routed_experts: Tensor | None
    """[T, L, K] the numbers of the K experts that computed each token in each of L layers; None:
    not recorded."""

    def __init__(
        self,
        tokens: Tensor | Sequence[int],
        *,
        mask: Tensor | Sequence[bool] | Sequence[int] | None = None,
        logprobs: Tensor | Sequence[float] | None = None,
        versions: Tensor | Sequence[int] | None = None,
        sampler_logprobs: Tensor | Sequence[float] | None = None,
        loss_weight: Tensor | Sequence[float] | None = None,
        token_rewards: Tensor | Sequence[float] | None = None,
        advantages: Tensor | Sequence[float] | None = None,
        returns: Tensor | Sequence[float] | None = None,
        teacher_logprobs: Tensor | Sequence[float] | None = None,
        prompt_length: int | None = None,
        action_mask: Tensor | Sequence[bool] | Sequence[int] | None = None,
        token_level_reward: Tensor | Sequence[float] | None = None,
        eid: EID | None = None,
        reward: float | None = None,
        temperature: float = 1.0,
        stop_reason: str | None = None,
        truncate_status: str | None = None,
        prompt_text: str | None = None,
        response_text: str | None = None,
        info: dict[str, Any] | None = None,
        metrics: dict[str, float] | None = None,
        messages: list[dict[str, Any]] | None = None,
        tools: list[dict[str, Any]] | None = None,
        chosen: Tensor | Sequence[int] | None = None,
        rejected: Tensor | Sequence[int] | None = None,
        multi_modal_inputs: dict[str, Tensor] | None = None,
        pictures: Iterable[Picture] = (),
        routed_experts: Tensor | None = None,
    ) -> None:
        self.tokens = _row(tokens, torch.int64)
        if self.tokens.dim() != 1 or self.tokens.shape[0] == 0:
            raise ValueError(
                f"Experience.tokens must be one row of ids, not {list(self.tokens.shape)}"
            )
        self.prompt_length = _prompt_length(self.tokens, mask, prompt_length)
        fields = {
            "mask": action_mask if mask is None else mask,
            "logprobs": logprobs,
            "versions": versions,
            "sampler_logprobs": sampler_logprobs,
            "loss_weight": loss_weight,
            "token_rewards": token_level_reward if token_rewards is None else token_rewards,
            "advantages": advantages,
            "returns": returns,
            "teacher_logprobs": teacher_logprobs,
        }
        for name, value in fields.items():
            setattr(self, name, None if value is None else self.aligned(name, value))
        if fields["mask"] is None:
            self.mask = torch.arange(len(self.tokens)) >= self.prompt_length
        self.eid = eid or EID.random()
        self.reward = None if reward is None else float(reward)
        self.temperature = temperature
        self.stop_reason = stop_reason
        self.truncate_status = truncate_status
        self.prompt_text = prompt_text
        self.response_text = response_text
        self.info = info if info is not None else {}
        self.metrics = metrics if metrics is not None else {}
        self.messages = messages
        self.tools = tools
        self.chosen = None if chosen is None else torch.as_tensor(chosen, dtype=torch.int64)
        self.rejected = None if rejected is None else torch.as_tensor(rejected, dtype=torch.int64)
        self.multi_modal_inputs = multi_modal_inputs
        self.pictures = tuple(pictures)
        self.routed_experts = routed_experts
        if why := wrong_routing(self):
            raise ValueError(f"Experience.routed_experts is {why}")

    def aligned(self, name: str, value: Tensor | Sequence[Any]) -> Tensor:
        """Return `value` at the length of `tokens`; a response-length one gets leading zeros
        (versions: -1).
        """
        row = _row(value, TOKEN_FIELDS[name])
        total = self.tokens.shape[0]
        size = row.shape[0]
        if size == total:
            return row
        if size == total - self.prompt_length:
            head = row.new_full((self.prompt_length,), -1 if name == "versions" else 0)
            return torch.cat([head, row])
        raise ValueError(
            f"Experience.{name} has {size} entries: expected {total} (one per token) "
            f"or {total - self.prompt_length} (one per response token)"
        )

    @property
    def action_mask(self) -> Tensor:
        """The `mask` of the response part alone, [T - prompt_length]."""
        return self.mask[self.prompt_length :]

    @property
    def response_length(self) -> int:
        """The number of tokens after the prompt."""
        return len(self.tokens) - self.prompt_length

    @property
    def version(self) -> int:
        """The oldest weight version that sampled a token of this experience; -1 if none did."""
        if self.versions is None:
            return -1
        # as an unsigned number, -1 is the largest of all
        versions = self.versions.numpy(force=True).astype(np.int32, copy=False).view(np.uint32)
        oldest = int(np.minimum.reduce(versions, initial=2**32 - 1))
        return oldest if oldest < 2**31 else -1

    def is_older(self, version: float) -> bool:
        """Return True if the oldest sampled token of its group is of an earlier version; a group
        that no weights sampled has none.
        """
        known = self.info.get("group_version")
        return 0 <= (self.version if known is None else known) < version

    @property
    def trained_tokens(self) -> int:
        """The number of trained tokens."""
        return int(np.count_nonzero(self.mask.numpy(force=True)))

    def __repr__(self) -> str:
        return (
            f"Experience({self.eid.uid}, tokens={len(self.tokens)}, "
            f"trained={self.trained_tokens}, "
            f"reward={self.reward}, stop={self.stop_reason})"
        )


def cut_to(experience: Experience, length: int) -> Experience:
    """Remove the tokens past `length`, if there are any; the reply then counts as truncated."""
    if len(experience.tokens) <= length:
        return experience
    for name in ("tokens", *TOKEN_FIELDS, "routed_experts"):
        value = getattr(experience, name)
        setattr(experience, name, None if value is None else value[:length])
    experience.prompt_length = min(experience.prompt_length, length)
    experience.truncate_status = "response_truncated"
    return experience


def wrong_routing(experience: Experience) -> str:
    """Return what `routed_experts` of an experience is and should be; '' if it is right, or None.

    Code that has changed an experience may have left another length.
    """
    routing, size = experience.routed_experts, len(experience.tokens)
    if routing is None:
        return ""
    expected = f"expected [{size}, layers, experts] in uint8 or int16"
    if not isinstance(routing, Tensor):
        return f"{type(routing).__name__}: {expected}"
    if routing.ndim == 3 and len(routing) == size and routing.dtype in ROUTING_TYPES:
        return ""
    return f"{list(routing.shape)} in {str(routing.dtype)[6:]}: {expected}"


def _row(values: Tensor | Sequence[Any], dtype: torch.dtype) -> Tensor:
    """Make a tensor of a row of numbers. numpy reads a list in a third of torch's time."""
    if isinstance(values, Tensor) and values.dtype == dtype:
        return values
    if isinstance(values, list) and (array := np.asarray(values)).dtype.kind in "biuf":
        return torch.from_numpy(array.astype(_NUMPY_TYPES[dtype], copy=False))
    return torch.as_tensor(values, dtype=dtype)


def _prompt_length(
    tokens: Tensor, mask: Tensor | Sequence[bool] | Sequence[int] | None, prompt_length: int | None
) -> int:
    """Return the given prompt length, else the start of the mask; checked against the number of
    tokens.
    """
    if prompt_length is None:
        if mask is None:
            raise ValueError("Experience needs `mask` or `prompt_length` to know what is trained")
        trained = torch.as_tensor(mask, dtype=torch.bool).nonzero()
        return int(trained[0]) if len(trained) else len(tokens)
    if not 0 <= prompt_length <= len(tokens):
        raise ValueError(
            f"Experience.prompt_length is {prompt_length}: expected 0 to {len(tokens)}, the "
            "number of tokens"
        )
    return prompt_length


def python_number(value: Any) -> Any:
    """Return a number of numpy or torch, or an array of one, as Python's; all else unchanged."""
    if isinstance(value, np.generic | np.ndarray | Tensor) and math.prod(value.shape) == 1:
        return value.item()
    return value


def group_by(experiences: Iterable[Experience], id_type: str) -> dict[str, list[Experience]]:
    """Group experiences by `task`, `run` or `step`, in the order in which each first appears."""
    keys: dict[str, Callable[[Experience], str]] = {
        "task": lambda e: e.eid.tid,
        "run": lambda e: e.eid.rid,
        "step": lambda e: e.eid.sid,
    }
    if id_type not in keys:
        raise ValueError(f"group_by: id_type is '{id_type}': expected one of {', '.join(keys)}")
    groups: dict[str, list[Experience]] = {}
    for experience in experiences:
        groups.setdefault(keys[id_type](experience), []).append(experience)
    return groups
