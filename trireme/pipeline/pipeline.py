"""Pipeline: runs operators on a step's experiences before the buffer.

The raw experiences are stored for people to look at, the operators change and filter them in the
YAML's order, then group-relative advantages are computed, here and not in the trainer, because only
here are groups known to be whole. That seals a group: it goes into the buffer unchanged, and is as
old as its oldest token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trireme.algorithms.recipes import Recipe
from trireme.experience import Experience, group_by
from trireme.log import get_logger
from trireme.monitor.figures import Figures, span, values
from trireme.pipeline.operators import (
    SELECTOR_METRIC,
    Operator,
    PassRates,
    pass_rates,
)

if TYPE_CHECKING:
    from trireme.buffer.record import Record

PASS_RATES = "pass_rate_calculator"
LARGEST = 1e18
"""Rewards are float32 numbers, whose squares end at 3e38."""


logger = get_logger("explorer_experience_pipeline")


class Resampling:
    """Decides how many further explore steps follow one whose groups the algorithm leaves out,
    until a train batch is full; at most `max_resample_times`.
    """

    def __init__(self, most: int, *, batch_size: int, rollouts: int) -> None:
        """`batch_size` experiences make a train step, `rollouts` an explore step."""
        self._most = most
        self._batch_size = batch_size
        self._planned = math.ceil(batch_size / rollouts)
        self._steps = self._collected = 0
        self._before = self._after = (0, 0)
        self._warned = False

    @property
    def times(self) -> int:
        """Further explore steps that the batch has taken, including the present one."""
        return max(self._steps + 1 - self._planned, 0)

    @property
    def missing(self) -> int:
        """Experiences that the present explore step must provide, whatever their rewards."""
        return self._batch_size - self._collected if self.times >= self._most else 0

    def add(self, kept: int, refilled: int) -> dict[str, float]:
        """Add the present explore step's experiences, `refilled` of them in spite of their rewards;
        metrics.

        It counts once `put` is called.
        """
        times = self.times
        if refilled:
            learns = self._collected + kept - refilled
            say = logger.info if self._warned else logger.warning
            say(
                "a train batch has %d experiences of groups whose rewards differ after %d further "
                "explore steps (algorithm.advantage_fn_args.max_resample_times): expected %d; %d "
                "of groups with equal rewards are trained too, with advantage 0",
                *(learns, times, self._batch_size, refilled),
            )
            self._warned = True
        total = self._collected + kept
        full = total >= self._batch_size
        self._after = (0, total % self._batch_size) if full else (self._steps + 1, total)
        return {"resample_times": float(times)}

    def put(self) -> None:
        """Count the experiences that were added: they are in the buffer now."""
        self._before = self._after
        self._steps, self._collected = self._after

    def state(self, *, putting: bool = False) -> dict[str, int]:
        """Return the state that a resume needs; `putting`: as it will be once the added experiences
        are in the buffer.
        """
        steps, collected = self._after if putting else self._before
        return {"steps": steps, "collected": collected}

    def load_state(self, state: Mapping[str, int], waiting: int | None = None) -> None:
        """Restore what `state` returned, with the buffer's experiences that are `waiting`: fewer if
        a last, smaller batch has been trained.
        """
        steps, collected = state["steps"], state["collected"]
        if waiting is not None and (left := waiting % self._batch_size) != collected:
            steps, collected = steps if left else 0, left
        self._after = steps, collected
        self.put()


class Pipeline:
    """Raw copy ▸ operators ▸ advantages ▸ sealed groups."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        raw: Record | None = None,
        operators: Sequence[Operator] = (),
        resampling: Resampling | None = None,
    ) -> None:
        """`raw` stores every experience as the workflow returned it. `resampling` decides when
        groups that the algorithm leaves out are trained anyway.
        """
        self.recipe = recipe
        self.raw = raw
        self.operators = tuple(operators)
        self.resampling = resampling
        self.pass_rates: PassRates | None = None
        """Maps taskset -> row -> pass rate in the last step; None: no operator here has reported
        it."""
        self._prepared = 0
        """The number of operators, in their order, that are prepared."""

    async def run(
        self, experiences: Sequence[Experience], *, sizes: Mapping[int, int] | None = None
    ) -> tuple[list[Experience], dict[str, float]]:
        """Run the operators on one explore step's experiences; returns those to train on, and
        metrics.

        `sizes`, taskset -> its number of rows: operators' reports to a selector must fit them.
        """
        for operator in self.operators[self._prepared :]:
            await operator.prepare()
            self._prepared += 1
        if self.raw is not None:
            await self.raw.write(experiences)
        kept, metrics = list(experiences), {}
        self.pass_rates = None
        for operator in self.operators:
            if operator.name == PASS_RATES:
                self._add_rates(pass_rates(kept))
            kept, measured = await operator(kept)
            if (rates := measured.pop(SELECTOR_METRIC, None)) is not None:
                if sizes is not None:
                    operator.refuse_unknown_rows(rates, sizes)
                self._add_rates(rates)
            metrics |= {f"{operator.name}/{name}": value for name, value in measured.items()}
        metrics["not_finite"] = float(_not_finite(kept))
        missing = self.resampling.missing if self.resampling is not None else 0
        kept, measured = self.recipe.advantages(kept, at_least=missing)
        if self.resampling is not None:
            refilled = measured.setdefault("refilled_count", 0.0)
            measured |= self.resampling.add(len(kept), int(refilled))
        metrics |= measured | {"made": float(len(experiences)), "kept": float(len(kept))}
        groups = group_by(kept, "task")
        if self.operators:
            tasks = group_by(experiences, "task")
            metrics["emptied_groups"] = float(len(tasks) - len(groups))
        for members in groups.values():
            version = min((v for e in members if (v := e.version) >= 0), default=-1)
            for experience in members:
                experience.info["group_version"] = version
        logger.info(
            "%d experiences of %d groups are left, of %d", len(kept), len(groups), len(experiences)
        )
        return kept, {f"experience_pipeline/{name}": value for name, value in metrics.items()}

    def _add_rates(self, rates: PassRates) -> None:
        """Add to the reports of earlier operators; for a row in both, the later one counts."""
        earlier = self.pass_rates or {}
        self.pass_rates = earlier | {of: earlier.get(of, {}) | rows for of, rows in rates.items()}

    async def close(self) -> None:
        """Release the operators' resources."""
        for operator in self.operators[: self._prepared]:
            await operator.close()


def _not_finite(experiences: Sequence[Experience]) -> int:
    """Count rewards that spoil their group's advantages; the log names some of them."""
    bad = [
        e
        for e in experiences
        if e.reward is not None and not (math.isfinite(e.reward) and abs(e.reward) < LARGEST)
    ]
    if bad:
        named = ", ".join(f"{e.eid.uid} ({e.reward:g})" for e in bad[:5])
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        logger.info("no advantage can be computed from the rewards of %s%s", named, more)
    return len(bad)


def left_out_by(rows: Sequence[Figures]) -> str:
    """Describe how many experiences of these steps are trained, and what left out the others."""
    start, end = "experience_pipeline/", "/dropped"
    made, kept, filtered, bad = (
        sum(values(rows, start + name)) for name in ("made", "kept", "filtered_count", "not_finite")
    )
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(start))
    reasons = [
        f"{name.removeprefix(start).removesuffix(end)} left out {sum(values(rows, name)):.0f}"
        + _alike(rows, name.removesuffix(end))
        for name in names
        if name.endswith(end) and any(values(rows, name))
    ]
    if filtered:
        why = f" ({bad:.0f} have a reward that is not finite or too large)" if bad else ""
        reasons.append(f"the algorithm left out {filtered:.0f}{why}")
    why_not = ", ".join(reasons) or "the metrics do not say why"
    return f"of {made:.0f} experiences of {span(rows)} {kept:.0f} are left to train on: {why_not}"


def _alike(rows: Sequence[Figures], operator: str) -> str:
    """Describe the groups that `dapo_dynamic_sampling` left out: how many were all right, how many
    all wrong.
    """
    right, wrong = (sum(values(rows, f"{operator}/all_{name}")) for name in ("right", "wrong"))
    if not right + wrong:
        return ""
    return (
        f" ({right:.0f} groups are all right and {wrong:.0f} all wrong: its `correct_threshold` "
        "says which rewards are right)"
    )
