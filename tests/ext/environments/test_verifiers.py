"""Environments of the package `verifiers`: their own trace has the ids that are trained."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.agents.programs import tool_call
from tests.agents.steered import Steered, exactness, make_model
from tests.agents.test_programs import embedded, scripted
from trireme.engines.engine import Sampling
from trireme.explorer.runner import Outcome, Runner, TimeLimit
from trireme.explorer.scheduler import Scheduler
from trireme.ext.environments.generated import Environment, Played, environment, made_rows
from trireme.model.chat_tokens import ChatTokens
from trireme.model.model import Model
from trireme.task import Task
from trireme.workflows.workflow import resolve

pytest.importorskip("verifiers", reason="make test-agents installs verifiers")
PATH = "verifiers:numbers_environment?count=3"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    environment.cache_clear()
    yield


def rollout(
    model: Path, row: Any, replies: list[str | None], **limits: Any
) -> tuple[Outcome, Steered]:
    """One rollout of a row, whose first replies are given."""
    return scripted(model, Task(row, workflow="verifiers_workflow"), replies, **limits)


def test_the_trace_of_an_environment_is_what_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "model")
    rows: Any = made_rows(PATH)
    assert len(rows) == 3 and rows[2]["question"] == "What is 2 times 7?"
    played: list[Played] = []
    play = Environment.play

    async def kept(*args: Any) -> Played:
        played.append(await play(*args))
        return played[-1]

    monkeypatch.setattr(Environment, "play", kept)
    outcome, engine = rollout(model, rows[2], [tool_call("multiply", {"a": 2, "b": 7})])
    assert not outcome.failures, outcome.failures[0]
    [experience] = outcome.experiences
    assert experience.reward == 1.5
    assert (experience.metrics["used_tool"], experience.metrics["brief"]) == (1.0, 1.0)
    assert "14" in engine.prompts[-1]
    found = exactness(outcome.experiences, engine.sampled, model)
    assert found.calls == 2 and found.drift < 1e-4
    last = played[0].trace[-1]["tokens"]
    assert [*last["prompt_ids"], *last["completion_ids"]] == experience.tokens.tolist()
    assert [step["tokens"]["completion_ids"] for step in played[0].trace] == engine.sampled


@pytest.mark.parametrize(
    ("replies", "limits", "calls"),
    [
        ([""], {}, 1),
        ([tool_call("multiply", {"a": 2, "b": 7}), ""], {}, 2),
        ([], {"max_prompt_tokens": 5}, 0),
        ([tool_call("multiply", {"a": 2, "b": 7})],
         {"max_prompt_tokens": 210, "max_model_len": 220, "enable_prompt_truncation": False}, 1),
    ],
)  # fmt: skip
def test_an_empty_reply_ends_a_rollout_and_is_data(
    tmp_path: Path, replies: list[str | None], limits: dict[str, Any], calls: int
) -> None:
    rows: Any = made_rows(PATH)
    outcome, engine = rollout(make_model(tmp_path / "model"), rows[2], replies, **limits)
    assert not outcome.failures, outcome.failures[0]
    [experience] = outcome.experiences
    assert len(engine.sampled) == calls
    assert experience.reward == (0.5 if calls else 0.0)  # without its only prompt, 0


def group_of(
    model: Path, row: Any, replies: list[str | None], rollouts: int, per_runner: int, runners: int
) -> Outcome:
    """A task whose rollouts are shared out to runners. With one rollout per runner and one runner
    the replies are those of one rollout after the other.
    """

    async def main() -> Outcome:
        tokenizer = AutoTokenizer.from_pretrained(model)
        chat = ChatTokens(tokenizer)
        async with embedded(model) as (own, most):
            engine: Any = Steered(own, tokenizer, lambda _: replies.pop(0) if replies else "none")

            def make(task: Task, key: tuple[Any, ...]) -> Model:
                sampling = Sampling(max_tokens=256)
                return Model(engine, chat, key=key, sampling=sampling, max_model_len=most)

            limit = TimeLimit(60.0)
            several = [Runner(make, engine, limit=limit, max_retries=0) for _ in range(runners)]
            scheduler = Scheduler(several, max_repeats_per_runner=per_runner)
            scheduler.start()
            task = Task(row, workflow="verifiers_workflow", repeat_times=rollouts)
            await scheduler.submit(1, [task])
            [outcome] = await scheduler.results(1)
            await scheduler.close()
            return outcome

    return asyncio.run(main())


CALL = tool_call("multiply", {"a": 2, "b": 7})
BROKEN = tool_call("multiply", {"a": 2, "b": None})
"""Ends the rollout with an error of the environment."""


@pytest.mark.parametrize("group", [False, True])
def test_rewards_that_compare_rollouts_see_all_of_a_task(tmp_path: Path, group: bool) -> None:
    model = make_model(tmp_path / "model")
    rows: Any = made_rows(f"{PATH}&{'groups' if group else 'together'}=true")
    outcome = group_of(model, rows[2], [CALL, "14", "14", BROKEN, ""], 4, per_runner=1, runners=1)
    [failed] = outcome.failures  # is not compared
    assert failed.key == "1/0/2" and "ToolCallError" in failed.message
    # messages of the completions: 3, 1 and 0
    scores = {e.eid.run: (e.reward, e.metrics["used_tool"]) for e in outcome.experiences}
    assert scores == {0: (1.0, 1.0), 1: (0.0, 0.0), 3: (0.5, 0.0)}
    assert [e.metrics["briefest"] for e in outcome.experiences] == [0.0, 0.0, 1.0]


def test_the_rollouts_of_several_runners_are_compared_with_each_other(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    rows: Any = made_rows(f"{PATH}&together=true")
    outcome = group_of(model, rows[2], [CALL], 4, per_runner=2, runners=2)
    assert not outcome.failures, outcome.failures[0]
    assert sorted(e.reward or 0.0 for e in outcome.experiences) == [0.5, 0.5, 0.5, 1.0]


def test_a_member_of_a_group_that_judges_each_rollout_by_itself_still_does(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    rows: Any = made_rows(f"{PATH}&groups=true")
    assert len(rows) == 6  # three of each member
    outcome = group_of(model, rows[5], [CALL, "14", "14"], 2, per_runner=1, runners=1)
    assert [e.reward for e in outcome.experiences] == [1.5, 0.5]
    assert all("briefest" not in e.metrics for e in outcome.experiences)


def test_what_cannot_be_loaded_is_said() -> None:
    with pytest.raises(ValueError, match="nowhere_environment: the environment cannot be loaded"):
        environment("verifiers:nowhere_environment")
    with pytest.raises(ValueError, match="split is 'dev': expected train or eval"):
        environment(f"{PATH}&split=dev")
    spec = resolve("verifiers_workflow")
    assert spec.examine is not None
    with pytest.raises(ValueError, match="needs a taskset of an environment"):
        spec.examine(Task({"prompt": "a"}))


def test_an_environment_leaves_the_signals_alone_and_can_be_made_in_a_thread() -> None:
    """Ctrl-C and SIGTERM no longer reached the run; on Ray, environments are made in threads."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    environment(PATH)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    environment.cache_clear()
    with ThreadPoolExecutor(1) as threads:
        assert len(threads.submit(environment, PATH).result()) == 3


MADE = """
import verifiers as vf
from datasets import Dataset

ROWS = Dataset.from_list([{"question": "a", "answer": "b"}])

async def right(completion, **_):
    return 1.0

async def misspelt(completion, **_):
    return completion[0].text

async def short(completions, **_) -> list[float]:
    return [1.0]

def load_environment(rows="ROWS", names="right", held_out=False, group=False):
    if group:
        return vf.EnvGroup([load_environment(), load_environment(names=names)])
    functions = [globals()[name] for name in names.split()]
    data = {"eval_dataset" if held_out else "dataset": eval(rows)}
    return vf.SingleTurnEnv(rubric=vf.Rubric(funcs=functions), **data)
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "made_environment.py").write_text(MADE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "made_environment", raising=False)
    return "verifiers:made_environment?"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("names=''", "a rubric of the environment has no reward functions: expected one at least"),
        ("names=''&group=true", r"environment \(of SingleTurnEnv\) has no reward functions"),
        ("held_out=true", "has rows for evaluation alone: expected split=eval"),
        ("rows=none", r"(?s)cannot be loaded: NameError: .*made_environment\.py:\d+: data = "),
        ("difficulty=2", "cannot be loaded: TypeError: .*unexpected keyword argument 'difficulty'"),
    ],
)
def test_an_environment_that_cannot_give_rows_or_rewards_is_refused(
    made: str, options: str, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        environment(f"{made}{options}")


def test_rows_for_evaluation_alone_and_a_prompt_of_text(made: str) -> None:
    assert len(environment(f"{made}held_out=true&split=eval")) == 1
    rows: Any = made_rows(f"{made}rows=Dataset.from_list([{{'prompt':'a'}}])")
    with pytest.raises(ValueError, match="row 0 has a prompt that is str: expected a list of mess"):
        rows[0]


def test_a_reward_that_raises_is_named_once_with_its_line(
    made: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(tmp_path / "model")
    rows: Any = made_rows(f"{made}names=right misspelt")
    outcome = group_of(model, rows[0], [], 2, per_runner=1, runners=1)
    assert [e.reward for e in outcome.experiences] == [1.0, 1.0]
    lines = [one for one in caplog.records if "'misspelt' raised" in one.getMessage()]
    assert "raised AttributeError" in lines[0].getMessage()
    assert "made_environment.py:11: return completion[0].text" in vars(lines[0])["place"]
    assert [getattr(one, "file_only", False) for one in lines] == [False, True]


def test_a_reward_of_groups_that_gives_too_few_numbers_is_named(made: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    rows: Any = made_rows(f"{made}names=short")
    outcome = group_of(model, rows[0], [], 2, per_runner=1, runners=1)
    assert len(outcome.failures) == 2 and not outcome.experiences
    assert "expected of short a list with a number for each of the 2" in outcome.failures[0].message
