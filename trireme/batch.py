"""Batch: the concatenated trained tokens of many experiences, on which losses work.

Letters used in names and docstrings all over the code: N experiences (samples), G a group, M
trained tokens of all samples, concatenated, T tokens of one sample or of one packed micro-batch, R
attention rows, V vocabulary.

Invariants:
- entries of a sample are contiguous and in order; `sample_ids` [M] counts samples from 0;
- entry m predicts `targets[m]`, token `positions[m]` of its sample; index 0 is never an entry;
- a sample without a trained token has no entry, but counts as a sample;
- COLUMNS names everything that a function of an algorithm may take.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trireme.experience import TOKEN_FIELDS, Experience
from trireme.pictures import BEGIN, Picture, Pictures, album, first_of

# The names of the experience's per-token fields in parts of an algorithm.
FIELD_NAMES = {
    "old_logprobs": "logprobs",
    **{name: name for name in TOKEN_FIELDS if name not in ("mask", "logprobs")},
}

GROUPS = "an advantage"
IN_TRAINER = "an advantage marked `in_trainer`"
LOSS = "a term of the loss"
SELECTS = "a function of `@selects`"


@dataclass(frozen=True)
class Column:
    """A value that a function of an algorithm may take as an argument."""

    name: str
    shape: str
    """[N]: one per experience; [M]: one per trained token; [K]: one per reward; []: one."""
    about: str
    by: str
    """The code that fills it."""
    kinds: tuple[str, ...]
    """The kinds of functions that may take it."""


_TOKENS = (IN_TRAINER, LOSS, SELECTS)
_TABLE = (
    Column("rewards", "[N]", "the reward", "the workflow or a reward function", (GROUPS,)),
    Column("groups", "[N]", "the number of the task: its rollouts are a group", "ids", (GROUPS,)),
    Column("runs", "[N]", "the number of the rollout in its task", "ids", (GROUPS,)),
    Column("steps", "[N]", "the number of the step in its rollout", "ids", (GROUPS,)),
    Column("lengths", "[N]", "how many tokens are trained", "the workflow's model", (GROUPS,)),
    Column(
        "mean_logprobs",
        "[N]",
        "the mean log-probability of the trained tokens, NaN without any",
        "the engine, where all experiences have log-probabilities",
        (GROUPS,),
    ),
    Column(
        "step_rewards",
        "[N]",
        "what the step earned; the reward in the last step of a rollout that does not say",
        '`info["step_reward"]`',
        (GROUPS,),
    ),
    Column(
        "anchors",
        "[N]",
        "the number of the environment's state; an unknown one is alone",
        '`info["env_state_hash"]`',
        (GROUPS,),
    ),
    Column(
        "reward_parts",
        "[N, K]",
        "what each reward gave, NaN where it does not apply",
        "reward functions",
        (GROUPS,),
    ),
    Column("reward_weights", "[N, K]", "the weight of each reward", "reward functions", (GROUPS,)),
    Column(
        "logprobs",
        "[M]",
        "log p of the token by the trained weights; for an advantage only along with `entropies`",
        "the trainer",
        _TOKENS,
    ),
    Column(
        "old_logprobs",
        "[M]",
        "log p by the weights that sampled the token, or by the trainer's before the step",
        "the engine; the trainer where the recipe has `bypass_old_logprobs=False`",
        _TOKENS,
    ),
    Column("advantages", "[M]", "the advantage", "the advantage, or the one before it", _TOKENS),
    Column("returns", "[M]", "the return, which a critic learns", "the advantage", _TOKENS),
    Column("values", "[M]", "V of the state before the token", "the critic", (IN_TRAINER,)),
    Column(
        "token_rewards",
        "[M]",
        "the reward of the token, less the KL penalty; a scalar one is on the last token",
        "the workflow or a reward function",
        (IN_TRAINER,),
    ),
    Column(
        "ref_logprobs",
        "[M]",
        "log p by the reference model; for `teacher_kl_fn` by the teacher",
        "the reference, which is loaded where it is asked for",
        _TOKENS,
    ),
    Column("teacher_logprobs", "[M]", "log p by the teacher", "the teacher", _TOKENS),
    Column(
        "sampler_logprobs",
        "[M]",
        "log p of the distribution that was sampled from",
        "the engine",
        _TOKENS,
    ),
    Column("versions", "[M]", "the version of the weights that sampled", "the engine", _TOKENS),
    Column("loss_weight", "[M]", "the weight that the experience gives", "the workflow", _TOKENS),
    Column("weights", "[M]", "the weight in the loss", "`loss_agg_mode`", _TOKENS),
    Column(
        "entropies",
        "[M]",
        "the entropy at the token; in the loss only where `entropy_loss_fn` has a weight",
        "the trainer",
        (IN_TRAINER, LOSS),
    ),
    Column(
        "mean_discriminators",
        "[M]",
        "the mean of p (H + log p) over the vocabulary, along with `entropies`",
        "the trainer",
        (IN_TRAINER,),
    ),
    Column("sample_ids", "[M]", "the number of the experience", "the trainer", _TOKENS),
    Column("positions", "[M]", "the token's index in its experience", "the trainer", (LOSS,)),
    Column("group_ids", "[M]", "the number of the task", "the trainer", (SELECTS,)),
    Column("samples_per_group", "[]", "experiences a task, on average", "the trainer", (SELECTS,)),
    Column("step", "[]", "train steps before this one", "the trainer", (IN_TRAINER, LOSS)),
    Column("expert", "[M]", "whether an expert wrote it", '`info["is_expert"]`', _TOKENS),
    Column("pair_ids", "[M]", "the number of the pair", "the rows of `dpo`", (LOSS, SELECTS)),
    Column("chosen", "[M]", "whether it is the better reply", "the rows of `dpo`", (LOSS, SELECTS)),
    Column("desirable", "[M]", "whether the reply is good", "the rows of `kto`", (LOSS, SELECTS)),
    Column("reference_point", "[M]", "z of KTO, one number", "the trainer", (LOSS, SELECTS)),
)
COLUMNS: dict[str, Column] = {column.name: column for column in _TABLE}
"""Everything that a function of an algorithm may take, by name."""


@dataclass(frozen=True)
class Batch:
    """N samples and their M trained tokens."""

    tokens: tuple[np.ndarray, ...]
    """Token ids of each sample, whole."""
    eids: tuple[str, ...]
    """The ids of the samples, for messages."""
    groups: tuple[str, ...]
    """Samples of one group stay in one micro-batch if they fit."""
    counts: np.ndarray
    """Entries of each sample, [N]."""
    sample_ids: Tensor
    """[M]"""
    positions: Tensor
    """[M]"""
    targets: Tensor
    """[M]"""
    temperatures: Tensor
    """[M] divisors of the logits."""
    fields: dict[str, Tensor]
    """All other per-token data, each [M]."""
    missing: dict[str, str]
    """Maps a field that not every experience has to the id of the first that lacks it."""
    pictures: Pictures = field(default_factory=dict)
    """The pictures of all samples, and perhaps of others."""
    routed_experts: tuple[np.ndarray | None, ...] = ()
    """See Experience; empty if no sample has them."""

    @property
    def num_samples(self) -> int:
        """The number N of samples."""
        return len(self.tokens)

    @property
    def num_tokens(self) -> int:
        """The number M of trained tokens."""
        return len(self.targets)

    @property
    def width(self) -> int:
        """The tokens from the first trained one to the end, of the sample where that is longest."""
        ends = np.cumsum(self.counts)
        firsts = self.positions.numpy()[(ends - self.counts)[self.counts > 0]]
        lengths = [len(row) for row, n in zip(self.tokens, self.counts, strict=True) if n]
        return int((np.array(lengths) - firsts).max()) if lengths else 0

    def get(self, name: str, *, asked_by: str) -> Tensor:
        """Return the field [M] called `name`. Raises ValueError if an experience lacks it."""
        if name in self.fields:
            return self.fields[name]
        if name in self.missing:
            raise ValueError(
                f"{asked_by} asks for '{name}', which experience {self.missing[name]} does not have"
            )
        raise _unknown(name, asked_by, {*self.fields, *self.missing}, ", which no batch has")

    def with_fields(self, **fields: Tensor) -> Batch:
        """Return the same batch with more fields."""
        return replace(self, fields={**self.fields, **fields})

    def eid_of(self, entry: int) -> str:
        """Return the id of an entry's experience."""
        return self.eids[int(self.sample_ids[entry])]

    def select(self, samples: Sequence[int]) -> Batch:
        """Return a batch of only these samples, in this order, counted from 0 again."""
        chosen = np.asarray(samples, dtype=np.int64)
        counts = self.counts[chosen]
        starts = (np.cumsum(self.counts) - self.counts)[chosen]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        index = torch.from_numpy(np.repeat(starts, counts) + within)
        fields = self.fields.items()  # a user's function may have made one on another device
        return Batch(
            tokens=tuple(self.tokens[i] for i in chosen),
            eids=tuple(self.eids[i] for i in chosen),
            groups=tuple(self.groups[i] for i in chosen),
            counts=counts,
            sample_ids=torch.from_numpy(np.repeat(np.arange(len(chosen)), counts)),
            positions=self.positions.index_select(0, index),
            targets=self.targets.index_select(0, index),
            temperatures=self.temperatures.index_select(0, index),
            fields={name: row.index_select(0, index.to(row.device)) for name, row in fields},
            missing=self.missing,
            pictures=self.pictures,
            routed_experts=tuple(self.routed_experts[i] for i in chosen if self.routed_experts),
        )


class Columns:
    """The columns that one call of an algorithm's function receives, by name: see COLUMNS."""

    def __init__(
        self,
        given: Mapping[str, Any],
        batch: Batch | None = None,
        *,
        made: Mapping[str, Callable[[], Tensor]] | None = None,
        device: torch.device | None = None,
    ) -> None:
        """`given` override the batch's columns. `made` are computed on demand.

        `device`: the device of the function's tensors; None: where they are.
        """
        self._given = given
        self._batch = batch
        self._made = made or {}
        self._device = device

    def __contains__(self, name: str) -> bool:
        """Return whether there is such a column."""
        fields = self._batch.fields if self._batch is not None else ()
        return name in self._given or name in self._made or name in fields

    def get(self, name: str, *, asked_by: str = "the trainer") -> Any:
        """Return the column of a name. Raises ValueError if there is none."""
        if name in self._given:
            column = self._given[name]
        elif name in self._made:
            column = self._made[name]()
        elif self._batch is None:
            raise _unknown(name, asked_by, {*self._given, *self._made})
        elif name in self._batch.fields or name in self._batch.missing:
            column = self._batch.get(name, asked_by=asked_by)
        else:
            known = {*self._given, *self._batch.fields, *self._batch.missing}
            raise _unknown(name, asked_by, known, ", which no batch has")
        return column if self._device is None else column.to(self._device)

    def replaced(self, **given: Tensor) -> Columns:
        """Return the same columns with these replacing those of their names."""
        return Columns({**self._given, **given}, self._batch, made=self._made, device=self._device)


def _unknown(name: str, asked_by: str, known: Collection[str], why: str = "") -> ValueError:
    """Make the error for a function that takes an unavailable column."""
    there = [*(c for c in COLUMNS if c in known), *sorted(c for c in known if c not in COLUMNS)]
    text = f"{asked_by} asks for '{name}'{why}. There is: {', '.join(there)}"
    if (column := COLUMNS.get(name)) is not None:
        text += f" ('{name}' is {column.about}: for {' or '.join(column.kinds)})"
    return ValueError(text)


def flatten(experiences: Sequence[Experience], *, replays: bool = True) -> Batch:
    """Make the batch of these experiences: entries where `mask` is true, without index 0.
    `replays`: with the experts that are recorded for them.
    """
    masks = [_mask(e) for e in experiences]
    lengths = np.array([len(mask) for mask in masks], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    trained = _joined(masks)
    trained.index_fill_(0, torch.from_numpy(starts), 0)  # nothing predicts index 0
    entries = trained.nonzero().squeeze(1)  # their indices, over all samples
    sample_ids = np.searchsorted(starts, entries.numpy(), side="right") - 1
    counts = np.bincount(sample_ids, minlength=len(experiences))
    temperatures = torch.tensor([e.temperature or 1.0 for e in experiences], dtype=torch.float32)
    fields: dict[str, Tensor] = {}
    missing: dict[str, str] = {}
    weighted = any(e.loss_weight is not None for e in experiences)
    for name, attribute in FIELD_NAMES.items():
        rows = [_row_of(e, attribute, weighted) for e in experiences]
        lacking = [e.eid.uid for e, row in zip(experiences, rows, strict=True) if row is None]
        if lacking:
            missing[name] = lacking[0]
        else:
            # torch shares out an index in brackets to its threads from some thousand entries on,
            # and takes a hundred times as long where a processor is busy
            fields[name] = _joined(rows).index_select(0, entries)
    pictures = album(picture for e in experiences for picture in e.pictures)
    tokens = _joined([e.tokens for e in experiences])
    if len(tokens) and int(tokens.max()) >= BEGIN:
        _check_pictures(experiences, pictures)
    return Batch(
        tokens=tuple(e.tokens.numpy() for e in experiences),
        eids=tuple(e.eid.uid for e in experiences),
        groups=tuple(e.eid.tid for e in experiences),
        counts=counts,
        sample_ids=torch.from_numpy(sample_ids),
        positions=entries - torch.from_numpy(starts[sample_ids]),
        targets=tokens.index_select(0, entries),
        temperatures=temperatures.index_select(0, torch.from_numpy(sample_ids)),
        fields=fields,
        missing=missing,
        pictures=pictures,
        routed_experts=_routing(experiences) if replays else (),
    )


def _routing(experiences: Sequence[Experience]) -> tuple[np.ndarray | None, ...]:
    """Return the experts of each sample's tokens. Raises ValueError if they are of two models."""
    rows = [e.routed_experts for e in experiences]
    kinds = {(row.shape[1:], row.dtype): n for n, row in enumerate(rows) if row is not None}
    if len(kinds) > 1:
        (one, a), (two, b), *_ = kinds.items()
        raise ValueError(
            f"experience {experiences[a].eid.uid} has routed_experts of {list(one[0])} layers and "
            f"experts in {str(one[1])[6:]}, and {experiences[b].eid.uid} of {list(two[0])} in "
            f"{str(two[1])[6:]}: expected those of one model"
        )
    return tuple(row if row is None else row.numpy() for row in rows) if kinds else ()


def of_tokens(
    rows: Sequence[Sequence[int]], *, temperature: float = 1.0, pictures: Sequence[Picture] = ()
) -> Batch:
    """Make a batch in which every token is an entry, except each row's first and those of pictures:
    for scoring plain ids.
    """
    each = [torch.as_tensor(row, dtype=torch.int64) for row in rows]
    return flatten(
        [
            Experience(
                tokens,
                mask=tokens < BEGIN,  # index 0 is no entry anyway
                prompt_length=1,
                temperature=temperature,
                pictures=pictures,
            )
            for tokens in each
        ]
    )


def _check_pictures(experiences: Sequence[Experience], pictures: Pictures) -> None:
    """Raise ValueError for a picture's token that is trained, or whose picture is missing."""
    for e in experiences:
        seen = e.tokens >= BEGIN
        if bool((seen & e.mask).any()):
            raise ValueError(
                f"experience {e.eid.uid} trains a token of a picture: expected a mask that is "
                "false there"
            )
        if any(first_of(token) not in pictures for token in e.tokens[seen].tolist()):
            raise ValueError(
                f"experience {e.eid.uid} has tokens of a picture that is not among its `pictures`"
            )


def _mask(e: Experience) -> Tensor:
    if e.multi_modal_inputs:
        raise ValueError(
            f"experience {e.eid.uid} has multi_modal_inputs, which are not trained here: expected "
            "`pictures`, and their token ids"
        )
    return e.mask


def _row_of(e: Experience, name: str, weighted: bool) -> Any:
    """Return a per-token field. By default, tokens were sampled from the policy itself, and those
    of a batch in which others are `weighted` weigh 1.
    """
    row = getattr(e, name)
    if row is None and name == "sampler_logprobs":
        return e.logprobs
    if row is None and name == "loss_weight" and weighted:
        return torch.ones(len(e.tokens), dtype=torch.float32)
    return row


def _joined(rows: Sequence[Tensor]) -> Tensor:
    """Concatenate the rows; a single row is copied too. numpy joins hundreds of rows in a fraction
    of torch's time, and has no bfloat16.
    """
    if not rows:
        return torch.empty(0, dtype=torch.float32)
    if any(row.dtype == torch.bfloat16 for row in rows):
        return torch.cat([*rows, rows[0][:0]])
    return torch.from_numpy(np.concatenate([row.numpy(force=True) for row in rows]))
