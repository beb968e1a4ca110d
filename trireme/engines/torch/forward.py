"""Forward: the door for forward passes that are faster than transformers' module.

A pass uses the module's tensors, and reads and writes the decoder's rows. A function of
FORWARD_PASSES, `(model) -> ForwardPass | None`, makes it, if it suits the model. Without one the
decoder calls the module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from trireme.engines.torch.rows import RowStore
from trireme.registry import FORWARD_PASSES


class Places(Protocol):
    """The places of the rows of a decode step, which a pass makes for itself."""

    @property
    def longest(self) -> int:
        """The tokens of the longest row, the next one included."""
        ...

    def next(self, tokens: int = 1) -> None:
        """Count so many tokens more in every row."""
        ...


class DrawRule(NamedTuple):
    """How tokens are drawn where no row truncates its distribution, which is that of logits /
    temperature, or changes it but by what ends a reply too early.
    """

    streams: Tensor
    """[B] int64, the random stream of each reply: see `uniforms` of sampling.py."""
    places: Tensor
    """[B] int64, the tokens that each reply has: the position of the next one in its stream."""
    left: Tensor
    """[B] int64, the tokens that each reply may still get."""
    least: Tensor | None
    """[B] int64, the tokens of each reply before which none of `ends` is drawn; None if all have
    as many."""
    temperature: Tensor
    """[B] float32; 0: the most probable token."""
    ends: frozenset[int]
    """The tokens that end a reply."""


class ForwardPass(Protocol):
    """Forward passes of one model, in place of its module's."""

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Return log softmax of rows of logits, as `log_probabilities` of sampling.py does."""
        ...

    def inverse_cdf(self, logprobs: Tensor, uniform: Tensor) -> Tensor:
        """Draw a token of each row, as `inverse_cdf` of sampling.py does."""
        ...

    def read(
        self,
        store: RowStore,
        parts: Sequence[Sequence[int]],
        rows: Sequence[int],
        starts: Sequence[int],
        *,
        logits: bool,
    ) -> Tensor | None:
        """Compute keys and values of new tokens of some rows; their logits [N, V] if asked for."""
        ...

    def where(self, rows: Sequence[tuple[int, int, int]]) -> Places:
        """Build the places of rows: computed tokens, slot of a shared prompt, and its tokens."""
        ...

    def step(self, tokens: Tensor, where: Any, store: RowStore, prompts: RowStore) -> Tensor:
        """Return the logits [B, V] after one more token in each of rows 0 .. B-1.

        A row's first tokens may lie in `prompts`, which several rows share.
        """
        ...

    def several(
        self, tokens: Tensor, where: Any, store: RowStore, prompts: RowStore, rule: DrawRule,
        most: int,
    ) -> tuple[Tensor, Tensor, Tensor] | None:  # fmt: skip
        """Decode and draw up to `most` tokens of each row, until one of them ends.

        Returns the tokens, their log-probabilities, and those with which they were drawn, all
        [steps, B], of which a `step` after another would give the same; None where the pass cannot.
        """
        ...

    def renew(self) -> None:
        """Take the module's tensors anew: the weights have changed, or may be other tensors."""
        ...

    def rest(self) -> None:
        """Free what the pass has made for its steps: none follows for a while."""
        ...


def make_pass(model: PreTrainedModel) -> ForwardPass | None:
    """Return the first pass that suits a model; None without one."""
    return next(filter(None, (make(model) for make in FORWARD_PASSES.values())), None)
