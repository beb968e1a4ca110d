"""Assign: writes group-relative advantages into the experiences of an explore step."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trireme.algorithms.advantage import moments
from trireme.algorithms.part import Part
from trireme.batch import Columns
from trireme.experience import EID, Experience, group_by
from trireme.usercode import Refused, UserCode


def assign_advantages(
    part: Part, experiences: list[Experience], *, duplicate: bool = False, at_least: int = 0
) -> tuple[list[Experience], dict[str, float]]:
    """Set every experience's `advantages` and `returns` to score * mask.

    Groups are the tasks of the explore step. Those that the part leaves out (NaN) are not returned;
    `duplicate` replaces groups that are left out whole by copies of others. If fewer than
    `at_least` would remain, some of these groups stay, with advantage 0. The metric `idle_groups`
    is the share of groups in which no experience has an advantage: nothing is learned from them.
    """
    if not experiences:
        return [], {"experience_count": 0.0, "filtered_count": 0.0}
    columns = columns_of(experiences)
    rewards, groups = columns.get("rewards"), columns.get("groups")
    scores, refilled = _refilled(_scores(part, experiences, columns), rewards, groups, at_least)
    kept: list[Experience] = []
    for experience, score in zip(experiences, scores.tolist(), strict=True):
        if score != score:
            continue
        advantages = experience.mask.numpy() * np.float32(score)  # torch takes twice as long
        experience.advantages = torch.from_numpy(advantages)
        experience.returns = torch.from_numpy(advantages.copy())
        kept.append(experience)
    metrics = _reward_metrics(rewards, groups)
    metrics["experience_count"] = float(len(kept))
    metrics["filtered_count"] = float(len(experiences) - len(kept))
    metrics |= {"refilled_count": float(refilled)} if at_least else {}
    num_groups = int(groups.max()) + 1
    busy = {
        e.eid.tid
        for e, score in zip(experiences, scores.tolist(), strict=True)
        if score == score and score
    }
    metrics["idle_groups"] = 1 - len(busy) / num_groups
    metrics["skipped_group_ratio"] = 1 - len(group_by(kept, "task")) / num_groups
    if duplicate:
        copies = _copies(kept, num_groups)
        kept += copies
        metrics["duplicated_count"] = float(len(copies))
    return kept, metrics


def scores_less(part: Part, experiences: Sequence[Experience], costs: Tensor) -> Tensor:
    """Return the scores [N] of rewards less `costs` [N], which the experiences of a run share:
    several from one run have one reward, and one cost. Experiences that the part would leave out
    have 0.
    """
    runs: dict[str, float] = {}
    for e, cost in zip(experiences, costs.tolist(), strict=True):
        runs[e.eid.rid] = runs.get(e.eid.rid, 0.0) + cost
    cheaper = [copy.copy(e) for e in experiences]
    for e in cheaper:
        if e.reward is not None:  # the error is raised below
            e.reward -= runs[e.eid.rid]
    return _scores(part, cheaper, columns_of(cheaper)).nan_to_num(nan=0.0)


def _scores(part: Part, experiences: Sequence[Experience], columns: Columns) -> Tensor:
    """Return the part's result on the columns, one number per experience."""
    optional = part.data().get("reward_parts")
    if optional is False or (optional and "reward_parts" in columns):
        _refuse_unknown_parts(experiences, part.label)
    scores, rewards = part(columns), columns.get("rewards")
    if not isinstance(scores, Tensor) or scores.shape != rewards.shape:
        of = f"a tensor of shape {list(scores.shape)}" if isinstance(scores, Tensor) else ""
        gave = "one number" if of and not scores.ndim else of or type(scores).__name__
        with UserCode(whose := f"algorithm.{part.label}", part.function):  # for its line
            raise Refused(
                f"{whose} gave {gave}: expected one number per experience, a tensor of shape "
                f"[{len(experiences)}]"
            )
    _refuse_not_finite(part, scores, rewards, columns, experiences)
    return scores


def _refuse_not_finite(
    part: Part,
    scores: Tensor,
    rewards: Tensor,
    columns: Columns,
    experiences: Sequence[Experience],
) -> None:
    """Raise ValueError for infinite scores, and for a user's function that returns only NaN.

    NaN leaves an experience out, so that a filter may return it; if rewards differ in every group
    and nothing is left, it comes from a division by 0. Rewards that are too large are reported
    elsewhere.
    """
    if not np.isfinite(rewards.numpy()).all():  # those that are too large are NaN
        return
    given = scores.double().numpy(force=True)
    wrong = np.isinf(given)
    if np.isnan(given).all() and not part.function.__module__.startswith("trireme."):
        *_, stds = moments(rewards, columns.get("groups"), correction=0)
        wrong |= bool((stds > 0).all())
    if wrong.any():
        first = int(wrong.argmax())
        raise ValueError(
            f"{part.label} gave {given[first]:g} for {int(wrong.sum())} of "
            f"{len(experiences)} experiences, first for {experiences[first].eid.uid} with reward "
            f"{rewards[first].item():g}: expected finite numbers (NaN leaves an experience out)"
        )


def _refilled(scores: Tensor, rewards: Tensor, groups: Tensor, at_least: int) -> tuple[Tensor, int]:
    """Set whole groups that were left out to score 0, the first of them, until `at_least`
    experiences have a score; also return how many were filled in. An experience with a reward that
    is not finite stays out.
    """
    if not at_least:
        return scores, 0
    scores, refilled = scores.clone(), 0
    for group in range(int(groups.max()) + 1):
        if int((~scores.isnan()).sum()) >= at_least:
            break
        member = groups == group
        if bool(scores[member].isnan().all()) and bool(rewards[member].isfinite().all()):
            scores[member] = 0.0
            refilled += int(member.sum())
    return scores, refilled


def _copies(kept: list[Experience], num_groups: int) -> list[Experience]:
    """Draw whole groups at random, as many as complete `num_groups`; none if there are none to draw
    from.

    A copy's suffix distinguishes it from the original: no id occurs twice. The random numbers
    depend on the explore step: a resumed run draws the same groups.
    """
    groups = list(group_by(kept, "task").values())
    if not groups:
        return []
    draws = random.Random(str(kept[0].eid.batch))
    copies: list[Experience] = []
    for number, members in enumerate(draws.choices(groups, k=num_groups - len(groups))):
        for member in members:
            twin = copy.deepcopy(member)
            eid = member.eid
            suffix = f"{eid.suffix}copy{number}"
            twin.eid = EID(eid.batch, eid.task, eid.run, eid.step, suffix)
            copies.append(twin)
    return copies


def reward_metrics(experiences: list[Experience]) -> dict[str, float]:
    """Return metrics of the rewards alone, for advantages that the trainer computes; {} without
    any.
    """
    if not experiences or any(e.reward is None for e in experiences):
        return {}
    columns = columns_of(experiences)
    return _reward_metrics(columns.get("rewards"), columns.get("groups"))


def columns_of(experiences: Sequence[Experience]) -> Columns:
    """Return the columns that a group advantage may use; a reward that is too large to square is
    NaN, which leaves out what is compared with it. Raises ValueError if a reward is missing.
    """
    rewards: list[float] = []
    for experience in experiences:
        if experience.reward is None:
            infos = ", ".join(experience.info.get("rollout_infos") or ())
            scheduler = f", or a scheduler (total_reward of rollout_infos, which has {infos})"
            raise ValueError(
                f"experience {experience.eid.uid} has no reward: its workflow must set "
                f"one, or a reward function (default_reward_fn_type){scheduler if infos else ''}"
            )
        rewards.append(experience.reward)
    numbers = {tid: number for number, tid in enumerate(group_by(experiences, "task"))}
    likely = {"mean_logprobs": lambda: torch.from_numpy(_mean_logprobs(experiences))}
    made = {
        **_reward_parts(experiences),
        **(likely if all(e.logprobs is not None for e in experiences) else {}),
        "rewards": lambda: _squarable(rewards),
        "step_rewards": lambda: _squarable(_step_rewards(experiences)),
        "anchors": lambda: torch.tensor(_anchors(experiences)),
        "groups": lambda: torch.tensor([numbers[e.eid.tid] for e in experiences]),
        "runs": lambda: torch.tensor([e.eid.run for e in experiences]),
        "steps": lambda: torch.tensor([e.eid.step for e in experiences]),
        "lengths": lambda: torch.tensor([e.trained_tokens for e in experiences]),
    }
    return Columns({}, made=made)


def _squarable(rewards: Sequence[float]) -> Tensor:
    with np.errstate(over="ignore"):
        made = np.array(rewards, np.float32)
        made[~np.isfinite(np.square(made))] = math.nan
    return torch.from_numpy(made)


def _reward_parts(experiences: Sequence[Experience]) -> dict[str, Callable[[], Tensor]]:
    """Return the value of each reward, NaN where it does not apply, and its weight, both [N, K]:
    tasksets may weigh a reward of the same name differently. {} if workflows have recorded none.
    """
    found = [e.info.get("reward_parts", {}) for e in experiences]
    names = list(dict.fromkeys(name for parts in found for name in parts))
    if not names:
        return {}

    def column(of_pair: int) -> Tensor:
        unknown = (math.nan, 0.0)
        rows = [[parts.get(name, unknown)[of_pair] for name in names] for parts in found]
        return torch.tensor(rows, dtype=torch.float32)

    return {"reward_parts": lambda: column(0), "reward_weights": lambda: column(1)}


def _refuse_unknown_parts(experiences: Sequence[Experience], asked_by: str) -> None:
    """Raise ValueError if the parts of a reward do not account for all of it.

    Experiences that train no token (a prompt that was too long) need none.
    """
    for e in experiences:
        parts = e.info.get("reward_parts", {})
        if not e.trained_tokens:
            continue
        if not parts:
            raise ValueError(
                f"experience {e.eid.uid} has a reward without parts, and {asked_by} asks for "
                "'reward_parts': expected a workflow of reward functions (docs/rewards.md)"
            )
        total = math.fsum(value * weight for value, weight in parts.values())
        if not math.isclose(total, e.reward or 0.0, rel_tol=1e-4, abs_tol=1e-4):
            raise ValueError(
                f"the reward of experience {e.eid.uid} is {e.reward:g} and its parts come to "
                f"{total:g}, and {asked_by} asks for 'reward_parts': expected no operator "
                "(reward_shaping_mapper, length_penalty) or workflow that changes the reward"
            )


def _mean_logprobs(experiences: Sequence[Experience]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the mean over the trained tokens of each; NaN without any."""
    rows = [e.logprobs.numpy() for e in experiences if e.logprobs is not None]
    starts = np.cumsum([0, *(len(row) for row in rows[:-1])])
    trained = np.concatenate([e.mask.numpy() for e in experiences])
    summed = np.where(trained, np.concatenate(rows), 0.0)
    sums, counts = (np.add.reduceat(x, starts, dtype=np.float64) for x in (summed, trained))
    with np.errstate(invalid="ignore"):  # 0 / 0
        return (sums / counts).astype(np.float32)


def _step_rewards(experiences: Sequence[Experience]) -> list[float]:
    """Return the reward of each step: `info["step_reward"]`, 0 if only other steps of its run have
    it; in a run without any, the episode's reward in its last step.
    """
    last: dict[str, int] = {}
    for e in experiences:
        last[e.eid.rid] = max(last.get(e.eid.rid, 0), e.eid.step)
    with_rewards = {e.eid.rid for e in experiences if "step_reward" in e.info}
    return [
        float(e.info.get("step_reward", 0.0))
        if e.eid.rid in with_rewards
        else (e.reward or 0.0) * (e.eid.step == last[e.eid.rid])
        for e in experiences
    ]


def _anchors(experiences: Sequence[Experience]) -> list[int]:
    """Number the environment's states (`info["env_state_hash"]`); each unknown state has its own
    number.
    """
    known: dict[object, int] = {}
    return [
        known.setdefault(e.info.get("env_state_hash", ("unknown", index)), len(known))
        for index, e in enumerate(experiences)
    ]


def _reward_metrics(rewards: Tensor, groups: Tensor) -> dict[str, float]:
    """Measure the rewards, whatever the algorithm leaves out; those that are not finite, and their
    groups, do not count.
    """
    stds = moments(rewards, groups, correction=0)[-1].numpy()
    return {
        "reward_mean": _mean_of_finite(rewards.numpy()),
        "group_reward_std": _mean_of_finite(stds),
        "zero_std_groups": float((stds == 0).mean()),
    }


def _mean_of_finite(values: np.ndarray[Any, Any]) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean(dtype=np.float64)) if len(finite) else math.nan
