"""Replay: returns the experiences with the highest priority first, and some of them again.

Invariants:
- Groups (one task in one explore step) enter and leave whole. Their version is that of their oldest
  sampled token; the rest of a group that a batch cuts begins the next batch.
- `put` never waits: beyond `capacity` groups the lowest priority is dropped, and counted.
- A group is used again only if `reuse_cooldown_time` is set, and that long after its last use; not
  by a batch that has the rest of it.
- A group that is older than a take accepts leaves for good: it never becomes younger.
- After `close` no group returns: each is used at most once more.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trireme.buffer.buffer import Closed, InMemory
from trireme.buffer.store import StoreParts
from trireme.config import Problem
from trireme.config.schema_rollout import ExperienceBufferConfig
from trireme.experience import Experience, group_by
from trireme.ext.replay.priority import Priority, linear_decay, make_priority, priority_problems
from trireme.log import get_logger
from trireme.serialize import decode, encode

logger = get_logger("queue_experience_buffer")


class ReplayStore:
    """The store `replay`: a buffer in memory that uses groups more than once."""

    between_processes = False
    keeps_steps = False

    def place(self, path: str, name: str) -> str:
        """Return the path of its copy for people."""
        return path or "experience_buffer.jsonl"

    def examine(
        self, config: ExperienceBufferConfig, key: str, path: str, seed: int
    ) -> Iterable[Problem]:
        """Yield the problems of a buffer's settings."""
        if not config.replay_buffer.enable:
            yield Problem(f"{key}.storage_type", "is replay: expected replay_buffer.enable true")
        yield from priority_problems(config.replay_buffer, key, seed)

    def make(self, parts: StoreParts) -> ReplayBuffer:
        """Make the buffer."""
        config, replay = parts.config, parts.config.replay_buffer
        return ReplayBuffer(
            config.name,
            priority=make_priority(replay, parts.plan.seed),
            reuse_cooldown_time=replay.reuse_cooldown_time,
            capacity=config.capacity,
            max_read_timeout=config.max_read_timeout,
            record=parts.copy(),
        )


@dataclass
class _Group:
    experiences: list[Experience]
    version: int
    used: int = 0
    ready_at: float = 0.0
    number: int = field(default=0)
    priority: float = 0.0

    @property
    def name(self) -> str:
        return self.experiences[0].eid.tid

    def is_older(self, version: float) -> bool:
        return any(e.is_older(version) for e in self.experiences)

    def __lt__(self, other: _Group) -> bool:
        """Order by higher priority, then by arrival."""
        return (-self.priority, self.number) < (-other.priority, other.number)


@dataclass(eq=False, repr=False)
class ReplayBuffer(InMemory):
    """A priority queue of groups, within one process."""

    priority: Priority = field(default_factory=linear_decay)
    reuse_cooldown_time: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.dropped = 0
        self._heap: list[_Group] = []
        self._resting: list[_Group] = []
        self._begun: list[Experience] = []
        """The rest of a group that the last batch began."""
        self._older: list[Experience] = []
        """Those that left since the last take because of their age."""
        self._count = itertools.count()

    async def put(self, experiences: Sequence[Experience]) -> None:
        """Add the experiences as groups by task; the oldest version of a group's members counts."""
        self._stop_if_closed()
        if self.record is not None and experiences:
            await self.record.write(experiences)
        for members in group_by(list(experiences), "task").values():
            version = min((e.version for e in members if e.version >= 0), default=0)
            self._add(_Group(members, version))
        logger.info("%d experiences put, %d wait", len(experiences), len(self))
        self._last_put = self.clock.now()
        self.demand.set(False)  # until the waiting take has checked
        self._changed.notify_all()

    async def take(self, n: int, *, oldest: float = 0) -> list[Experience]:
        """Wait for `n` experiences. The use count rises by one for each group that a batch begins
        with.
        """
        begun = self.clock.now()
        while self._count_ready(oldest) < n and not self._closed:
            now = self.clock.now()
            left = max(begun, self._last_put) + self.max_read_timeout - now
            if left <= 0:
                raise TimeoutError(self._starved(n, len(self), oldest))
            self.demand.set(True)
            rested = min((self._ready_at(g) - now for g in self._resting), default=left)
            await self._changed.wait(min(left, max(rested, 0.0)))
        self.demand.set(False)
        self._stop_if_failed()
        taken: list[Experience] = []
        while len(taken) < n and (self._begun or self._heap):
            if not self._begun:
                self._begun = self._use(heapq.heappop(self._heap))
            room = n - len(taken)
            taken += self._begun[:room]
            self._begun = self._begun[room:]
        older, self._older = self._older, []
        if not (taken or older):
            raise Closed(f"buffer '{self.name}' is closed and empty")
        logger.info("%d experiences taken, %d wait", len(taken), len(self))
        return taken + older

    async def take_step(self) -> list[Experience]:
        """Raise an error: the Plan refuses this combination."""
        raise NotImplementedError("a replay buffer does not distinguish explore steps")

    async def close(self) -> None:
        """Close the buffer; groups that are resting are dropped."""
        self._resting = []
        await super().close()

    def __len__(self) -> int:
        return len(self._begun) + sum(len(group.experiences) for group in self._heap)

    def metrics(self) -> dict[str, float]:
        """Groups waiting, resting and dropped so far."""
        return {
            "buffer/groups": len(self._heap),
            "buffer/resting": len(self._resting),
            "buffer/dropped": self.dropped,
        }

    def state(self) -> dict[str, Any]:
        """Return the groups with their uses and cooldowns, and their experiences as bytes."""
        now, groups = self.clock.now(), [*sorted(self._heap), *self._resting]
        facts = [
            {
                "size": len(group.experiences),
                "version": group.version,
                "used": group.used,
                "rest": max(group.ready_at - now, 0.0) if i >= len(self._heap) else None,
            }
            for i, group in enumerate(groups)
        ]
        held = [*self._begun, *(e for group in groups for e in group.experiences)]
        return {
            "begun": len(self._begun),
            "groups": facts,
            "waiting": len(held),
            "experiences": encode(held),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the groups of a checkpoint."""
        held = iter(decode(state["experiences"]))
        self._begun = [next(held) for _ in range(state["begun"])]
        self._heap, self._resting = [], []
        for facts in state["groups"]:
            members = [next(held) for _ in range(facts["size"])]
            group = _Group(members, facts["version"], facts["used"])
            if facts["rest"] is None:
                self._add(group)
            else:
                group.ready_at = self.clock.now() + facts["rest"]
                self._resting.append(group)

    def _add(self, group: _Group) -> None:
        """Push a group; beyond the capacity the group with the lowest priority is dropped."""
        group.priority, _ = self.priority(group.version, group.used, group.name)
        group.number = next(self._count)
        heapq.heappush(self._heap, group)
        if len(self._heap) > self.capacity:
            # of equal ones the first to arrive is dropped: it is older
            lowest = min(self._heap, key=lambda g: (g.priority, g.number))
            self._heap.remove(lowest)
            heapq.heapify(self._heap)
            self.dropped += 1

    def _use(self, group: _Group) -> list[Experience]:
        """Count a use, and let the group rest if it may be used again."""
        group.used += 1
        _, again = self.priority(group.version, group.used, group.name)
        if self.reuse_cooldown_time is not None and again and not self._closed:
            group.ready_at = self.clock.now() + self.reuse_cooldown_time
            self._resting.append(group)
        for experience in group.experiences:
            experience.info["use_count"] = group.used
        return list(group.experiences)

    def _count_ready(self, oldest: float) -> int:
        """Put groups back that have rested long enough, and remove those that are older; how many
        experiences can be taken then.
        """
        now = self.clock.now()
        rested = [group for group in self._resting if self._ready_at(group) <= now]
        self._resting = [group for group in self._resting if self._ready_at(group) > now]
        for group in rested:
            self._add(group)
        if oldest > 0:
            self._remove_older(oldest)
        return len(self)

    def _ready_at(self, group: _Group) -> float:
        """Return the time from which a group may be used; never while a batch has yet to take the
        rest of it, which would then have parts of it twice.
        """
        begun = bool(self._begun) and self._begun[0].eid.tid == group.name
        return math.inf if begun else group.ready_at

    def _remove_older(self, oldest: float) -> None:
        older = [group for group in self._heap if group.is_older(oldest)]
        self._older += [e for group in older for e in group.experiences]
        self._heap = [group for group in self._heap if not group.is_older(oldest)]
        heapq.heapify(self._heap)
        if any(e.is_older(oldest) for e in self._begun):
            self._older += self._begun
            self._begun = []
