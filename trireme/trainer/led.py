"""Led: the trained models behind the run's calls, and rank 0's forwarding of a call to the other
ranks.

`Models`, its backend and its engine pairs are called in the same way on every rank and know no
leader. Rank 0 of several uses their `Led` forms instead, which announce a call and then make it;
the other ranks make the calls of `commands`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from trireme.algorithms.recipes import Recipe
from trireme.experience import Experience
from trireme.sync.push import Noted, Pairs
from trireme.trainer.backend import Backend
from trireme.trainer.leader import Command, Commands, Leader
from trireme.trainer.learning import TrainState
from trireme.trainer.lora import Part
from trireme.trainer.ranks import NotFinite, Ranks
from trireme.trainer.settings import TrainSettings
from trireme.trainer.step import train_step


class Models:
    """The trained models: the policy, and the state that train steps share."""

    def __init__(self, backend: Backend, recipe: Recipe, train_state: TrainState) -> None:
        """All ranks make them, and make the same calls."""
        self.backend = backend
        self.recipe = recipe
        self.train_state = train_state

    def train_step(
        self,
        experiences: Sequence[Experience],
        *,
        version: int,
        moved: bool = False,
        profile: str | None = None,
    ) -> dict[str, float]:
        """Do one train step; see `train_step` for its arguments and metrics. Raises NotFinite,
        with the weights of all ranks that are `broken`.
        """
        try:
            return train_step(
                self.backend,
                self.recipe,
                experiences,
                version=version,
                moved=moved,
                train_state=self.train_state,
                profile=profile,
            )
        except NotFinite as error:  # on all ranks
            found = self.backend.gather(self.backend.broken_weights(), every=True)
            error.broken = list(dict.fromkeys(name for names in found for name in names))
            raise

    def save_critic(self, folder: Path) -> None:
        """Write the value model's files into a folder that all ranks see."""
        assert self.train_state.critic is not None, "there is none to save"
        self.train_state.critic.save(folder)

    def load_critic(self, folder: Path) -> None:
        """Restore what `save_critic` wrote. Raises ValueError for another model's files."""
        assert self.train_state.critic is not None, "there is none to load"
        self.train_state.critic.load(folder)

    def pairs(self, own: Pairs) -> Pairs:
        """Return the pairs of ranks and engines as this rank calls them; `own` is its half."""
        return own


def commands(models: Models, pairs: Pairs | None = None) -> Commands:
    """Return the commands that other ranks carry out, by name; each rank has its own
    `train_state`.
    """

    def step(
        experiences: Sequence[Experience] = (), *, state: dict[str, Any], **options: Any
    ) -> None:
        models.train_state.load_state(state)
        models.train_step(experiences, **options)

    backend = models.backend
    known: Commands = {
        "train_step": step,
        "score": backend.score,
        "begin_save": lambda actor, **options: backend.begin_save(Path(actor), **options),
        "end_save": backend.end_save,
        "load": lambda actor: backend.load(Path(actor)),
        "save_critic": lambda folder: models.save_critic(Path(folder)),
        "load_critic": lambda folder: models.load_critic(Path(folder)),
        "each_weight": lambda dtype, part: all(True for _ in backend.each_weight(dtype, part)),
    }
    if pairs is None:
        return known
    theirs = {"meet_engine": pairs.meet, "make_room": pairs.make_room, "lend_weights": pairs.send}
    return {**known, **theirs}


class Led(Backend):
    """The backend of rank 0."""

    def __init__(
        self,
        leader: Leader,
        model_path: str | Path,
        settings: TrainSettings,
        ranks: Ranks | None,
        *,
        reference: bool = False,
    ) -> None:
        """The others make theirs at the same time."""
        super().__init__(model_path, settings, ranks, reference=reference)
        self._leader = leader

    def score(self, ids: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[list[float]]:
        """Score rows on all ranks; log p of every token."""
        command = Command("score", {"ids": [list(row) for row in ids], "temperature": temperature})
        return self._leader.together(command, partial(super().score, ids, temperature=temperature))

    def each_weight(
        self, dtype: str | None = None, part: Part = "merged"
    ) -> Generator[tuple[str, Tensor]]:
        """Yield the weights, each whole. The other ranks go through the weights and drop them."""
        self._leader.together(Command("each_weight", {"dtype": dtype, "part": part}), lambda: None)
        weights = super().each_weight(dtype, part)
        while (item := self._leader.guarded(lambda: next(weights, None))) is not None:
            try:
                yield item
            except GeneratorExit:
                self._leader.guarded(weights.close)
                raise

    def begin_save(self, actor: Path, *, hf: bool, behind: bool = False) -> None:
        """Begin to save on all ranks."""
        command = Command("begin_save", {"actor": str(actor), "hf": hf, "behind": behind})
        self._leader.together(command, partial(super().begin_save, actor, hf=hf, behind=behind))

    def end_save(self) -> None:
        """End the save on all ranks."""
        self._leader.together(Command("end_save"), super().end_save)

    def load(self, actor: Path) -> None:
        """Load a checkpoint on all ranks."""
        command = Command("load", {"actor": str(actor.absolute())})
        self._leader.together(command, partial(super().load, actor))


class LedModels(Models):
    """The models of rank 0."""

    def __init__(
        self, leader: Leader, backend: Backend, recipe: Recipe, train_state: TrainState
    ) -> None:
        """`backend` is a Led; the others have their own models."""
        super().__init__(backend, recipe, train_state)
        self._leader = leader

    def train_step(
        self,
        experiences: Sequence[Experience],
        *,
        version: int,
        moved: bool = False,
        profile: str | None = None,
    ) -> dict[str, float]:
        """Do one train step on all ranks."""
        options = {"version": version, "moved": moved, "profile": profile}
        command = Command("train_step", options | {"state": self.train_state.state()}, experiences)
        return self._leader.together(command, partial(super().train_step, experiences, **options))

    def save_critic(self, folder: Path) -> None:
        """Save the critic on all ranks."""
        command = Command("save_critic", {"folder": str(folder)})
        self._leader.together(command, partial(super().save_critic, folder))

    def load_critic(self, folder: Path) -> None:
        """Load the critic on all ranks."""
        command = Command("load_critic", {"folder": str(folder.absolute())})
        self._leader.together(command, partial(super().load_critic, folder))

    def pairs(self, own: Pairs) -> LedPairs:
        """Return the pairs of all ranks, led from this one."""
        return LedPairs(self._leader, own)


class LedPairs:
    """Rank 0's half of its pair, which forwards calls to all others."""

    def __init__(self, leader: Leader, pairs: Pairs) -> None:
        """The others have pairs too."""
        self.give_up = pairs.give_up
        self._leader = leader
        self._pairs = pairs

    def meet(self) -> list[int]:
        """Meet the engines on all ranks; returns the port of each."""
        return self._leader.together(Command("meet_engine"), self._pairs.meet)

    def make_room(self) -> None:
        """Make room for the engines on all ranks."""
        self._leader.together(Command("make_room"), self._pairs.make_room)

    def send(self, dtype: str, note: Noted) -> None:
        """Send the weights from all ranks, each to its engine."""
        command = Command("lend_weights", {"dtype": dtype})
        self._leader.together(command, partial(self._pairs.send, dtype, note))
