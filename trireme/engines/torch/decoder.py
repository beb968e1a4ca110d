"""Decoder: the device side of the engine: rows, passes through the model, one token a row and step.

Everything here runs in the device's thread. Invariants:
- active requests hold rows 0 .. B-1; a finished one's place is taken by the last at once;
- a row's keys and values, with those of the prompt that it shares, cover all of its tokens but the
  last, which the next step feeds;
- without a pass of forward.py transformers' module is called, and every row holds its whole prompt;
- what fails for one request ends that one: after a failed pass each is tried alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trireme.engines.request import Request
from trireme.engines.sampling import Drawn, RowParameters, draw, log_probabilities, uniforms
from trireme.engines.torch import forward as passes
from trireme.engines.torch.composite import text_model
from trireme.engines.torch.prefix import PrefixCache, SharedPrompts
from trireme.engines.torch.recurrent import is_recurrent
from trireme.engines.torch.routing import carry_routing
from trireme.engines.torch.rows import Pass, RowStore
from trireme.engines.torch.vision import Sight, inputs_of, sight_of, vision_of
from trireme.pictures import BEGIN, Picture

PREFILL_TOKENS = 8192
"""Tokens of one prefill pass, padding included."""
SCORE_NUMBERS = 2**24
"""Logits that scoring stores at once."""


class Reading(NamedTuple):
    """A prompt whose first `start` tokens are in a row, and whose other tokens are still to be
    computed.
    """

    row: int
    ids: tuple[int, ...]
    start: int
    sight: Sight | None = None


class Decoder:
    """Prefills, decodes and scores with one model."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        kv_tokens: int,
        prefix_tokens: int,
        fast: bool = False,
        records_routing: bool = False,
    ) -> None:
        """`fast`: by a pass of forward.py, where one suits the model. `records_routing`: see
        TorchSettings.
        """
        self.model = model
        self.vision = vision_of(model)
        routing = carry_routing(model) if records_routing else None
        fast = fast and self.vision is None and routing is None
        self.forward = passes.make_pass(model) if fast else None
        self.tokenizer = tokenizer
        self.device = next(model.parameters()).device
        self._recurrent = is_recurrent(model.config)
        self.active: list[Request] = []
        self.store = RowStore(kv_tokens, routing)
        self.prefixes = PrefixCache(prefix_tokens)
        self.prompts = SharedPrompts(kv_tokens)
        self.version = 0
        self.generated = self.prefilled = self.cached = 0
        self._steps = 0
        """Tokens decoded so far in each row."""
        self._parameters: RowParameters | None = None
        self._streams = torch.zeros(0, dtype=torch.long)
        """[B], made together with the parameters."""
        self._where: passes.Places | None = None
        heads: tuple[Any, ...] = (model.get_input_embeddings(), model.get_output_embeddings())
        self.vocabulary: int = min(layer.weight.shape[0] for layer in heads)
        """The number of token ids."""

    @torch.inference_mode()
    def advance(
        self, admitted: Sequence[Request], *, steps: int, hurry: Callable[[], bool]
    ) -> list[Request]:
        """Admit new requests and decode up to `steps` tokens; ends early when a request does.

        Returns those that ended, or have an `error`; `hurry()` is true if someone waits for the
        device. Raises if the model itself has failed.
        """
        self._remove([r for r in self.active if r.stop_reason == "aborted"])
        finished: list[Request] = []
        try:
            self._place(admitted)
            self._prefill([r for r in self.active if r.cached < len(r.prompt) + len(r.out) - 1])
            end = self._steps + steps
            while self.active and self._steps < end and not finished and not hurry():
                finished = self._decode(most=end - self._steps)
        except Exception as error:
            finished = self._one_by_one(error)
        if self.store.shape is not None:
            self._note_routing(finished)
        self._park(finished)
        self._remove(finished)
        return finished

    def _one_by_one(self, cause: Exception) -> list[Request]:
        """Decode a token for each request alone after a failed pass; returns those that ended or
        failed.

        Raises `cause` if a prompt of one token fails too: then no single request is at fault.
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
        """Discard the keys and values of the active requests, to be computed again."""
        self.prefixes.clear()
        self.store.clear()
        self.prompts.clear()
        for request in self.active:
            request.cached = request.shared = request.slot = 0
            request.of_several = False
        self.store.reserve(-(-len(self.active) // 16) * 16, 1)
        self._changed()

    @torch.inference_mode()
    def score(
        self, ids: Sequence[Sequence[int]], temperature: float, pictures: Sequence[Picture] = ()
    ) -> list[list[float]]:
        """Return log p of every token of given rows; 0 at index 0 and for tokens of `pictures`."""
        out: list[list[float]] = []
        for row in ids:
            sight = sight_of(self.model, row, pictures)
            store = RowStore(len(row) + 1)
            store.reserve(1, len(row))
            scored = [0.0]
            width = max(1, min(PREFILL_TOKENS, SCORE_NUMBERS // self.vocabulary))
            start = 0
            while start < len(row) - 1:
                end = start + width if sight is None else sight.end(start, start + width)
                part = list(row[start:end])
                logits = self._forward(store, [part], [0], [start], [sight], logits=True)
                assert logits is not None
                targets = torch.tensor(row[start + 1 : start + 1 + len(part)], device=self.device)
                logprobs = log_probabilities(logits[: len(targets)].float() / (temperature or 1.0))
                seen = targets >= BEGIN
                chosen = logprobs.gather(1, targets.masked_fill(seen, 0)[:, None])[:, 0]
                scored += chosen.masked_fill(seen, 0.0).tolist()
                start = end
            out.append(scored)
        return out

    def renew(self, version: int, *, keep: bool) -> None:
        """Adopt new weights: keys and values are recomputed, unless `keep` is set."""
        self.version = version
        self.prefixes.clear()
        self.prompts.forget()
        if self.forward is not None:
            self.forward.renew()
        if self.vision is not None:
            self.vision.renew()
        for request in self.active:
            request.of_several = keep
            if not keep:
                self.prompts.leave(request)
                request.cached = 0
        self._changed()

    def rest(self) -> None:
        """Free the memory, unless requests are active."""
        if not self.active:
            self.store.clear()
            self.prefixes.clear()
            self.prompts.clear()
            if self.forward is not None:
                self.forward.rest()
            self._changed()

    def close(self) -> None:
        """Free the memory, the model's too: whoever has a closed engine has none of it."""
        self.active = []
        self.rest()
        del self.model, self.forward, self.vision

    def _place(self, admitted: Sequence[Request]) -> None:
        if not admitted:
            return
        self.active += admitted
        rows, longest = len(self.active), max(r.room for r in self.active)
        ahead = -(-rows // 16) * 16
        rows = ahead if ahead * longest <= self.store.max_tokens else rows
        self.store.fit(rows, longest)
        self.store.reserve(rows, 1)
        self._changed()

    def _prefill(self, requests: Iterable[Request]) -> None:
        """Compute keys and values of all tokens but the last; equal prompts are computed once."""
        rows = {id(r): row for row, r in enumerate(self.active)}
        groups: dict[tuple[int, ...], list[Request]] = {}
        for request in requests:
            groups.setdefault(tuple(request.ids[:-1]), []).append(request)
        whole: list[Reading] = []
        common: list[Reading] = []
        alone = {
            ids
            for ids, members in groups.items()
            if self.forward is None
            or not ids
            or (len(members) == 1 and self.prompts.slot(ids) is None)
        }
        new = [ids for ids in groups.keys() - alone if self.prompts.slot(ids) is None]
        longest = max(map(len, new), default=0)
        if not self.prompts.fits(len(new), longest):
            alone.update(new)
        elif new:
            self.prompts.reserve(len(new), longest)
        for ids, members in groups.items():
            slot = self.prompts.slot(ids)
            if ids in alone:
                row = rows[id(members[0])]
                start = self._reuse(self.store, row, members[0])
                sight = sight_of(self.model, ids, members[0].pictures)
                if sight is not None:
                    for request in members:
                        request.shift = sight.shift
                whole.append(Reading(row, ids, start, sight))
                continue
            if slot is None:
                slot = self.prompts.add(ids)
                start = self._reuse(self.prompts.store, slot, members[0])
                common.append(Reading(slot, ids, start))
                self.cached -= len(ids)
            for request in members:
                self.prompts.join(request, slot, len(ids))
            self.cached += len(ids) * len(members)
        self._extend(self.store, whole)
        self._extend(self.prompts.store, common)
        for row, ids, _, _ in whole:
            leader, *others = groups[ids]
            if others and ids:
                self.store.copy_row(row, [rows[id(r)] for r in others], len(ids))
            for request in (leader, *others):
                request.cached = len(ids)
            self.cached += len(ids) * len(others)
        self._where = None

    def _reuse(self, store: RowStore, row: int, request: Request) -> int:
        """Copy a prompt's tokens from the prefix cache; returns their number."""
        if request.cached:
            return request.cached
        saved, common = self.prefixes.find(request.ids, whole=self._recurrent)
        common = min(common, len(request.ids) - 1)
        if saved is None or common <= 0:
            return 0
        store.reserve(0, common)
        store.put(row, saved, common)
        self.cached += common
        return common

    def _extend(self, store: RowStore, readings: Sequence[Reading]) -> None:
        """Run ragged prefills, in pieces if they are wide."""
        for batch in _batches(readings):
            todo = list(batch)
            piece = max(1, PREFILL_TOKENS // len(batch))
            while todo:
                ends = [
                    x.start + piece if x.sight is None else x.sight.end(x.start, x.start + piece)
                    for x in todo
                ]
                parts = [list(x.ids[x.start : end]) for x, end in zip(todo, ends, strict=True)]
                rows, starts = [x.row for x in todo], [x.start for x in todo]
                self._forward(store, parts, rows, starts, [x.sight for x in todo])
                self.prefilled += sum(map(len, parts))
                todo = [
                    x._replace(start=end)
                    for x, end in zip(todo, ends, strict=True)
                    if end < len(x.ids)
                ]

    def _forward(
        self,
        store: RowStore,
        parts: Sequence[Sequence[int]],
        rows: Sequence[int],
        starts: Sequence[int],
        sights: Sequence[Sight | None],
        *,
        logits: bool = False,
    ) -> Tensor | None:
        """Run new tokens of some rows through the model; with `logits`, return the first row's."""
        if self.forward is not None:
            return self.forward.read(store, parts, rows, starts, logits=logits)
        width = max(map(len, parts))
        tokens = torch.zeros(len(parts), width, dtype=torch.long)
        for entry, part in enumerate(parts):
            tokens[entry, : len(part)] = torch.tensor(part, dtype=torch.long)
        tokens = tokens.to(self.device)
        one = Pass.of(store, parts, rows, starts, device=self.device)
        if any(sights):
            spans = [(start, start + len(part)) for start, part in zip(starts, parts, strict=True)]
            inputs, one.around = inputs_of(self.model, sights, tokens, one.positions, spans)
            out = text_model(self.model)(**inputs, use_cache=False, rows=one).last_hidden_state
            head: Any = self.model.get_output_embeddings()
            return head(out[0]) if logits else None
        model = self.model if logits else text_model(self.model)
        out = model(input_ids=tokens, position_ids=one.positions, use_cache=False, rows=one)
        return out.logits[0] if logits else None

    def _decode(self, most: int = 1) -> list[Request]:
        """Decode one token for every active row, or up to `most` in one call if all are drawn by
        one plain rule; returns those that ended.
        """
        tokens = torch.tensor(
            [r.out[-1] if r.out else r.prompt[-1] for r in self.active], device=self.device
        )
        if most > 1 and (ended := self._decode_several(tokens, most)) is not None:
            return ended
        self._steps += 1
        logits = self._whole_step(tokens) if self.forward is None else self._fast_step(tokens)
        return self._append(self._draw(logits))

    def _decode_several(self, tokens: Tensor, most: int) -> list[Request] | None:
        """Decode several tokens by a pass of forward.py, until a request ends; None without one, or
        if a request needs something between two tokens.
        """
        if self.forward is None or not self._is_plain():
            return None
        left = [r.max_tokens - len(r.out) for r in self.active]
        most = min(most, *left)
        parameters, streams = self._drawn_by()
        heat = parameters.temperature[:, 0].float().masked_fill(parameters.greedy, 0.0)
        places = torch.tensor([len(r.out) for r in self.active])
        early = any(len(r.out) < r.sampling.min_tokens for r in self.active)
        least = torch.tensor([r.sampling.min_tokens for r in self.active]) if early else None
        ends = self.active[0].ends
        rule = passes.DrawRule(streams, places, torch.tensor(left), least, heat, ends)
        where = self._places(self.forward)
        self.store.reserve(len(self.active), where.longest + most - 1)
        drawn = self.forward.several(tokens, where, self.store, self.prompts.store, rule, most)
        if drawn is None:
            return None
        count = len(drawn[0])
        self._steps += count
        finished = []
        for request, own, logprobs, by in zip(
            self.active, *(numbers.T.tolist() for numbers in drawn), strict=True
        ):
            request.cached += count
            sampler = by if request.sampling.temperature else [0.0] * count
            if request.extend(own, logprobs, sampler, self.version, self.tokenizer):
                finished.append(request)
        if not finished:  # otherwise the places are made again
            where.next(count)
        self.generated += count * len(self.active)
        return finished

    def _is_plain(self) -> bool:
        """Return whether all rows are drawn by one DrawRule, and nobody looks at single tokens."""
        ends = self.active[0].ends
        return self._drawn_by()[0].plain and all(
            r.ends == ends
            and not (r.sampling.stop or r.sampling.logprobs or r.on_token or r.pictures)
            for r in self.active
        )

    def _places(self, forward: passes.ForwardPass) -> passes.Places:
        if self._where is None:
            self._where = forward.where([(r.cached, r.slot, r.shared) for r in self.active])
        return self._where

    def _fast_step(self, tokens: Tensor) -> Tensor:
        """Logits [B, V] by a pass of forward.py."""
        assert self.forward is not None
        where = self._places(self.forward)
        self.store.reserve(len(self.active), where.longest)
        logits = self.forward.step(tokens, where, self.store, self.prompts.store)
        where.next()
        return logits

    def _whole_step(self, tokens: Tensor) -> Tensor:
        """Compute logits [B, V] by transformers' module."""
        starts = [r.cached for r in self.active]
        total = max(starts) + 1
        self.store.reserve(len(starts), total)
        one = Pass(
            self.store,
            None,
            torch.tensor(starts, device=self.device),
            torch.ones(len(starts), dtype=torch.long, device=self.device),
            1,
            total,
        )
        positions = one.positions
        if any(r.shift for r in self.active):
            shifts = torch.tensor([r.shift for r in self.active], device=self.device)
            positions = positions + shifts[:, None]
        out = self.model(
            input_ids=tokens[:, None], position_ids=positions, use_cache=False, rows=one
        )
        return out.logits[:, -1]

    def _drawn_by(self) -> tuple[RowParameters, Tensor]:
        """Return the parameters of the rows, and their streams of random numbers."""
        if self._parameters is None:
            self._parameters = RowParameters.of([r.sampling for r in self.active], self.device)
            self._streams = torch.tensor([r.stream for r in self.active])
        return self._parameters, self._streams

    def _draw(self, logits: Tensor) -> Drawn:
        parameters, streams = self._drawn_by()
        uniform = uniforms(streams, torch.tensor([len(r.out) for r in self.active]))
        seen = self._seen_tokens(logits) if parameters.penalty is not None else None
        more: dict[str, Any] = {}
        if self.forward is not None:
            own = self.forward
            more = {"sample": own.inverse_cdf, "normalise": own.log_probabilities}
        return draw(
            logits,
            parameters,
            uniform.to(self.device),
            seen=seen,
            forbidden=self._forbidden(logits),
            **more,
        )

    def _append(self, drawn: Drawn) -> list[Request]:
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
                    alternatives = request.alternatives[-1] if request.alternatives else {}
                    request.on_token(tokens[row], logprobs[row], alternatives)
                ended = request.add(
                    tokens[row], logprobs[row], sampler[row], self.version, self.tokenizer
                )
            except BaseException as error:  # a tokenizer's panic is not an Exception
                request.error, ended = error, True
            if ended:
                finished.append(request)
        self.generated += len(tokens)
        return finished

    def _forbidden(self, logits: Tensor) -> Tensor | None:
        """Return [B, V] end tokens that are too early, and tokens that would stand for a picture in
        a row that shows one; None if there are none.
        """
        early = [
            (row, end)
            for row, r in enumerate(self.active)
            if len(r.out) < r.sampling.min_tokens
            for end in r.ends
        ]
        if self.vision is not None:
            silent = self.vision.unsampled
            early += [
                (n, token) for n, r in enumerate(self.active) if r.pictures for token in silent
            ]
        if not early:
            return None
        mask = torch.zeros_like(logits, dtype=torch.bool)
        rows, ends = zip(*early, strict=True)
        mask[list(rows), list(ends)] = True
        return mask

    def _seen_tokens(self, logits: Tensor) -> Tensor:
        """Return [B, V] the tokens in prompt and reply of each row."""
        mask = torch.zeros_like(logits, dtype=torch.bool)
        for row, request in enumerate(self.active):
            ids = request.ids
            mask[row, [t for t in ids if t < BEGIN] if request.pictures else ids] = True
        return mask

    def _note_routing(self, finished: Sequence[Request]) -> None:
        """Give finished requests the experts of their tokens, but for the last, which was never
        computed.
        """
        routing = self.store.routing(self.device)
        assert routing is not None
        rows = {id(request): row for row, request in enumerate(self.active)}
        for request in finished:
            # after a failed pass nothing is computed
            if request.error is None and request.cached == len(request.ids) - 1:
                own = routing[rows[id(request)], :, : request.cached]
                request.routed_experts = own.transpose(0, 1).contiguous().numpy(force=True)

    def _park(self, finished: Sequence[Request]) -> None:
        """Store finished rows' keys and values for prompts that continue them; of a row that none
        continues, and whose prompt others share, that prompt alone, once for all of them.
        """
        at = {id(request): row for row, request in enumerate(self.active)}
        todo = [r for r in finished if self.prefixes.wants(r.cached) and not r.of_several]
        last = {r.slot: r for r in todo if r.is_last and r.shared}
        new = [slot for slot in last if not self.prompts.is_saved(slot)]
        prompts = self.prompts.saved((r.slot for r in todo if r.shared), self.prefixes)
        for slot in new:
            self.prefixes.add(last[slot].prompt[: last[slot].shared], prompts[slot])
        todo = [r for r in todo if not (r.is_last and r.shared)]
        own = [request.cached - request.shared for request in todo]
        rows = self.prefixes.copies(self.store, [at[id(r)] for r in todo], own)
        for request, saved in zip(todo, rows, strict=True):
            whole = replace(saved, prompt=prompts[request.slot]) if request.shared else saved
            self.prefixes.add(request.ids[: request.cached], whole)

    def _remove(self, gone: Sequence[Request]) -> None:
        """Free rows; the last ones move into the holes."""
        if not gone:
            return
        ends = set(map(id, gone))
        left = len(self.active) - len(gone)
        holes = [n for n, r in enumerate(self.active[:left]) if id(r) in ends]
        last = [n for n, r in enumerate(self.active) if n >= left and id(r) not in ends]
        moved = [self.active[row] for row in last]
        self.store.move(last, holes, [request.cached - request.shared for request in moved])
        for hole, request in zip(holes, moved, strict=True):
            self.active[hole] = request
        del self.active[left:]
        for request in gone:
            self.prompts.leave(request)
        self._changed()

    def _changed(self) -> None:
        self._parameters = self._where = None


def _batches(readings: Sequence[Reading]) -> list[list[Reading]]:
    """Group prompts that still need tokens, by similar length and in bounded size."""
    todo = sorted((x for x in readings if x.start < len(x.ids)), key=lambda x: len(x.ids) - x.start)
    out: list[list[Reading]] = []
    for item in todo:
        width = len(item.ids) - item.start
        if out and (len(out[-1]) + 1) * width <= PREFILL_TOKENS:
            out[-1].append(item)
        else:
            out.append([item])
    return out
