"""Decoder: the device side of the engine: rows, passes through the model, one token a row and step.

Everything here runs in the device's thread. Invariants:
- active requests hold rows 0 .. B-1; a finished one's place is taken by the last at once;
- a row's keys and values cover all of its tokens but the last, which the next step feeds;
- what fails for one request ends that one: after a failed pass each is tried alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trireme.engines.request import Request
from trireme.engines.sampling import Drawn, RowParameters, draw
from trireme.engines.torch.prefix import PrefixCache
from trireme.engines.torch.rows import Pass, RowStore

PREFILL_TOKENS = 8192
"""Tokens of one prefill pass, padding included."""
SCORE_NUMBERS = 2**24
"""Logits that scoring holds at once."""


class Decoder:
    """Prefills, decodes and scores with one model."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        kv_tokens: int,
        prefix_tokens: int,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.device = next(model.parameters()).device
        self.active: list[Request] = []
        self.store = RowStore(kv_tokens)
        self.prefixes = PrefixCache(prefix_tokens)
        self.version = 0
        self.generated = self.prefilled = self.cached = 0
        self._parameters: RowParameters | None = None
        heads: tuple[Any, ...] = (model.get_input_embeddings(), model.get_output_embeddings())
        self.vocabulary: int = min(layer.weight.shape[0] for layer in heads)
        """Ids that there are."""

    @torch.inference_mode()
    def advance(
        self, admitted: Sequence[Request], *, steps: int, hurry: Callable[[], bool]
    ) -> list[Request]:
        """Take in new requests and decode up to `steps` tokens; ends early when a request does.

        Returns those that ended, or have an `error`; `hurry()` says that someone waits for the
        device. Raises where the model itself has failed.
        """
        self._remove([r for r in self.active if r.stop_reason == "aborted"])
        finished: list[Request] = []
        try:
            self._place(admitted)
            self._prefill([r for r in self.active if r.cached < len(r.prompt) + len(r.out) - 1])
            for _ in range(steps):
                if not self.active or finished or hurry():
                    break
                finished = self._decode()
        except Exception as error:
            finished = self._one_by_one(error)
        for request in finished:
            self._park(request)
        self._remove(finished)
        return finished

    def _one_by_one(self, cause: Exception) -> list[Request]:
        """After a failed pass: a token for each request alone; those that ended or failed by it.

        Raises `cause` where a prompt of one token fails too: then it is not one request's fault.
        """
        try:
            self.score([[0, 0]], 1.0)
        except Exception:
            raise cause from None
        requests, finished = self.active, []
        for request in requests:
            self.active = [request]
            self._begin_again()
            try:
                self._prefill(self.active)
                finished += self._decode()
            except Exception as error:
                request.error = error
                finished.append(request)
        self.active = requests
        self._begin_again()
        return finished

    def _begin_again(self) -> None:
        """Keys and values of the active requests are computed anew."""
        self.prefixes.clear()
        self.store.clear()
        for request in self.active:
            request.cached = 0
        longest = max((len(r.ids) for r in self.active), default=0)
        self.store.reserve(-(-len(self.active) // 16) * 16, longest + 1)
        self._changed()

    @torch.inference_mode()
    def score(self, ids: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        """log p of every token of given rows; index 0 is 0."""
        out: list[list[float]] = []
        for row in ids:
            store = RowStore(len(row) + 1)
            store.reserve(1, len(row))
            scored = [0.0]
            width = max(1, min(PREFILL_TOKENS, SCORE_NUMBERS // self.vocabulary))
            for start in range(0, len(row) - 1, width):
                part = list(row[start : start + width])
                logits = self._forward(store, [part], [0], [start], logits=True)[0]
                targets = torch.tensor(row[start + 1 : start + 1 + len(part)], device=self.device)
                logprobs = (logits[: len(targets)].float() / (temperature or 1.0)).log_softmax(-1)
                scored += logprobs.gather(1, targets[:, None])[:, 0].tolist()
            out.append(scored)
        return out

    def renew(self, version: int, *, keep: bool) -> None:
        """The weights have changed: keys and values are computed again, unless they are kept."""
        self.version = version
        self.prefixes.clear()
        if not keep:
            for request in self.active:
                request.cached = 0

    def close(self) -> None:
        """Free the memory."""
        self.active, self._parameters = [], None
        self.store.clear()
        self.prefixes.clear()

    def _place(self, admitted: Sequence[Request]) -> None:
        """Give rows to new requests."""
        if not admitted:
            return
        self.active += admitted
        longest = max(len(r.prompt) for r in admitted)
        self.store.reserve(-(-len(self.active) // 16) * 16, longest + 1)
        self._changed()

    def _prefill(self, requests: Iterable[Request]) -> None:
        """Keys and values of all tokens but the last; equal prompts are computed once."""
        rows = {id(r): row for row, r in enumerate(self.active)}
        groups: dict[tuple[int, ...], list[Request]] = {}
        for request in requests:
            groups.setdefault(tuple(request.ids[:-1]), []).append(request)
        leaders = []
        for ids, members in groups.items():
            leader = members[0]
            if leader.cached == 0 and ids:
                self._reuse(leader, rows[id(leader)])
            leaders.append((leader, rows[id(leader)], ids))
        for batch in _batches(leaders):
            self._extend(batch)
        for ids, members in groups.items():
            followers = [rows[id(r)] for r in members[1:]]
            if followers and ids:
                self.store.copy_row(rows[id(members[0])], followers, len(ids))
            for request in members:
                self.cached += len(ids) if request is not members[0] else 0
                request.cached = len(ids)

    def _reuse(self, leader: Request, row: int) -> None:
        """Take what the prefix cache has of a prompt."""
        saved, common = self.prefixes.find(leader.ids)
        common = min(common, len(leader.ids) - 1)
        if saved is not None and common:
            self.store.put(row, saved, common)
            leader.cached = common
            self.cached += common

    def _extend(self, batch: Sequence[tuple[Request, int, tuple[int, ...]]]) -> None:
        """One ragged prefill, in pieces where it is wide."""
        todo = [(row, list(ids), request.cached) for request, row, ids in batch]
        piece = max(1, PREFILL_TOKENS // len(batch))
        while todo:
            parts = [ids[start : start + piece] for _, ids, start in todo]
            if any(parts):
                self._forward(
                    self.store, parts, [row for row, _, _ in todo], [s for _, _, s in todo]
                )
                self.prefilled += sum(map(len, parts))
            todo = [
                (row, ids, start + piece) for row, ids, start in todo if start + piece < len(ids)
            ]

    def _forward(
        self,
        store: RowStore,
        parts: Sequence[Sequence[int]],
        rows: Sequence[int],
        starts: Sequence[int],
        *,
        logits: bool = False,
    ) -> Tensor:
        """New tokens of some rows through the model: hidden states, or logits, [B, S, ...]."""
        width = max(map(len, parts))
        tokens = torch.zeros(len(parts), width, dtype=torch.long)
        for entry, part in enumerate(parts):
            tokens[entry, : len(part)] = torch.tensor(part, dtype=torch.long)
        total = max(s + len(p) for s, p in zip(starts, parts, strict=True))
        store.reserve(0, total)
        one = Pass(
            store,
            torch.tensor(rows, device=self.device),
            torch.tensor(starts, device=self.device),
            torch.tensor([len(p) for p in parts], device=self.device),
            width,
            total,
        )
        model = self.model if logits else self.model.base_model
        out = model(
            input_ids=tokens.to(self.device), position_ids=one.positions, use_cache=False, rows=one
        )
        return out.logits if logits else out.last_hidden_state

    def _decode(self) -> list[Request]:
        """One token for every active row; those that ended."""
        active = self.active
        last = [r.out[-1] if r.out else r.prompt[-1] for r in active]
        starts = [r.cached for r in active]
        total = max(starts) + 1
        self.store.reserve(len(active), total)
        one = Pass(
            self.store,
            None,
            torch.tensor(starts, device=self.device),
            torch.ones(len(active), dtype=torch.long, device=self.device),
            1,
            total,
        )
        out = self.model(
            input_ids=torch.tensor(last, device=self.device)[:, None],
            position_ids=one.positions,
            use_cache=False,
            rows=one,
        )
        drawn = self._draw(out.logits[:, -1])
        return self._append(drawn)

    def _draw(self, logits: Tensor) -> Drawn:
        if self._parameters is None:
            self._parameters = RowParameters.of([r.sampling for r in self.active], self.device)
        parameters = self._parameters
        uniform = torch.tensor([r.stream.next() for r in self.active], dtype=torch.float64)
        seen = self._seen_tokens(logits) if parameters.penalty is not None else None
        return draw(
            logits,
            parameters,
            uniform.to(self.device),
            seen=seen,
            forbidden=self._forbidden(logits),
        )

    def _append(self, drawn: Drawn) -> list[Request]:
        """Hand out the drawn tokens."""
        tokens, logprobs = drawn.tokens.tolist(), drawn.logprobs.tolist()
        sampler = drawn.sampler_logprobs.tolist()
        finished = []
        for row, request in enumerate(self.active):
            request.cached += 1
            if request.sampling.logprobs:
                top = drawn.full[row].topk(min(request.sampling.logprobs, drawn.full.shape[1]))
                best = zip(top.indices.tolist(), top.values.tolist(), strict=True)
                request.alternatives.append(dict(best))
            try:
                if request.on_token is not None:
                    told = request.alternatives[-1] if request.alternatives else {}
                    request.on_token(tokens[row], logprobs[row], told)
                ended = request.add(
                    tokens[row], logprobs[row], sampler[row], self.version, self.tokenizer
                )
            except BaseException as error:  # a tokenizer's panic is no Exception
                request.error, ended = error, True
            if ended:
                finished.append(request)
        self.generated += len(tokens)
        return finished

    def _forbidden(self, logits: Tensor) -> Tensor | None:
        """[B, V] ends that come too early; None where no row has a minimum."""
        early = [
            (row, end)
            for row, r in enumerate(self.active)
            if len(r.out) < r.sampling.min_tokens
            for end in r.ends
        ]
        if not early:
            return None
        mask = torch.zeros_like(logits, dtype=torch.bool)
        rows, ends = zip(*early, strict=True)
        mask[list(rows), list(ends)] = True
        return mask

    def _seen_tokens(self, logits: Tensor) -> Tensor:
        """[B, V] tokens of prompt and reply of each row."""
        mask = torch.zeros_like(logits, dtype=torch.bool)
        for row, request in enumerate(self.active):
            mask[row, request.ids] = True
        return mask

    def _park(self, request: Request) -> None:
        """Keep a finished row's keys and values for a prompt that goes on from it."""
        if self.prefixes.max_tokens and request.cached:
            row = self.active.index(request)
            self.prefixes.add(request.ids[: request.cached], self.store.take(row, request.cached))

    def _remove(self, gone: Sequence[Request]) -> None:
        """Free rows; the last ones move into the holes."""
        for request in gone:
            row = self.active.index(request)
            last = len(self.active) - 1
            if row != last:
                self.store.copy_row(last, [row], self.active[last].cached)
                self.active[row] = self.active[last]
            self.active.pop()
        if gone:
            self._changed()

    def _changed(self) -> None:
        self._parameters = None


def _batches(
    leaders: Sequence[tuple[Request, int, tuple[int, ...]]],
) -> list[list[tuple[Request, int, tuple[int, ...]]]]:
    """Leaders that still need tokens, in groups of like length and bounded size."""
    todo = sorted(
        (x for x in leaders if x[0].cached < len(x[2])), key=lambda x: len(x[2]) - x[0].cached
    )
    out: list[list[tuple[Request, int, tuple[int, ...]]]] = []
    for item in todo:
        width = len(item[2]) - item[0].cached
        if out and (len(out[-1]) + 1) * width <= PREFILL_TOKENS:
            out[-1].append(item)
        else:
            out.append([item])
    return out
