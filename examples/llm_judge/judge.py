"""A judge that solves the task itself: a reply is right where it comes to the judge's own result.

plugins: [judge.py]       default_reward_fn_type: same_as_judge
"""

import functools

from trireme import Task, reward
from trireme.ext.external_model.asker import Asker
from trireme.rewards.answers import final_answer, same


@functools.cache
def judge() -> Asker:
    """Asks the first of `explorer.auxiliary_models`, equal questions once."""
    return Asker(auxiliary=0, temperature=0.0, max_tokens=60)


@reward("same_as_judge")
async def same_as_judge(task: Task, answer: str, *, auxiliary_models: list) -> dict[str, float]:
    """1 where the reply and the judge come to one result; what is right, nobody is told."""
    solution = await judge().ask([{"role": "user", "content": task.prompt}], auxiliary_models)
    return {"agrees": float(same(final_answer(answer), final_answer(solution) or ""))}
