"""Judging: workflows whose replies are judged by a model: another one, or the model itself."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

from trireme.aio import also_blocking
from trireme.experience import Experience
from trireme.ext.judges.judge import comparison, read_scores, with_pictures
from trireme.model.chat_tokens import conversation_of
from trireme.pictures import pictures_in
from trireme.rewards.grouped import is_grouped
from trireme.rewards.reward import resolve, score
from trireme.task import Task
from trireme.workflows.single_turn import MathWorkflow, SimpleWorkflow


class MathRmWorkflow(MathWorkflow):
    """A mathematical question whose replies a model judges, one by one."""

    default_reward = "judge"


class MathRulerWorkflow(MathWorkflow):
    """A mathematical question whose replies a model compares; the metric `gold_reward` is what
    `math_reward` would have given.
    """

    default_reward = "ruler"
    reward_parts = True

    @also_blocking
    async def run(self) -> list[Experience]:
        """Ask, and record the replies' rewards by the right answer."""
        experiences = await super().run()
        gold = resolve("math_reward")
        assert gold is not None
        for experience in experiences:
            if self.truth is not None:
                parts = await score(self.task, experience.response_text or "", gold)
                experience.metrics["gold_reward"] = sum(parts.values())
        return experiences


class RubricJudgeWorkflow(SimpleWorkflow):
    """One prompt, one reply, rated by a model that is given the row's criteria."""

    default_reward = "rubric"


class MathTrainableRulerWorkflow(MathWorkflow):
    """A mathematical question whose right answer is known now and then (`workflow_args`:
    `truth_share`, 0.2 of the tasks of an explore step).

    Where it is known, the task's reward is the replies' (else the metric `gold_reward`), and the
    model compares them n times: a group of its own, whose reward is 1 - mean |score - reward|, the
    replies' rewards cut to 0 to 1, and 0 where no scores can be read. Where it is not, the scores
    of one comparison, which is not trained, are the replies' rewards.
    """

    can_repeat = True

    async def ask(self) -> list[Experience]:
        """Return n replies, one per run."""
        return await self.model.chat_async(self.format_messages(), n=self.repeat_times)

    @also_blocking
    async def run(self) -> list[Experience]:
        """Ask, judge, and judge the judgements."""
        replies = await super().run()
        if self.is_eval or any(e.truncate_status == "prompt_truncated" for e in replies):
            return replies
        gold = [e.reward or 0.0 for e in replies]
        known = self.truth_is_known()
        asked = conversation_of(self.task, self.task_desc, None)
        if pictures_in(asked):  # read already, and cached
            asked = self.model.model.chat_tokens.plain(asked)
        seen = {picture.digest: picture for picture in pictures_in(asked)}
        question = comparison(asked, [e.response_text or "" for e in replies], seen=seen)
        judgements = await self.model.chat_async(
            [{"role": "user", "content": with_pictures(question, seen)}],
            n=self.repeat_times if known else 1,
        )
        opinions = [read_scores(e.response_text or "", len(replies)) for e in judgements]
        success = statistics.fmean(scores is not None for scores in opinions)
        for index, (reply, reward) in enumerate(zip(replies, gold, strict=True)):
            reply.metrics |= {"gold_reward": reward, "judge_success": success}
            if not known:
                reply.reward = opinions[0][index] if opinions[0] else 0.0
        if not known:
            return replies
        for judgement, scores in zip(judgements, opinions, strict=True):
            judgement.eid.task = f"{self.task.task_id}-ruler"
            judgement.reward = agreement(scores, gold)
        return [*replies, *judgements]

    def truth_is_known(self) -> bool:
        """Drawn for each task of an explore step; a step that is done again draws the same."""
        share = float(self.workflow_args.get("truth_share", 0.2))
        return random.Random(f"{self.task.batch_id}/{self.task.task_id}").random() < share

    @classmethod
    def examine(cls, task: Task) -> None:
        """Raise ValueError for options that cannot be."""
        share = task.workflow_args.get("truth_share", 0.2)
        if not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ValueError(f"workflow_args.truth_share is {share!r}: expected 0 to 1")
        if is_grouped(task.reward_fn or cls.default_reward, task.reward_fn_args):
            raise ValueError(
                f"{cls.__name__} compares with the reward of one reply, and "
                f"default_reward_fn_type is {task.reward_fn!r}: expected one such as math_reward"
            )
        super().examine(task)


def agreement(scores: Sequence[float] | None, rewards: Sequence[float]) -> float:
    """Return 1 - mean |score - reward|, rewards clipped to 0 to 1; 0 without scores."""
    if scores is None:
        return 0.0
    pairs = zip(scores, rewards, strict=True)
    return 1 - statistics.fmean(abs(score - min(max(reward, 0.0), 1.0)) for score, reward in pairs)
