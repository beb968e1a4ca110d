"""A tiny model for programs with long prompts, an engine that says what a script has, and what a
rollout's experiences must hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.qwen3 import Qwen3Config

from tests.model.templates import TOOL_TURNS
from tests.tiny import SPECIAL
from trireme.engines.engine import Completion, Engine, OnToken, Sampling
from trireme.experience import Experience

ROOT = Path(__file__).parents[2]
MAX_LEN = 32768
Script = Callable[[str], str | None]
"""What to say to a prompt; None: what the model itself samples."""


def make_model(folder: Path) -> Path:
    """Random weights, and a tokenizer of words and bytes: programs have long prompts."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        show_progress=False,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    inner.train([str(path) for path in sorted((ROOT / "docs").glob("*.md"))], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = TOOL_TURNS
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    assert isinstance(end, int) and isinstance(pad, int)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=MAX_LEN,
            initializer_range=0.2,
            tie_word_embeddings=True,
            eos_token_id=end,
            pad_token_id=pad,
            bos_token_id=None,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Steered:
    """An engine whose replies are a script's where it has one, under the model's own probabilities.

    A random model calls no tool. What it would give a scripted reply, the engine beneath computes.
    """

    def __init__(self, engine: Engine, tokenizer: Any, script: Script, most: int = 24) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._script, self._most = script, most
        self.sampled: list[list[int]] = []
        """The ids of each call, in order."""
        self.prompts: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        key: tuple[Any, ...] = (),
        on_token: OnToken | None = None,
    ) -> list[Completion]:
        prompt = self._tokenizer.decode(list(ids))
        self.prompts.append(prompt)
        said = self._script(prompt)
        if said is None:
            short = {**vars(sampling), "max_tokens": min(self._most, sampling.max_tokens)}
            own = (await self._engine.generate(ids, Sampling(**short), key=key))[0]
            sampled, said, known = own.ids, own.text, own.logprobs
            if own.stop_reason == "length":  # a cut reply is an error to some programs
                sampled = [*sampled, self._tokenizer.eos_token_id]
        else:
            sampled = self._tokenizer.encode(said + "<|im_end|>", add_special_tokens=False)
            known = []
        [row] = await self._engine.logprobs([[*ids, *sampled]])
        logprobs = [*known, *row[len(ids) + len(known) :]]
        for token, logprob in zip(sampled, logprobs, strict=True):
            if on_token is not None:
                on_token(0, token, logprob, {})
                await asyncio.sleep(0)
        self.sampled.append(sampled)
        versions = [self._engine.health().version] * len(sampled)
        return [Completion(sampled, logprobs, list(logprobs), versions, "stop", text=said)]


@dataclass(frozen=True)
class Exactness:
    """What came of a rollout's calls."""

    calls: int
    sampled: int
    trained: int
    drift: float
    """The largest difference between the engine's log-probabilities and the trainer's."""


def exactness(
    experiences: Sequence[Experience], sampled: Sequence[Sequence[int]], folder: Path
) -> Exactness:
    """Compares what is trained with what the engine gave out, and both with transformers.

    Raises AssertionError where a trained id was not sampled, or a sampled one is not trained.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    segments: list[tuple[int, ...]] = []
    drift = 0.0
    for experience in experiences:
        assert experience.versions is not None and experience.logprobs is not None
        mask = experience.mask.bool()
        assert torch.equal(mask, torch.as_tensor(experience.versions) >= 0)
        tokens = torch.as_tensor(experience.tokens)
        with torch.no_grad():
            logits = model(tokens[None]).logits[0].float()
        own = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        apart = (own - torch.as_tensor(experience.logprobs)[1:])[mask[1:]].abs()
        drift = max(drift, float(apart.max()))
        segments += _segments(tokens.tolist(), mask.tolist())
    assert sorted(segments) == sorted(map(tuple, sampled)), "sampled ids are not the trained ids"
    count = sum(map(len, sampled))
    return Exactness(len(sampled), count, sum(map(len, segments)), drift)


def _segments(tokens: list[int], mask: list[bool]) -> list[tuple[int, ...]]:
    """The trained stretches: between two replies is always text that nobody sampled."""
    out: list[list[int]] = []
    before = False
    for token, trained in zip(tokens, mask, strict=True):
        if trained:
            if not before:
                out.append([])
            out[-1].append(token)
        before = trained
    return [tuple(ids) for ids in out]
