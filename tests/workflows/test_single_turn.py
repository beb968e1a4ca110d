from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from tests.model.fake import TOKENIZER, FakeEngine, make
from trireme import Experience, Task
from trireme.algorithms.recipes import get_recipe
from trireme.config.schema import AlgorithmConfig
from trireme.workflows.examine import examine_taskset
from trireme.workflows.single_turn import (
    BOXED,
    THINK_ANSWER,
    MathBoxedWorkflow,
    MathWorkflow,
    SimpleWorkflow,
)
from trireme.workflows.workflow import resolve

GOOD = "<think>\n6 * 7\n</think>\n<answer>\n42\n</answer>"


def run(workflow: Any, replies: Any, **fields: Any) -> tuple[Experience, str]:
    """The experience of one run, and the prompt that the engine got."""
    fields.setdefault("raw_task", {"prompt": "6 * 7?", "response": "#### 42"})
    options = {"max_prompt_tokens": fields.pop("max_prompt_tokens", None)}
    model = make(replies, **options)

    async def call() -> list[Experience]:
        spec = resolve(workflow)
        assert not spec.blocking and not spec.can_repeat
        return await spec.call(Task(**fields), model, 1, 0)

    (experience,) = asyncio.run(call())
    assert isinstance(model.engine, FakeEngine)
    return experience, TOKENIZER.decode(model.engine.prompts[0]) if model.engine.prompts else ""


@pytest.mark.parametrize("name", ["math_workflow", "async_math_workflow", MathWorkflow])
def test_math_workflow_asks_for_tags_and_judges(name: Any) -> None:
    experience, prompt = run(name, [GOOD])
    assert experience.reward == pytest.approx(1.1)
    assert experience.metrics == {"accuracy": 1.0, "format_score": 0.1}
    assert prompt.startswith(f"<|im_start|>system\n{THINK_ANSWER}<|im_end|>")
    assert TOKENIZER.decode(experience.tokens[experience.mask]) == GOOD + "<|im_end|>"


def test_a_given_system_prompt_and_reward_replace_the_default_ones() -> None:
    experience, prompt = run(
        "math_workflow",
        ["42"],
        format_args={"system_prompt": "Hi."},
        reward_fn="accuracy_reward",
    )
    assert prompt.startswith("<|im_start|>system\nHi.<|im_end|>\n<|im_start|>user\n6 * 7?")
    assert experience.reward == 1.0


def test_another_reward_brings_no_system_prompt() -> None:
    _, prompt = run("math_workflow", ["42"], reward_fn="accuracy_reward")
    assert prompt.startswith("<|im_start|>user")


def test_simple_workflow_goes_on_from_the_reply_prefix() -> None:
    experience, prompt = run(
        "simple_workflow",
        ["6 * 7\n</think>\n<answer>\n42\n</answer>"],
        format_args={"reply_prefix": "<think>\n"},
        reward_fn="math_reward",
        reward_fn_args={"format_score_coef": 0.5},
    )
    assert prompt.endswith("<|im_start|>assistant\n<think>\n")
    assert experience.reward == 1.5


def test_simple_workflow_needs_a_reward() -> None:
    with pytest.raises(
        ValueError, match="SimpleWorkflow needs a reward: set default_reward_fn_type"
    ):
        run("simple_workflow", ["42"])


def test_boxed_workflow_passes_its_options_to_the_reward() -> None:
    experience, prompt = run("math_boxed_workflow", ["\\boxed{42}"])
    assert BOXED in prompt and experience.reward == 1.0
    experience, prompt = run(
        "math_boxed_workflow",
        ["\\boxed{42}"],
        workflow_args={"with_think": True, "format_score_coef": 0.25},
    )
    assert "<think>" in prompt and experience.reward == 0.75


def test_boxed_workflow_gives_a_base_model_plain_text() -> None:
    experience, prompt = run(
        "math_boxed_workflow", ["\\boxed{42}"], workflow_args={"use_base": True}
    )
    assert prompt == f"User: 6 * 7?\n{BOXED}\nAssistant:" and experience.reward == 1.0


def test_a_prompt_that_is_too_long_earns_nothing_and_is_not_judged() -> None:
    experience, _ = run("math_workflow", [], max_prompt_tokens=10)
    assert experience.reward == 0.0 and experience.truncate_status == "prompt_truncated"
    assert experience.metrics == {}


def test_a_row_without_question_or_answer_is_a_clear_error() -> None:
    with pytest.raises(ValueError, match=r"column 'prompt' \(format.prompt_key\) holds None"):
        run("math_workflow", ["42"], raw_task={"question": "6 * 7?"})
    with pytest.raises(ValueError, match="has no right answer to compare with"):
        run("math_workflow", ["42"], raw_task={"prompt": "6 * 7?"})


class Polite(SimpleWorkflow):
    def format_messages(self) -> list[dict[str, Any]]:
        messages = super().format_messages()
        messages[-1]["content"] += " Please."
        return messages

    def reward_fn(self, response: str, truth: str) -> dict[str, float]:
        return {"polite": float("please" in response), "long": 0.5 * len(truth)}


def test_a_subclass_changes_the_messages_and_the_reward() -> None:
    experience, prompt = run(Polite, ["yes please"])
    assert "6 * 7? Please.<|im_end|>" in prompt
    assert experience.reward == 1.0 + 0.5 * len("#### 42")
    assert experience.metrics == {"polite": 1.0, "long": 3.5}


def test_an_evaluation_is_sampled_its_own_way_and_gives_an_accuracy_alone() -> None:
    model = make(["\\boxed{42}", "\\boxed{41}"])
    task = Task(raw_task={"prompt": "6 * 7?", "response": "42"})
    spec = resolve("async_math_eval_workflow")

    async def twice() -> list[Experience]:
        return [(await spec.call(task, model, 1, 0))[0] for _ in range(2)]

    found = [(e.reward, e.metrics) for e in asyncio.run(twice())]
    assert found == [(None, {"accuracy": 1.0}), (None, {"accuracy": 0.0})]
    assert isinstance(model.engine, FakeEngine)
    assert {(s.temperature, s.top_p, s.n) for s in model.engine.samplings} == {(0.6, 0.8, 1)}


def test_a_prompt_that_is_no_text_is_told_before_the_run() -> None:
    task = Task(raw_task={"prompt": 3}, reward_fn="accuracy_reward")
    with pytest.raises(ValueError, match=r"column 'prompt' \(format.prompt_key\) holds 3"):
        SimpleWorkflow.examine(task)


CHAT = [
    {"role": "user", "content": "6 * 7?"},
    {"role": "assistant", "content": "41"},
    {"role": "user", "content": [{"type": "text", "text": "Sure?"}]},
]


def test_a_prompt_in_chat_format_keeps_its_messages() -> None:
    row = {"prompt": CHAT, "response": "42"}
    experience, prompt = run("math_workflow", [GOOD], raw_task=row)
    assert prompt.startswith(f"<|im_start|>system\n{THINK_ANSWER}<|im_end|>\n<|im_start|>user\n6")
    assert "<|im_start|>assistant\n41<|im_end|>" in prompt
    assert prompt.endswith("user\nSure?<|im_end|>\n<|im_start|>assistant\n")
    assert experience.reward == pytest.approx(1.1)


def test_the_rows_own_system_message_goes_before_the_yamls() -> None:
    row = {"prompt": [{"role": "system", "content": "Own."}, *CHAT], "response": "42"}
    for format_args in ({}, {"system_prompt": "Hi."}):
        _, prompt = run("math_workflow", [GOOD], raw_task=row, format_args=format_args)
        assert prompt.startswith("<|im_start|>system\nOwn.<|im_end|>\n<|im_start|>user\n6 * 7?")
    row = {"prompt": CHAT, "response": "42"}
    _, prompt = run("math_workflow", [GOOD], raw_task=row, format_args={"system_prompt": "Hi."})
    assert prompt.startswith("<|im_start|>system\nHi.<|im_end|>\n<|im_start|>user\n6 * 7?")


def test_a_base_model_gets_a_conversation_as_lines() -> None:
    row = {"prompt": CHAT, "response": "42"}
    _, prompt = run(
        "math_boxed_workflow", ["\\boxed{42}"], raw_task=row, workflow_args={"use_base": True}
    )
    assert prompt == f"User: 6 * 7?\nAssistant: 41\nUser: Sure?\n{BOXED}\nAssistant:"
    seen: dict[str, Any] = {
        "raw_task": {**row, "images": [b"png"]},
        "workflow_args": {"use_base": True},
    }
    with pytest.raises(ValueError, match="shows a picture, and a base model gets plain text"):
        run("math_boxed_workflow", ["\\boxed{42}"], **seen)
    with pytest.raises(ValueError, match="shows a picture, and a base model gets plain text"):
        MathBoxedWorkflow.examine(Task(**seen))


@pytest.mark.parametrize(
    "workflow",
    [
        "simple_workflow",
        "math_workflow",
        pytest.param("multi_turn_scheduler", marks=pytest.mark.extension("multi_turn")),
    ],
)
@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "What is it?", "videos": ["a.mp4"]}, "'videos' is not empty: only text"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]},
            "only text and pictures are supported",
        ),
        ({"prompt": [{"content": "no role"}]}, "'role' and 'content'"),
        ({"prompt": []}, "expected text, or a list of messages"),
        ({"prompt": 7}, "expected text, or a list of messages"),
    ],
)
def test_what_is_no_text_is_refused_before_the_run(
    workflow: str, row: dict[str, Any], said: str
) -> None:
    examine = resolve(workflow).examine
    assert examine is not None
    with pytest.raises(ValueError, match=said):
        examine(Task(raw_task=row, reward_fn="accuracy_reward"))


@pytest.mark.parametrize("is_eval", [False, True])
def test_distillation_without_a_teacher_is_refused_where_it_trains(is_eval: bool) -> None:
    task = Task({"prompt": "1"}, workflow="on_policy_distill_workflow", is_eval=is_eval)
    tasks: Any = SimpleNamespace(kinds=lambda: [task])
    for models in ([], ["one"]):
        explorer = SimpleNamespace(auxiliary_models=models)
        plan: Any = SimpleNamespace(config=SimpleNamespace(explorer=explorer))
        refused = not models and not is_eval
        with pytest.raises(ValueError, match="add a model") if refused else nullcontext():
            examine_taskset(tasks, plan, get_recipe(AlgorithmConfig()))
