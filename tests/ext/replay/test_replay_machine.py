"""Priority replay against a naive model: any order of puts, takes, pauses and resumes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.buffer.samples import JumpingClock, sample, uids
from trireme.ext.replay.priority import decay_limit_randomization
from trireme.ext.replay.replay import ReplayBuffer

DECAY, CAPACITY = 2.0, 3


@dataclass
class Group:
    """What the model knows of a group."""

    ids: list[str]
    version: int
    number: int
    used: int = 0
    rested_at: float = 0.0

    @property
    def rank(self) -> tuple[float, int]:
        return -(self.version - DECAY * self.used), self.number


class ReplayMachine(RuleBasedStateMachine):
    """Lists sorted anew at each step, in place of heaps."""

    @initialize(cooldown=st.sampled_from([None, 5.0]), limit=st.integers(0, 3))
    def begin(self, cooldown: float | None, limit: int) -> None:
        self.cooldown, self.limit = cooldown, limit
        self.clock = JumpingClock()
        self.buffer = self.fresh()
        self.waiting: list[Group] = []
        self.resting: list[Group] = []
        self.begun: list[str] = []
        self.count = self.puts = self.dropped = 0
        self.uses: dict[str, int] = {}

    def fresh(self) -> ReplayBuffer:
        priority = decay_limit_randomization(decay=DECAY, use_count_limit=self.limit)
        return ReplayBuffer(
            "b",
            priority=priority,
            reuse_cooldown_time=self.cooldown,
            capacity=CAPACITY,
            clock=self.clock,
        )

    @rule(version=st.integers(0, 6), size=st.integers(1, 3))
    def put(self, version: int, size: int) -> None:
        self.puts += 1
        group = [sample(version, self.puts, run) for run in range(size)]
        asyncio.run(self.buffer.put(group))
        self.enter(Group(uids(group), version, 0))

    @rule(seconds=st.sampled_from([1.0, 5.0]))
    def pause(self, seconds: float) -> None:
        self.clock.time += seconds

    @rule(share=st.floats(0.01, 1.0))
    def take(self, share: float) -> None:
        now = self.clock.now()
        rested = [
            g for g in self.resting if g.rested_at <= now and not set(g.ids) & set(self.begun)
        ]
        there = len(self.begun) + sum(len(g.ids) for g in self.waiting)
        if not there + sum(len(g.ids) for g in rested):
            return
        self.resting = [g for g in self.resting if g not in rested]
        for group in rested:
            self.enter(group)
        there = len(self.begun) + sum(len(g.ids) for g in self.waiting)
        n = max(1, round(share * there))
        assert uids(asyncio.run(self.buffer.take(n))) == [self.next_id() for _ in range(n)]

    @precondition(lambda self: self.puts)
    @rule()
    def resume(self) -> None:
        """A checkpoint, and another process that goes on from it."""
        state = self.buffer.state()
        self.buffer = self.fresh()
        self.buffer.load_state(state)
        self.dropped = 0
        # equal priorities keep their order
        self.waiting.sort(key=lambda group: group.rank)
        for group in self.waiting:
            self.count += 1
            group.number = self.count

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "buffer"):
            return
        assert self.buffer.metrics() == {
            "buffer/groups": len(self.waiting),
            "buffer/resting": len(self.resting),
            "buffer/dropped": self.dropped,
        }
        most = 1 if self.cooldown is None else self.limit or 1 << 30
        assert all(used <= most for used in self.uses.values())

    def enter(self, group: Group) -> None:
        self.count += 1
        group.number = self.count
        self.waiting.append(group)
        if len(self.waiting) > CAPACITY:
            lowest = max(self.waiting, key=lambda g: (g.rank[0], -g.number))
            self.waiting.remove(lowest)
            self.dropped += 1

    def next_id(self) -> str:
        if not self.begun:
            group = min(self.waiting, key=lambda g: g.rank)
            self.waiting.remove(group)
            group.used += 1
            self.begun = list(group.ids)
            if self.cooldown is not None and (self.limit <= 0 or group.used < self.limit):
                group.rested_at = self.clock.now() + self.cooldown
                self.resting.append(group)
        uid = self.begun.pop(0)
        self.uses[uid] = self.uses.get(uid, 0) + 1
        return uid


TestReplay = ReplayMachine.TestCase
TestReplay.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
