"""Causes: recognizes in a run's metrics why it does not learn, and suggests a remedy.

Each cause is a pure function of the figures. Normal values are no cause: `Facts` defines them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from trireme.monitor.figures import Course, Figures, mean, span, values
from trireme.pipeline.pipeline import left_out_by

if TYPE_CHECKING:
    from trireme.algorithms.recipes import Recipe
    from trireme.config import Plan


@dataclass(frozen=True)
class Facts:
    """The facts that determine which values are normal in this run."""

    rewards_teach: bool = True
    """False: a teacher does, and rewards only measure."""
    teacher_beside: bool = False
    """A teacher is learned from as well, whatever the rewards are."""
    staleness: float | None = 0.0
    """How many pushes old tokens are by the synchronizer's plan; None: they may be of any age."""
    replies_may_end: bool = True
    """False: a reply is one token, so the limit cuts every one."""

    @classmethod
    def of(cls, plan: Plan, recipe: Recipe) -> Facts:
        """Derive the facts from a plan and its algorithm: one without a ratio is made for stale
        tokens.
        """
        replays = plan.config.buffer.trainer_input.experience_buffer.replay_buffer.enable
        any_age = replays or "old_logprobs" not in recipe.policy_loss.data()
        planned = 1 + plan.sync.offset / plan.sync.interval
        return cls(
            rewards_teach=recipe.rewards_teach,
            teacher_beside=recipe.teacher is not None,
            staleness=None if any_age else planned,
            replies_may_end=plan.lengths.max_response_tokens > 1,
        )


@dataclass(frozen=True)
class Cause:
    """One way in which a run does not learn."""

    name: str
    part: str
    limit: float
    seen: Callable[[Course, float, Facts], str | None]
    """Describes the figures if they are past the limit."""
    when: str
    """The limit as text, with its value as {limit}."""
    why: str
    """Of the limit."""
    do: str
    shows: bool = False
    """Whether a sample rollout helps."""


CAUSES: list[Cause] = []
"""All causes with their limits; docs/troubleshooting.md has the same table."""
Seen = Callable[[Course, float, Facts], str | None]


def _cause(
    name: str, part: str, limit: float, when: str, why: str, do: str, *, shows: bool = False
) -> Callable[[Seen], Seen]:
    """Add the cause that a function sees; the words are those of `Cause`."""

    def add(seen: Seen) -> Seen:
        CAUSES.append(Cause(name, part, limit, seen, when, why, do, shows))
        return seen

    return add


_DEVIATION = "experience_pipeline/group_reward_std"


@_cause(
    "judge_unread",
    "explorer",
    0.0,
    "no reply of the judge could be read (`judge_success` 0)",
    "each gives a reward of 0, or none, that says nothing about the policy",
    "read the judge's replies: use a stronger model, a larger `max_tokens`, or a `prompt` that "
    "specifies the form of the verdict (docs/rewards.md)",
)
def _judge_unread(course: Course, limit: float, facts: Facts) -> str | None:
    read = values(course.now, "rollout/judge_success/mean")
    if not facts.rewards_teach or not read or fmean(read) > limit:
        return None
    return f"no reply of the judge in {span(course.now)} could be read"


@_cause(
    "zero_rewards",
    "explorer",
    0.0,
    "every reward is 0",
    "one success in 32 rollouts is enough to learn from",
    "compare the end of a reply with what the reward expects: another format, another type, a "
    "wrong `format.response_key`; else the task is too hard: warm up with `sft`, or easier tasks",
    shows=True,
)
def _all_zero(course: Course, limit: float, facts: Facts) -> str | None:
    rows = course.now
    highest, lowest = values(rows, "rollout/reward/max"), values(rows, "rollout/reward/min")
    if not facts.rewards_teach or not highest or any(highest) or any(lowest):
        return None
    if _judge_unread(course, 0.0, facts):
        return None
    if course.best > limit:
        return None  # rewards that were there and went away are another cause
    if any(values(rows, "experience_pipeline/reward_mean")):
        return None  # of single steps: those of rollouts are their last steps'
    beside = ": the model learns from the teacher only" if facts.teacher_beside else ""
    return f"every reward of {span(rows)} is 0{beside}"


@_cause(
    "equal_rewards",
    "explorer",
    0.9,
    "in {limit:.0%} of the groups no rollout has an advantage, and the rewards do not differ",
    "towards the end of a good run all rollouts may succeed in half of the groups",
    "a reward that distinguishes replies; tasks that are neither always nor never solved "
    "(`difficulty_based`, or `reward_std_filter`); more `repeat_times`; a `temperature` of 1; "
    "if rewards differed at first, the policy may have collapsed to one reply: a smaller "
    "`algorithm.optimizer.lr`",
    shows=True,
)
def _all_equal(course: Course, limit: float, facts: Facts) -> str | None:
    rows = course.now
    idle = values(rows, "experience_pipeline/idle_groups")
    if not facts.rewards_teach or len(idle) < len(rows) or not idle or fmean(idle) < limit:
        return None
    if _judge_unread(course, 0.0, facts) or _all_zero(course, 0.0, facts):
        return None
    if any(values(rows, "experience_pipeline/not_finite")):
        return None
    equal = values(rows, "experience_pipeline/zero_std_groups")
    if equal and fmean(equal) < limit and mean(rows, _DEVIATION) > 1e-6:
        return None  # rewards differ: the advantages are 0, or left out, for another reason
    reward = mean(rows, "rollout/reward/mean")
    beside = " from the rewards: the model learns from the teacher only"
    return (
        f"in {fmean(idle):.0%} of the groups of {span(rows)} all rollouts have the same reward "
        f"(the mean is {reward:.3g}), which gives no gradient"
        + (beside if facts.teacher_beside else "")
    )


@_cause(
    "rewards_gone",
    "explorer",
    0.1,
    "the mean reward is at most {limit:.0%} of what it was",
    "noise may halve a reward, but not cut it by nine tenths",
    "the policy has collapsed: go back to a checkpoint with a smaller "
    "`algorithm.optimizer.lr`, `trainer.grad_clip: 1.0`, or a `kl_loss_fn`",
    shows=True,
)
def _rewards_gone(course: Course, limit: float, facts: Facts) -> str | None:
    rows = course.now
    means = values(rows, "rollout/reward/mean")
    if not facts.rewards_teach or not means or course.best <= 0.05:
        return None
    if fmean(means) > limit * course.best:
        return None
    return f"the mean reward was {course.best:.3g}, and in {span(rows)} it is {fmean(means):.3g}"


def _cut(rows: Sequence[Figures]) -> float:
    too_long = mean(rows, "rollout/prompt_truncated/mean")
    return mean(rows, "rollout/truncated/mean") - too_long


@_cause(
    "replies_cut",
    "explorer",
    0.5,
    "{limit:.0%} of the rollouts have a reply that was cut",
    "a cut reply seldom contains its answer; if half are cut, length is learned, not the task",
    "raise `model.max_response_tokens` (and `max_model_len`), or ask for shorter replies; a "
    "model that never ends a turn lacks its chat template or end token",
    shows=True,
)
def _replies_cut(course: Course, limit: float, facts: Facts) -> str | None:
    share, rows = _cut(course.now), course.now
    if share < limit or not facts.replies_may_end:
        return None
    length = mean(rows, "rollout/response_length/mean")
    return (
        f"{share:.0%} of the rollouts of {span(rows)} have a reply that was cut at its limit "
        f"(mean length {length:.0f} tokens)"
    )


@_cause(
    "prompts_too_long",
    "explorer",
    0.05,
    "{limit:.0%} of the rollouts have a prompt that is too long",
    "the model is not called, and a rollout with no other prompt has a reward of 0",
    "raise `model.max_prompt_tokens` and `max_model_len`, or leave such rows out; "
    "`trireme check` prints their lengths",
)
def _prompts_too_long(course: Course, limit: float, facts: Facts) -> str | None:
    share = mean(course.now, "rollout/prompt_truncated/mean")
    if share < limit or not share:
        return None
    return (
        f"{share:.0%} of the rollouts of {span(course.now)} had a prompt that is too long: "
        "the model was not called, and the reward is 0 if there was no other prompt"
    )


@_cause(
    "length_drift",
    "explorer",
    1.5,
    "replies are {limit:g} times as long as at first, and a quarter of them is cut",
    "replies may grow if that pays; up to the limit they grow only if nothing penalizes it",
    "a `length_penalty` operator or `math_dapo_reward` with its penalty; `loss_agg_mode: "
    "token-mean`; a larger limit if replies are still right",
)
def _lengths_drift(course: Course, limit: float, facts: Facts) -> str | None:
    name = "rollout/response_length/mean"
    then, now = mean(course.began, name), mean(course.now, name)
    few, many = _cut(course.began), _cut(course.now)
    if not then or now < limit * then or few > 0.1 or many < 0.25:
        return None
    return (
        f"replies grew from {then:.0f} to {now:.0f} tokens, and the share that is cut from "
        f"{few:.0%} to {many:.0%}"
    )


@_cause(
    "entropy_collapse",
    "trainer",
    0.1,
    "the entropy is at most {limit:.0%} of what it was, and below 0.05 nats",
    "at that point the rollouts of a group are the same text, and nothing is left to compare",
    "`clip_range_high: 0.28`, an entropy bonus (`entropy_loss_fn_args: {entropy_coef: "
    "0.001}`), a smaller `lr`, a `kl_loss_fn`; a task that is already solved needs nothing",
)
def _entropy_gone(course: Course, limit: float, facts: Facts) -> str | None:
    then, now = (mean(rows, "actor/entropy") for rows in (course.began, course.now))
    if not values(course.now, "actor/entropy") or then <= 0.02 or now > limit * then or now > 0.05:
        return None
    return f"the entropy fell from {then:.3g} to {now:.3g} nats a token: all replies are alike"


@_cause(
    "entropy_climb",
    "trainer",
    1.25,
    "the entropy is {limit:g} times what it was, and 0.5 nats more",
    "learning narrows the choice of tokens; a wider one than at first is drift, which the reward "
    "may hide for a while",
    "a smaller `algorithm.optimizer.lr`, a `kl_loss_fn` with a larger `kl_coef`, a smaller "
    "`entropy_coef`; read some late rollouts: `trireme view`",
    shows=True,
)
def _entropy_climbs(course: Course, limit: float, facts: Facts) -> str | None:
    then, now = (mean(rows, "actor/entropy") for rows in (course.began, course.now))
    if not values(course.began, "actor/entropy") or now < limit * then or now < then + 0.5:
        return None
    kl = values(course.now, "actor/kl_loss")
    far = f", and the divergence from the reference is {fmean(kl):.3g}" if kl else ""
    return f"the entropy rose from {then:.3g} to {now:.3g} nats a token{far}"


@_cause(
    "no_gradient",
    "trainer",
    0.0,
    "the gradient is 0 in every step, and the policy loss is not",
    "a loss other than 0 moves the weights, unless it does not depend on them",
    "check that your own `policy_loss_fn` uses `logprobs`, and neither detaches them nor "
    "multiplies them by 0",
)
def _no_gradient(course: Course, limit: float, facts: Facts) -> str | None:
    rows = course.now
    norms, sizes = (values(rows, n) for n in ("actor/grad_norm", "actor/pg_loss"))
    if not norms or len(norms) < len(rows) or max(norms) > limit or not any(sizes):
        return None
    loss = fmean(sizes)
    return f"the gradient of {span(rows)} is 0, though the policy loss is not (mean {loss:.3g})"


@_cause(
    "logprob_gap",
    "trainer",
    0.02,
    "engine and trainer differ by {limit:g} nats a token on the same weights",
    "float32 gives 1e-5; at 0.02 ratios leave the clip range before anything is trained",
    "`algorithm.rollout_correction` (truncated importance sampling), the same `dtype` in "
    "engine and trainer; for a model with custom code compare the two on one prompt",
)
def _gap(course: Course, limit: float, facts: Facts) -> str | None:
    difference = mean(course.now, "rollout/logprob_diff_mean")
    if difference <= limit:
        return None
    return (
        f"engine and trainer differ by {difference:.3g} nats a token on the same weights (mean of "
        f"{span(course.now)})"
    )


@_cause(
    "staleness",
    "trainer",
    4.0,
    "tokens are {limit:g} pushes older than the synchronizer plans",
    "clipping and correction work up to about four",
    "`sample_strategy: staleness_control`, a smaller `capacity` of the buffer, more trainers "
    "for each explorer, or an algorithm for stale experiences (`opmd`, `topr`)",
)
def _stale(course: Course, limit: float, facts: Facts) -> str | None:
    age = mean(course.now, "rollout/staleness_mean")
    if facts.staleness is None or age <= limit + facts.staleness:
        return None
    return f"tokens are {age:.1f} pushes old when they are trained (mean of {span(course.now)})"


@_cause(
    "tools_dropped",
    "explorer",
    0.0,
    "calls have tools, the chat template renders none of them, and no tool call succeeds",
    "the model cannot call what it is not shown",
    "`model.chat_template_path` with a template that renders `tools`, or describe them in the "
    "system prompt",
)
def _tools_dropped(course: Course, limit: float, facts: Facts) -> str | None:
    share = mean(course.now, "rollout/conversation/tools_dropped/mean")
    made, failed = (mean(course.now, f"rollout/tool_{n}/mean") for n in ("calls", "errors"))
    if share <= limit or made > failed:  # a model that was taught its tools calls them unseen
        return None
    return "the chat template renders none of the tools of the calls"


@_cause(
    "history_rewritten",
    "explorer",
    0.5,
    "conversations are split {limit:g} times on average",
    "each part repeats its history: the same tokens cost several times as much",
    "intended if thinking is to be dropped; else use a template that leaves history unchanged",
)
def _rewritten(course: Course, limit: float, facts: Facts) -> str | None:
    splits = mean(course.now, "rollout/conversation/splits/mean")
    if splits < limit:
        return None
    return (
        f"the chat template rewrites earlier turns: a conversation is split {splits:.1f} "
        "times, and each part is trained by itself"
    )


@_cause(
    "nothing_masked",
    "explorer",
    0.05,
    "{limit:.0%} of the rollouts have no token that is trained",
    "a workflow that returns such experiences usually builds a wrong mask",
    "`trireme view --url` colours the trained tokens; check `action_mask`, `loss_scale` and how "
    "the workflow creates its experiences",
)
def _nothing_masked(course: Course, limit: float, facts: Facts) -> str | None:
    share = mean(course.now, "rollout/untrained/mean")
    if share < limit or not share:
        return None
    return f"{share:.0%} of the rollouts of {span(course.now)} have no token that is trained"


@_cause(
    "left_out",
    "explorer",
    0.9,
    "operators leave nothing of {limit:.0%} of the groups",
    "a filter should remove the useless part, not the data set",
    "a lower `threshold`, another order of the operators, or tasks of another difficulty",
)
def _left_out(course: Course, limit: float, facts: Facts) -> str | None:
    rows = course.now
    emptied = mean(rows, "experience_pipeline/emptied_groups")
    tasks = mean(rows, "rollout/tasks")
    return None if not tasks or emptied < limit * tasks else left_out_by(rows)


@_cause(
    "reward_not_finite",
    "explorer",
    0.0,
    "a reward is not finite, or too large for 32 bits",
    "it invalidates its whole group",
    "fix a division or logarithm in the workflow or the reward; `invalid_reward_filter` drops "
    "such experiences before they invalidate their group. "
    "`log/explorer_experience_pipeline.log` names them",
)
def _not_finite(course: Course, limit: float, facts: Facts) -> str | None:
    names = ("not_finite", "filtered_count", "made")
    bad, filtered, made = (
        sum(values(course.rows[-1:], f"experience_pipeline/{name}")) for name in names
    )
    if bad <= limit:
        return None
    more = f", and {filtered - bad:.0f} of their groups with them" if filtered > bad else ""
    return (
        f"{bad:.0f} of {made:.0f} experiences of this step have "
        f"a reward from which no advantage can be computed (NaN, or too large to be squared in "
        f"32 bits), and are left out{more}"
    )


@_cause(
    "rollouts_failed",
    "explorer",
    0.1,
    "{limit:.0%} of the rollouts fail",
    "a few time-outs are normal in environments",
    "their tracebacks are in `log/explorer_runner_*.log`; `explorer.max_failures` stops a run "
    "after so many",
)
def _failed(course: Course, limit: float, facts: Facts) -> str | None:
    rows = course.now
    failed, made = mean(rows, "rollout/failed"), mean(rows, "rollout/runs")
    if not failed or failed < limit * (failed + made):
        return None
    kinds = ("error", "timeout", "empty")
    counts = [(kind, sum(values(rows, f"rollout/failed/{kind}"))) for kind in kinds]
    why = ", ".join(f"{kind} {count:.0f}" for kind, count in counts if count)
    share = failed / (failed + made)
    return f"{share:.0%} of the rollouts of {span(rows)} failed ({why}) and are left out"


@_cause(
    "rows_cut",
    "trainer",
    0.1,
    "{limit:.0%} of a data set's rows are cut or left out",
    "the end of a reply is cut, with its end token",
    "raise `model.max_model_len`, or shorten the rows; `trireme check` prints their lengths",
)
def _rows_cut(course: Course, limit: float, facts: Facts) -> str | None:
    names = ("data/rows", "data/cut", "data/dropped")
    read, cut, dropped = (sum(values(course.now, name)) for name in names)
    if not read or cut + dropped < limit * read:
        return None
    return (
        f"of {read:.0f} rows {cut:.0f} were cut at model.max_model_len and {dropped:.0f} left out, "
        "since none of their trained tokens fit"
    )
