"""Sessions: conversations of agents of other processes, recorded until they are rewarded and sent.

A session is a URL prefix `/s/<id>/v1`, or the key `session:<id>` where no other key is wanted.
Calls outside of one get a session each. Sampled ids are kept as they are; nothing is encoded again.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from trireme.experience import EID, Experience
from trireme.model.model import Model
from trireme.model.recorder import Call

Ship = Callable[[list[Experience]], Awaitable[None]]


@dataclass
class Session:
    """One conversation, or all that one agent does in one run."""

    name: str
    model: Model
    reward: float | None = None
    rewards: dict[Call, float] = field(default_factory=dict)
    """Of single calls."""
    task: str = ""
    run: int = 0
    touched: float = field(default_factory=time.monotonic)

    def experiences(self) -> list[Experience]:
        """One a conversation with the session's reward, or one a call where calls have their own.

        Empty where there is no reward yet.
        """
        if self.rewards:
            calls = self.model.recorder.fresh()
            whole = self.reward or 0.0
            given = [self.rewards.get(call, whole) for call in calls]
            return self.model.experiences(reward=given) if calls else []
        return [] if self.reward is None else self.model.experiences(reward=self.reward)


class Sessions:
    """All of them, the oldest forgotten past `most`."""

    def __init__(self, make_model: Callable[[str], Model], *, most: int = 4096) -> None:
        self._make = make_model
        self._most = most
        self._sessions: dict[str, Session] = {}
        self._replies: dict[str, tuple[str, list[Call]]] = {}
        self._count = 0

    def open(self, name: str | None = None) -> Session:
        """The session of a name, begun now where it is new."""
        if name is None:
            self._count += 1
            name = f"call-{self._count}"
        session = self._sessions.get(name)
        if session is None:
            if len(self._sessions) >= self._most:
                oldest = min(self._sessions.values(), key=lambda s: s.touched)
                self.close(oldest.name)
            session = self._sessions[name] = Session(name, self._make(name))
        session.touched = time.monotonic()
        return session

    def note(self, session: Session, reply_id: str, calls: Sequence[Call]) -> None:
        """Remember which calls a response with this id came from."""
        self._replies[reply_id] = session.name, list(calls)

    def reward(
        self,
        reward: float,
        *,
        session: str | None = None,
        replies: Sequence[str] = (),
        task: str = "",
        run: int = 0,
    ) -> int:
        """Give a reward to a whole session, or to single replies by their ids; how many got it.

        Raises ValueError for a session or reply that is not known.
        """
        if session is not None and not replies:
            found = self._known(session)
            found.reward, found.task, found.run = reward, task or found.task, run
            return 1
        for reply in replies:
            if reply not in self._replies:
                raise ValueError(f"reply '{reply}' is not known, or was sent already")
            name, calls = self._replies[reply]
            owner = self._known(name)
            owner.task, owner.run = task or owner.task, run
            if name.startswith("call-"):
                owner.reward = reward
            else:
                owner.rewards |= dict.fromkeys(calls, reward)
        return len(replies)

    def reply(self, reply_id: str) -> tuple[Session, Call]:
        """The session and the call of a reply. Raises ValueError where it is not known."""
        if reply_id not in self._replies:
            raise ValueError(f"reply '{reply_id}' is not known, or was sent already")
        name, calls = self._replies[reply_id]
        return self.open(name), calls[0]

    def take(self, session: str | None = None) -> list[Experience]:
        """The experiences of a session, or of all that have a reward; they are forgotten here."""
        chosen = [self._known(session)] if session else list(self._sessions.values())
        out: list[Experience] = []
        for one in chosen:
            found = one.experiences()
            for step, experience in enumerate(found):
                experience.eid = EID(task=one.task or one.name, run=one.run, step=step)
            if found:
                self.close(one.name)
            out += found
        return out

    def close(self, name: str) -> None:
        """Forget a session."""
        self._sessions.pop(name, None)
        self._replies = {r: owner for r, owner in self._replies.items() if owner[0] != name}

    def __len__(self) -> int:
        return len(self._sessions)

    def _known(self, name: str) -> Session:
        if name not in self._sessions:
            raise ValueError(f"session '{name}' is not known, or was sent already")
        return self._sessions[name]
