"""A game of several turns: each word begins with the last letter of the one before.

A word counts if it is one token of SmolLM2's vocabulary, a list of some 20,000 that needs no
download. The environment plays a word of its own in between.
"""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

from trireme import Env, gym_envs
from trireme.config.variables import variable

MODEL = Path(variable("MODEL_PATH", "./examples/smollm2/model"))
TURNS = 4


@functools.cache
def common() -> tuple[str, ...]:
    """All words of at least three small letters that are one token, the most frequent first."""
    vocabulary = json.loads((MODEL / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    by_rank = sorted(vocabulary, key=vocabulary.__getitem__)  # byte pairs merge in this order
    words = (token.removeprefix("Ġ") for token in by_rank if token.startswith("Ġ"))
    return tuple(w for w in words if len(w) > 2 and w.isascii() and w.isalpha() and w.islower())


@functools.cache
def known() -> frozenset[str]:
    """The same words, to look one up."""
    return frozenset(common())


class WordChain(Env):
    """Four turns; each good word is a quarter of the reward, and a bad one ends the game."""

    async def reset(self, config: Any) -> tuple[str, dict[str, Any], str]:
        """Return the first word, no info, and the rules as system prompt."""
        self.last = self.env_config["first"]
        self.used = {self.last}
        self.turns = 0
        rules = (
            "We play word chain. Reply with one English word that begins with the last letter of "
            "my word. No word may come twice. Reply with the word alone."
        )
        return self.last, {}, rules

    async def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        """Judge the reply; return the next word, the points, the end, and what was read."""
        word = str(action[-1]["content"]).strip().strip(".!\"'").lower()
        good = word in known() and word not in self.used and word[0] == self.last[-1]
        self.turns += 1
        if not good:
            return "That is no word of this chain.", 0.0, True, {"word": word}
        self.used.add(word)
        fitting = [w for w in common() if w[0] == word[-1] and w not in self.used]
        if not fitting:  # after a word in x, for example: the player has won
            return "You win.", (TURNS - self.turns + 1) / TURNS, True, {"word": word}
        # the same answer to the same word, whoever plays
        self.last = random.Random(word).choice(fitting)
        self.used.add(self.last)
        return self.last, 1 / TURNS, self.turns == TURNS, {"word": word}


gym_envs["word_chain"] = WordChain
