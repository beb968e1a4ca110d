"""Several rewards weighted, and rewards of whole groups, for workflows of one reply."""

from __future__ import annotations

import asyncio
import gc
import re
from typing import Any

import pytest

from trireme.experience import EID, Experience
from trireme.registry import reward
from trireme.rewards.grouped import Judge, Judges, Row, is_grouped, judge_of, reward_group
from trireme.rewards.orm import ORM
from trireme.task import Task
from trireme.workflows.single_turn import SimpleWorkflow
from trireme.workflows.workflow import resolve


def brief(task: Task, answer: str, *, most: int = 10) -> float:
    """1 for a brief answer."""
    return float(len(answer) <= most)


class Longest(ORM):
    """1 for the longest completion of the group."""

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:
        most = max(map(len, completions))
        return [float(len(text) == most) for text in completions]


def replies(*texts: str) -> list[Experience]:
    return [
        Experience([1, 2, 3], prompt_length=1, eid=EID(1, 0, run), response_text=text)
        for run, text in enumerate(texts)
    ]


def judged(task: Task, *texts: str) -> list[Experience]:
    found = replies(*texts)
    spec = resolve(task.workflow)
    assert spec.judge is not None and spec.examine is not None
    spec.examine(task)
    judge: Any = spec.judge(task, found, [])
    asyncio.run(judge)
    return found


def task(reward: Any, **options: Any) -> Task:
    row = {"prompt": "6 x 7?", "response": "42"}
    return Task(row, workflow="simple_workflow", reward_fn=reward, **options)


def test_several_rewards_are_summed_by_their_weights_and_logged_one_by_one() -> None:
    rewards = [
        {"name": "math_reward", "weight": 2.0, "format_score_coef": 0.5},
        {"name": f"{__name__}:brief", "most": 4, "weight": -1},
        f"{__name__}:Longest",
    ]
    right, wrong = judged(task(rewards), "it is 42", "41")
    assert right.reward == 2.0 * (1 - 0.5) - 0 + 1 and wrong.reward == 2.0 * -0.5 - 1 + 0
    assert right.metrics == {
        "accuracy": 1.0,
        "format_score": -0.5,
        "brief": 0.0,
        "rewards/math_reward": 0.5,
        "rewards/brief": 0.0,
        "rewards/Longest": 1.0,
    }


def test_rewards_of_one_name_and_an_environment_s_own_are_parts_of_their_own() -> None:
    name = f"{__name__}:brief"
    rewards = [{"name": name, "most": 4}, {"name": name, "most": 1, "weight": 3.0}]
    given = task(rewards)
    (found,) = replies("41")
    found.info["rollout_infos"] = {"total_reward": 10}
    asyncio.run(reward_group(judge_of(given.reward_fn, {}), given, [found], []))
    assert found.reward == 1 + 3 * 0 + 10
    assert found.info["reward_parts"] == {
        "brief": (1.0, 1.0),
        "brief_2": (0.0, 3.0),
        "total_reward": (10.0, 1.0),
    }
    assert found.metrics["rewards/brief_2"] == 0 and found.metrics["rewards/total_reward"] == 10


def noting(task: Task, answer: str) -> dict[str, float]:
    """A right answer, and a note on it."""
    return {"right": float(answer == "42"), "note/length": float(len(answer))}


def test_a_note_of_one_of_several_rewards_is_a_metric_and_does_not_count() -> None:
    [judged_one] = judged(task([f"{__name__}:noting", f"{__name__}:brief"]), "42")
    assert judged_one.reward == 2.0
    assert judged_one.metrics["length"] == 2.0
    assert judged_one.metrics["rewards/noting"] == 1.0


def test_the_same_by_reward_fn_args() -> None:
    args = {"funcs": ["accuracy_reward", "repetition"], "weights": [0.5, 1.0]}
    (right,) = judged(task(None, reward_fn_args=args), "42")
    assert right.reward == 0.5


def test_a_reward_of_groups_alone_takes_its_options_from_reward_fn_args() -> None:
    args = {"n_grams": 1, "max_penalty": -2.0}
    (found,) = judged(task("repetition", reward_fn_args=args), "no no no no")
    assert found.reward == -1.5


@pytest.mark.extension("judges")
def test_a_reward_of_one_answer_is_not_grouped() -> None:
    assert not is_grouped("math_reward", {}) and not is_grouped(None, {})
    assert not is_grouped(brief, {}) and is_grouped(Longest, {}) and is_grouped("ruler", {})
    (found,) = judged(task("math_reward"), "42")
    assert found.reward is None  # the workflow itself gives it


def test_what_cannot_be_is_named() -> None:
    for given, says in [
        ([{"name": "math_reward", "weight": "much"}], "weight of reward 'math_reward' is 'much'"),
        ([{"weight": 1}], "expected a name, or a section with a `name`"),
        (["hub/Reward-0.6B"], "unknown reward function 'hub/Reward-0.6B'. Known: "),
        (["math_rewrd"], "unknown reward function 'math_rewrd'; did you mean 'math_reward'"),
        ([{"name": "math_reward", "coef": 1}], "reward 'math_reward' has no option 'coef'"),
        ([{"name": "accuracy_reward", "wieght": 1}], r"has no options; did you mean 'weight'\?"),
    ]:
        with pytest.raises(ValueError, match=says):
            judge_of(given, {})
    with pytest.raises(ValueError, match="each has its own options"):
        judge_of(["math_reward"], {"x": 1})


def test_each_run_of_a_process_has_its_own_judges() -> None:
    """What they hold (a client, the state of a user's class) belongs to one event loop."""
    judges, one = Judges(), task(Longest)

    async def twice() -> list[Judge]:
        return [judges.of(one), judges.of(one)]

    made = []
    for _ in range(20):  # so that loops are made where others were
        first, again = asyncio.run(twice())
        assert first is again
        made.append(first)
        gc.collect(1)  # all that a loop leaves is young
    assert len({id(judge) for judge in made}) == 20


def test_a_users_plain_method_called_judge_is_left_alone() -> None:
    class Own(SimpleWorkflow):
        def judge(self, text: str) -> float:
            return 1.0

    assert resolve(Own).judge is None


def test_a_reward_may_ask_for_the_sampled_ids_and_the_auxiliary_models() -> None:
    seen: list[Any] = []

    @reward("sees_all")
    def sees_all(task: Task, answer: str, *, response_token: Any, auxiliary_models: Any) -> float:
        seen.append((response_token, auxiliary_models))
        return 0.0

    found = replies("a")
    found[0].versions = (found[0].tokens > 1).int() - 1
    asyncio.run(SimpleWorkflow.judge(task(["sees_all"]), found, ["model"]))
    assert seen == [([2, 3], ["model"])]


def trl(prompts: Any, completions: Any, completion_ids: Any, level: Any, **columns: Any) -> Any:
    """As TRL calls it: everything is a list, an item a rollout."""
    assert prompts == columns["prompt"] and len(completion_ids) == len(completions)
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    kinds = {type(c) for c in completions}
    assert kinds == {str if isinstance(prompts[0], str) else list}
    return [float(len(text) * n) for text, n in zip(texts, level, strict=True)]


def by_length(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


@pytest.mark.parametrize("prompt", ["6 x 7?", [{"role": "user", "content": "6 x 7?"}]])
def test_a_reward_of_trl_runs_as_it_is(prompt: Any) -> None:
    made = Task({"prompt": prompt, "level": 2}, workflow="simple_workflow", reward_fn=trl)
    assert [e.reward for e in judged(made, "one", "four")] == [6.0, 8.0]
    made.reward_fn = by_length
    assert len(judged(made, "one", "four")) == 2


@pytest.mark.parametrize(
    ("batch", "most", "told"), [(3, 10, (2, 10)), ("3/held_out", 10, (3, 10)), (0, None, (0, -1))]
)
def test_a_reward_of_trl_and_ms_swift_is_told_how_far_the_training_is(
    batch: int | str, most: int | None, told: tuple[int, int]
) -> None:
    def schedule(completions: list[str], **named: Any) -> list[float]:
        state = named["trainer_state"]
        assert (state.global_step, state.max_steps) == told
        return [0.0] * len(completions)

    judged(task(schedule, batch_id=batch, num_explore_steps=most), "one", "four")


def test_a_column_called_completion_is_not_what_the_model_said() -> None:
    """As in a data set of prompts and completions that is trained by reinforcement."""

    def right(
        completions: list[str], completion: list[str], trajectory_inputs: Any, **columns: Any
    ) -> list[float]:
        samples = [sample for (sample,) in trajectory_inputs.values()]
        assert [sample["completion"] for sample in samples] == completions
        return [float(a == b) for a, b in zip(completions, completion, strict=True)]

    row = {"prompt": "6 x 7?", "completion": "42"}
    made = Task(row, workflow="simple_workflow", reward_fn=right)
    assert [e.reward for e in judged(made, "42", "41")] == [1.0, 0.0]


def test_a_reward_of_trl_that_needs_another_column_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 'level', and the data set has no such column"):
        judged(Task({"prompt": "?"}, workflow="simple_workflow", reward_fn=trl), "one")


def test_without_a_function_or_an_environment_there_is_no_reward() -> None:
    found = replies("a", "b")
    found[1].info["rollout_infos"] = {"total_reward": 2.0}
    nothing = Task({"prompt": "6 x 7?"})
    asyncio.run(reward_group(judge_of(None, {}), nothing, found, []))
    assert [one.reward for one in found] == [None, 2.0]


@pytest.mark.parametrize("value", ["{}", [1], None, 3])
def test_a_column_called_data_dict_is_one_as_any_other(value: Any) -> None:
    """It holds columns where it is a mapping, as ms-swift has it."""

    def told(completions: list[str], data_dict: list[Any], **more: Any) -> list[float]:
        return [float(cell == value) for cell in data_dict]

    def level(completions: list[str], level: list[int], **more: Any) -> list[float]:
        return [float(cell) for cell in level]

    for judge, cell, expected in ((told, value, 1.0), (level, {"level": 4}, 4.0)):
        task, [reply] = Task({"response": "1", "data_dict": cell}), replies("a")
        asyncio.run(reward_group(judge_of(judge, {}), task, [reply], []))
        assert reply.reward == expected


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"funcs": None}, r"reward_fn_args.funcs is None: expected a list"),
        ({"funcs": ["cosine"], "weights": 5}, r"reward_fn_args.weights is 5: expected a list"),
        ({"funcs": ["cosine"], "weights": [10**400]}, r"the weight of reward 'cosine' is 1000"),
    ],
)
def test_rewards_and_weights_that_are_no_lists_are_refused(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        judge_of(None, args)


@pytest.mark.parametrize("name", ["accuracy", {"name": "cosine", "max_len": 8}])
def test_rewards_that_compare_with_an_answer_need_one_before_the_run(name: Any) -> None:
    def examine(row: dict[str, Any], *more: Any) -> None:
        judge_of([name, *more], {}).examine(Task({"prompt": "?", **row}))

    with pytest.raises(ValueError, match=r"needs the right answer.* no column 'response'.*prompt"):
        examine({})
    with pytest.raises(ValueError, match="needs the right answer"):
        examine({}, "accuracy")
    examine({"solution": "2"})
    examine({"response": "2"})
    examine({"response": None})  # of this row alone
    examine({"solution": None})
    examine({}, "format")  # which applies to all rows


@pytest.mark.parametrize("earned", [None, "1.0", [1.0, 2.0], float("nan")])
def test_a_total_of_an_environment_that_is_no_number_is_refused(earned: Any) -> None:
    row = Row("a", [], infos={"total_reward": earned})
    expected = re.escape(f"rollout 0 of task 0 has the total_reward (rollout_infos) {earned!r}: ")
    with pytest.raises(ValueError, match=expected + "expected a (finite )?number"):
        asyncio.run(Judge.of([]).rewards(Task({"prompt": "?"}), [row]))
