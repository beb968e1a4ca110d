"""What a run shows, without a terminal and on one."""

from __future__ import annotations

import io
from typing import Any

import torch

from trireme.experience import Experience
from trireme.monitor.console import Console
from trireme.monitor.figures import Summary, chart
from trireme.monitor.terminal import Terminal


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_console(*, live: bool = False) -> tuple[Console, Clock, io.StringIO]:
    text, clock = io.StringIO(), Clock()
    output = Terminal(file=text, width=80, force_terminal=live, color_system=None)
    return Console(live=live, output=output, every=5, clock=clock), clock, text


def rollout(**given: Any) -> Experience:
    fields: dict[str, Any] = {"prompt_text": "1+1=?", "response_text": "2", "reward": 1.0} | given
    return Experience([1, 2], prompt_length=1, **fields)


def test_lines_come_first_last_and_every_few_seconds() -> None:
    console, clock, text = make_console()
    console.stage("rft", 10)
    for step in range(1, 11):
        clock.now += 2
        console.step("explorer", step, {"rollout/reward/mean": step / 10})
        console.step("trainer", step, {"actor/sft_loss": 0.5})
    lines = text.getvalue().splitlines()
    assert lines[0] == "rft: 10 steps"
    assert [line.split()[1] for line in lines[1:]] == ["1/10", "4/10", "7/10", "10/10"]
    assert lines[2] == "rft 4/10  reward 0.400  loss 0.5  2.00 s/step  left 0:12"


def test_figures_of_the_first_step_are_printed_once() -> None:
    console, clock, text = make_console()
    console.stage("rft", 10)
    clock.now += 20
    console.step("explorer", 1, {"rollout/reward/mean": 0.1})
    clock.now += 20
    console.step("trainer", 1, {"actor/sft_loss": 0.5})
    assert text.getvalue().splitlines()[1:] == ["rft 1/10  reward 0.100  loss 0.5"]


def test_an_explorer_that_runs_ahead_of_the_first_train_step_is_shown() -> None:
    console, clock, text = make_console()
    console.stage("rft", 10)
    for step in (1, 2):
        clock.now += 20
        console.step("explorer", step, {"rollout/reward/mean": step / 10})
    assert text.getvalue().splitlines()[1:] == ["rft 0/10  reward 0.200"]


def test_an_evaluation_is_a_line_of_its_own() -> None:
    console, _, text = make_console()
    metrics = {"eval/gsm8k-eval/accuracy/mean@1": 0.342, "eval/gsm8k-eval/tasks": 500.0}
    console.step("eval", 0, metrics)
    assert text.getvalue() == "evaluation gsm8k-eval at step 0: accuracy 34.2%  tasks 500\n"
    console.step("eval", 0, metrics)
    assert text.getvalue().endswith("evaluation gsm8k-eval at the end: accuracy 34.2%  tasks 500\n")


def test_a_stage_without_a_known_end_counts_steps() -> None:
    console, _, text = make_console()
    console.stage(None, None, until="until it is stopped")
    console.step("trainer", 1, {})
    assert text.getvalue().splitlines() == ["run: until it is stopped", "run 1"]


def test_an_exploring_run_counts_its_own_steps() -> None:
    console, _, text = make_console()
    console.stage("collect", 2, by="explorer")
    console.step("explorer", 1, {"rollout/reward/mean": 0.5})
    assert text.getvalue().splitlines()[-1] == "collect 1/2  reward 0.500"


def test_a_rollout_is_shown_now_and_then_and_as_it_is() -> None:
    console, clock, text = make_console()
    console.rollout(rollout(response_text="[bold]2[/bold]\nfor sure"))
    clock.now += 10
    console.rollout(rollout())
    assert text.getvalue().splitlines() == [
        "a rollout:",
        "    asked    1+1=?",
        "    replied  [bold]2[/bold] ⏎ for sure",
        "    reward   1",
    ]


def test_of_a_conversation_the_last_question_is_shown() -> None:
    console, _, text = make_console()
    messages = [{"role": "user", "content": "first"}, {"role": "user", "content": "last"}]
    console.rollout(rollout(messages=messages))
    assert "asked    last" in text.getvalue()


def test_of_several_turns_the_question_of_the_first_sampled_reply_is_shown() -> None:
    console, _, text = make_console()
    said = ("user", "an example"), ("assistant", "shown"), ("user", "1+1=?"), ("assistant", "3")
    messages = [{"role": role, "content": content} for role, content in said]
    messages += [{"role": "user", "content": "No."}, {"role": "assistant", "content": "2"}]
    mask = torch.tensor([False, False, True, False, True])
    console.rollout(Experience(tokens=torch.arange(5), mask=mask, messages=messages, reward=1.0))
    assert text.getvalue().splitlines()[1:] == [
        "    asked    1+1=?",
        "    replied  3",
        "    user     No.",
        "    replied  2",
        "    reward   1",
    ]


def test_a_tools_turns_are_named_and_the_middle_of_many_is_left_out() -> None:
    console, _, text = make_console()
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "?"}]}]
    for turn in range(9):
        messages += [{"role": "assistant", "content": None, "tool_calls": [call]}]
        messages += [{"role": "tool", "content": f"result {turn}"}]
    mask = torch.tensor([False, *([True, False] * 9)])
    console.rollout(Experience(tokens=torch.arange(19), mask=mask, messages=messages, reward=0.0))
    lines = [line[4:] for line in text.getvalue().splitlines()[1:]]
    assert lines[:4] == [
        "asked    ?",
        'replied  add({"a": 1})',
        "tool     result 0",
        "         ... 10 turns ...",
    ]
    assert lines[-2:] == ["tool     result 8", "reward   0"] and len(lines) == 11


def test_a_turn_whose_line_would_only_say_that_it_is_left_out_is_shown() -> None:
    console, _, text = make_console()
    turns = [{"role": role, "content": role} for role in ("user", "assistant") * 5]
    mask = torch.tensor([False, True] * 5)
    console.rollout(Experience(tokens=torch.arange(10), mask=mask, messages=turns, reward=0.0))
    assert "..." not in text.getvalue() and text.getvalue().count("replied") == 5


def test_long_lines_are_not_broken_where_there_is_no_terminal() -> None:
    console, _, text = make_console()
    console.note("x" * 300)
    console.finish(Summary(model_dir="/" + "m" * 200))
    assert "x" * 300 in text.getvalue()
    assert "m" * 200 in text.getvalue()


def test_a_run_that_has_ended_early_has_no_time_left() -> None:
    console, clock, text = make_console(live=True)
    console.stage("rft", 9)
    for step in (1, 2):
        clock.now += 1
        console.step("trainer", step, {})
    console.close()
    assert text.getvalue().endswith("rft 2/9  1.00 s/step\n")


def test_the_last_step_of_a_run_that_has_ended_early_is_shown_without_a_terminal_too() -> None:
    console, clock, text = make_console()
    console.stage("rft", 9)
    for step in (1, 2):
        clock.now += 1
        console.step("trainer", step, {})
    console.close()
    console.finish(Summary(wall_s=3))
    assert [line for line in text.getvalue().splitlines() if line.startswith("rft")] == [
        "rft: 9 steps",
        "rft 1/9",
        "rft 2/9  1.00 s/step",
    ]


def test_a_terminal_shows_progress_a_rollout_and_lasting_lines() -> None:
    console, clock, text = make_console(live=True)
    console.stage("rft", 3)
    for step in (1, 2):
        clock.now += 1
        console.step("explorer", step, {"rollout/reward/mean": step / 10})
        console.step("trainer", step, {"actor/sft_loss": 0.5})
    console.rollout(rollout())
    console.note("a note")
    console.finish(Summary(wall_s=3))
    shown = text.getvalue()
    assert "2/3" in shown and "1.00 s/step" in shown and "left 0:01" in shown
    assert "asked    1+1=?" in shown
    assert "a note\n" in shown
    assert shown.index("rft 2/3  reward 0.200") < shown.index("wall time")


def test_the_end_shows_the_curve_and_the_same_task_at_each_stage() -> None:
    console, _, text = make_console()
    replies = {"before": {"text": "", "reward": 0.0}, "after RL": {"text": "so:\n2", "reward": 1.0}}
    summary = Summary(
        accuracy_rl=0.5,
        example={"prompt": "1+1?", "truth": "2", "drawn": "greedy", "replies": replies},
    )
    console.finish(summary, [0.25, 0.5, 0.75, 1.0], "sampled at temperature 1")
    lines = text.getvalue().splitlines()
    assert lines[1] == "reward of the training steps (replies sampled at temperature 1)"
    assert lines[2] == "    1.00 │   █" and lines[7].startswith("    0.25 │▁███")
    assert lines[8].strip() == "step 1 to 4"
    assert lines[10:14] == [
        "a held-out task: 1+1?",
        "    right      2",
        "    before     nothing   (reward 0)",
        "    after RL   so: ⏎ 2   (reward 1)",
    ]
    assert "a training step's reward is of sampled replies" in lines[16]


def test_a_chart_of_equal_values_is_flat() -> None:
    assert chart([0.5] * 3, width=10, height=2) == ["    0.50 │", "    0.50 │▁▁▁"]
