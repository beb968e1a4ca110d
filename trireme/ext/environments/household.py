"""Household: a small text world of places and things, in which a thing must be put in its place.

An agent goes to places, opens what is closed, takes the thing and puts it where it belongs. It sees
only the things at its place, so it must search, and remember where it has been. The same layout
number is always the same household.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

PLACES = ("bed", "box", "chest", "desk", "shelf")
CLOSED_PLACES = ("box", "chest")
THINGS = ("ball", "book", "cup", "key", "lamp", "pen")
NOTHING = "nothing happens"


@dataclass(frozen=True)
class Layout:
    """The initial places of all things, and the goal."""

    things: tuple[tuple[str, str], ...]
    """Each thing with its place."""
    target: str
    goal: str

    @classmethod
    def numbered(cls, number: int, *, things: int = 3) -> Layout:
        """Make the layout of a number; the target is never at its goal."""
        source = random.Random(f"household {number}")
        names = source.sample(THINGS, things)
        goal = source.choice(PLACES)
        where = [source.choice(PLACES) for _ in names]
        where[0] = source.choice([place for place in PLACES if place != goal])
        pairs = list(zip(names, where, strict=True))
        source.shuffle(pairs)
        return cls(tuple(pairs), names[0], goal)


class Household:
    """One episode in one layout."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.reset()

    def reset(self) -> tuple[str, dict[str, Any]]:
        """Return to the beginning: the agent is at no place and carries nothing."""
        self.where = dict(self.layout.things)
        self.opened: set[str] = set()
        self.at: str | None = None
        self.held: str | None = None
        return f"start . {self._task}", {"env_state_hash": self.state}

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """`go PLACE`, `open PLACE`, `take THING` or `put THING`. The reward is 1 when it is done.

        Anything else, or an impossible action, does nothing; `info["valid"]` is False then.
        """
        verb, _, name = action.strip().partition(" ")
        acts = {"go": self._go, "open": self._open, "take": self._take, "put": self._put}
        seen = acts[verb](name) if verb in acts else None
        done = self.where.get(self.layout.target) == self.layout.goal
        info = {"valid": seen is not None, "env_state_hash": self.state}
        return f"{seen or NOTHING} . {self._task}", float(done), done, info

    @property
    def state(self) -> str:
        """Return the whole state of the world as text: equal states cannot be told apart by
        acting.
        """
        where = sorted(self.where.items())
        return f"{self.at} {self.held} {sorted(self.opened)} {where}"

    @property
    def _task(self) -> str:
        """Return the task as text; every observation repeats it."""
        return f"{self.layout.target} to {self.layout.goal}"

    @property
    def shut(self) -> bool:
        """True if the agent is at something closed."""
        return self.at in CLOSED_PLACES and self.at not in self.opened

    @property
    def here(self) -> list[str]:
        """Return the things that the agent sees at its place."""
        return [] if self.shut else [t for t, place in self.where.items() if place == self.at]

    def _go(self, place: str) -> str | None:
        if place not in PLACES or place == self.at:
            return None
        self.at = place
        return self._look()

    def _open(self, place: str) -> str | None:
        if place != self.at or not self.shut:
            return None
        self.opened.add(place)
        return self._look()

    def _take(self, thing: str) -> str | None:
        if self.held is not None or thing not in self.here:
            return None
        del self.where[thing]
        self.held = thing
        return f"hold {thing}"

    def _put(self, thing: str) -> str | None:
        if self.at is None or self.shut or thing != self.held:
            return None
        self.where[thing], self.held = self.at, None
        return self._look()

    def _look(self) -> str:
        if self.shut:
            return f"at {self.at} : closed"
        return f"at {self.at} : {' '.join(self.here) or 'nothing'}"


def clumsy_action(
    env: Household, source: random.Random, *, clumsiness: float = 0.0, laziness: float = 0.0
) -> str:
    """Choose the action of someone who knows the rules, but forgets where he has been.

    With probability `clumsiness` it is any possible action; with `laziness` closed things are left
    closed, and the action is to go somewhere else.
    """
    layout, target = env.layout, env.layout.target
    elsewhere = [place for place in PLACES if place != env.at]
    if source.random() < clumsiness:
        possible = [f"go {place}" for place in elsewhere]
        possible += [f"open {env.at}"] if env.shut else [f"take {t}" for t in env.here]
        possible += [f"put {env.held}"] if env.held and env.at and not env.shut else []
        return source.choice(possible)
    if env.shut and source.random() < laziness:
        return f"go {source.choice(elsewhere)}"
    if env.held is not None and (env.held != target or env.at == layout.goal) and env.at:
        return f"open {env.at}" if env.shut else f"put {env.held}"
    if env.held == target:
        return f"go {layout.goal}"
    if env.shut:
        return f"open {env.at}"
    return f"take {target}" if target in env.here else f"go {source.choice(elsewhere)}"
