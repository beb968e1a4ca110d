"""Sessions: conversations of agents of other processes, recorded until they are rewarded and sent.

A session is a URL prefix `/s/<id>/v1`, the header x-session-id, or the key `session:<id>` if no
other key is required. A call outside of any gets its own session. Sampled ids stay unchanged.

Invariants:
- A commit takes whole groups: all sessions of a task that have a reward. These sessions then end,
  and are never sent again.
- Only sessions without a reward are dropped: if they are idle for too long, or too many are open.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from trireme.experience import EID, Experience
from trireme.ext.http.rollouts import characters
from trireme.log import get_logger
from trireme.model.model import Model
from trireme.model.recorder import Call

logger = get_logger("explorer")

Ship = Callable[[list[Experience]], Awaitable[None]]
MOST_REMEMBERED = 1 << 16
"""How many names of ended sessions are remembered."""
LONGEST_NAME = 200
"""The longest name of a session, in characters."""
MOST_HELD = 2**30
"""About how many bytes all sessions may record before the oldest are dropped."""


@dataclass
class Session:
    """One conversation, or everything that one agent does in one run."""

    name: str
    model: Model
    alone: bool = False
    """Whether a single call made it that named no session: the reply's reward is the session's."""
    reward: float | None = None
    rewards: dict[Call, float] = field(default_factory=dict)
    """The rewards of single calls."""
    task: str = ""
    run: int | None = None
    touched: float = field(default_factory=time.monotonic)
    replies: list[str] = field(default_factory=list)
    """The ids of its responses."""
    size: int = 0
    """Approximate bytes of its records."""

    @property
    def rewarded(self) -> bool:
        """True if the session has a reward, so that a commit may take it."""
        return self.reward is not None or bool(self.rewards)

    @property
    def group(self) -> str:
        """The name of the group in which its reward is compared: its task, or itself alone."""
        return self.task or self.name

    def experiences(self) -> list[Experience]:
        """Return one experience per conversation with the session's reward, or one per call if
        calls have their own. An abandoned reply, repeated and not continued, is none unless it has
        its own.

        Empty if there is no reward yet.
        """
        if self.rewards:
            calls = self.model.recorder.fresh()
            whole = self.reward or 0.0
            rewards = [self.rewards.get(call, whole) for call in calls]
            gone = self.model.recorder.orphans() - self.rewards.keys()
            experiences = self.model.experiences(reward=rewards) if calls else []
            return [e for call, e in zip(calls, experiences, strict=True) if call not in gone]
        return [] if self.reward is None else self.model.experiences(reward=self.reward)


@dataclass(frozen=True)
class Past:
    """The past of a session's name: how many sessions had it, and whether the last was sent."""

    times: int
    sent: bool


class Sessions:
    """All sessions of a server, by name."""

    def __init__(
        self,
        make_model: Callable[[str, int], Model],
        *,
        most: int = 4096,
        most_held: float = MOST_HELD,
        keep: float = float("inf"),
        ship: Ship | None = None,
    ) -> None:
        """`make_model(name, times)`: `times` sessions had this name before.

        `most` sessions are open at once, with `most_held` bytes of calls; one without a reward ends
        after `keep` idle seconds. `ship` receives the experiences of a commit; without it the
        client gets them.
        """
        self.ship = ship
        self.dropped = 0
        self._make = make_model
        self._max_sessions, self._max_bytes, self._held = most, most_held, 0
        self._keep = keep
        self._sessions: dict[str, Session] = {}
        self._replies: dict[str, tuple[Session, Sequence[Call]]] = {}
        self._past: dict[str, Past] = {}
        self._count = itertools.count(1)

    def open(self, name: str | None = None) -> Session:
        """Return the session of this name; a new one if there is none, or no name.

        Raises ValueError if too many are open and none can be dropped, and for a name that cannot
        be sent back in a header.
        """
        alone = not name
        if name:
            _check_name(name)
        while not name or (alone and name in self._sessions):
            name = f"call-{next(self._count)}"
        session = self._sessions.get(name)
        if session is None:
            if len(self._sessions) >= self._max_sessions or self._held >= self._max_bytes:
                self._drop_oldest()
            times = self._past[name].times if name in self._past else 0
            session = self._sessions[name] = Session(name, self._make(name, times), alone)
        session.touched = time.monotonic()
        return session

    @contextmanager
    def opened(self, name: str | None = None) -> Iterator[Session]:
        """Open a session for one call. If the call fails, a session without a name from its client
        ends: nobody has learned its name, and it would take the place of another one.
        """
        session = self.open(name)
        try:
            yield session
        except BaseException:
            if not name:
                self.close(session.name)
            raise

    def alone(self) -> Model:
        """Make a Model without a session, for requests that get no reward."""
        return self._make("", 0)

    def note(self, session: Session, reply_id: str, calls: Sequence[Call]) -> None:
        """Record the calls behind the response with this id."""
        if self._sessions.get(session.name) is session:
            session.touched = time.monotonic()
            session.replies.append(reply_id)
            size = sum(map(_size, calls))
            session.size, self._held = session.size + size, self._held + size
            self._replies[reply_id] = session, tuple(calls)

    def reward(
        self,
        reward: float,
        *,
        session: str | None = None,
        replies: Sequence[str] = (),
        task: str = "",
        run: int | None = None,
    ) -> int:
        """Set the reward of a whole session, or of single replies by their ids; returns their
        number.

        Raises ValueError for an unknown session or reply, or a reply of another session than the
        given one; no session gets the reward then.
        """
        if session is None and not replies:
            raise ValueError(
                "feedback names neither a session nor a reply: expected session_id, or msg_ids"
            )
        for reply in replies:
            if reply not in self._replies:
                raise ValueError(f"reply '{reply}' is not known, or was sent already")
            if session not in (None, owner := self._replies[reply][0].name):
                raise ValueError(f"reply '{reply}' belongs to session '{owner}', not '{session}'")
        rated: list[tuple[Session, Sequence[Call]]] = [self._replies[reply] for reply in replies]
        for owner, calls in rated or [(self._known(session or ""), ())]:
            owner.task = task or owner.task
            owner.run = owner.run if run is None else run
            if calls and not owner.alone:
                owner.rewards |= dict.fromkeys(calls, reward)
            else:
                owner.reward = reward
        return len(rated) or 1

    def reply(self, reply_id: str) -> tuple[Session, Call]:
        """Return the session and the call of a reply. Raises ValueError if it is unknown."""
        if reply_id not in self._replies:
            raise ValueError(f"reply '{reply_id}' is not known, or was sent already")
        session, calls = self._replies[reply_id]
        return session, calls[0]

    def take(self, session: str | None = None, task: str | None = None) -> list[Experience]:
        """Return the experiences of a session's group, of a task's, or of all groups that have a
        reward.

        They are removed here. A session that was sent already gives none. Raises ValueError for one
        that is unknown, or has no reward.
        """
        if session not in self._sessions and session in self._past and self._past[session].sent:
            return []
        if session is not None:
            group = self._known(session).group
            if task not in (None, group):
                raise ValueError(
                    f"session '{session}' belongs to task '{group}', and task_id is '{task}': "
                    "expected one of the two"
                )
            task = group
            if not self._known(session).rewarded:
                raise ValueError(f"session '{session}' has no reward: give one by POST /feedback")
        chosen = [s for s in self._sessions.values() if s.rewarded and task in (None, s.group)]
        out: list[Experience] = []
        runs: dict[str, set[int]] = {}
        for one in chosen:
            used = runs.setdefault(one.group, set())
            if one.run is None or one.run in used:
                one.run = next(run for run in itertools.count() if run not in used)
            used.add(one.run)
            experiences = one.experiences()
            for step, experience in enumerate(experiences):
                experience.eid = EID(task=one.group, run=one.run, step=step)
            self.close(one.name, sent=True)
            out += experiences
        return out

    def drop_quiet(self) -> int:
        """End the sessions without a reward that were idle for `keep` seconds; returns their
        number.
        """
        oldest = time.monotonic() - self._keep
        idle = [s for s in self._sessions.values() if s.touched < oldest and not s.rewarded]
        return self._drop(idle, f"idle for {self._keep:g} s")

    def close(self, name: str, *, sent: bool = False) -> None:
        """Remove a session, if there is one; a pending call in it fails."""
        session = self._sessions.pop(name, None)
        if session is None:
            return
        session.model.revoke()
        self._held -= session.size
        times = self._past.pop(name, Past(0, False)).times
        self._past[name] = Past(times + 1, sent)
        if len(self._past) > MOST_REMEMBERED:
            del self._past[next(iter(self._past))]
        for reply in session.replies:
            self._replies.pop(reply, None)

    def __len__(self) -> int:
        return len(self._sessions)

    def _drop_oldest(self) -> None:
        """Drop an eighth of the sessions at once, so that one log line covers many."""
        droppable = sorted(
            (s for s in self._sessions.values() if not s.rewarded), key=lambda s: s.touched
        )
        if not droppable:
            raise ValueError(
                f"all {len(self)} sessions have a reward: send them by POST /commit first"
            )
        why = f"{len(self)} are open with {self._held >> 20} MiB, which is the limit"
        self._drop(droppable[: max(len(self) // 8, 1)], why)

    def _drop(self, sessions: Sequence[Session], why: str) -> int:
        for session in sessions:
            self.close(session.name)
        self.dropped += len(sessions)
        if sessions:
            first = sessions[0].name
            text = "%d sessions without a reward dropped (%s), '%s' first"
            logger.warning(text, len(sessions), why, first)
        return len(sessions)

    def _known(self, name: str) -> Session:
        if name not in self._sessions:
            raise ValueError(f"session '{name}' is not known, or was sent already")
        return self._sessions[name]


def _size(call: Call) -> int:
    """Estimate the bytes of a recorded call: its texts, and eight for each token."""
    return characters(call.messages or []) + 8 * (len(call.inserted) + len(call.completion.ids))


def _check_name(name: str) -> None:
    """Raise ValueError for a name that cannot be part of a header, or is too long to remember."""
    printable = name.isprintable() and name.isascii() and name == name.strip()
    if not printable or len(name) > LONGEST_NAME:
        raise ValueError(
            f"the session's name is {name[:60]!a}, {len(name)} characters: expected up to "
            f"{LONGEST_NAME} printable ASCII characters"
        )
