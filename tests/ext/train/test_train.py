"""A run from Python: the same checks as a YAML's, in a notebook's event loop, and interruptible."""

from __future__ import annotations

import asyncio
import functools
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import pytest

import trireme
from trireme.data.rows import load_rows
from trireme.ext.multi_turn.tool_calls import TOOLS
from trireme.ext.train.train import config_from
from trireme.registry import REWARDS, TRACKERS, WORKFLOWS
from trireme.task import Task

ROWS = [{"question": f"{n} + 1?", "answer": n + 1, "level": n % 3} for n in range(8)]
SMALL = {"max_response_tokens": 8, "max_model_len": 64}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is its own, and Ctrl-C is Python's: a command that another test ran in
    this process has left its own handler, which ends the process when its time is over.
    """
    for registry in (REWARDS, TRACKERS, WORKFLOWS, TOOLS):
        monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


def varied(task: Task, answer: str, *, level: int) -> float:
    assert task.truth == str(int(task.question[0]) + 1)
    return level + (sum(map(ord, answer)) % 17) / 16


async def twice(task: Task, model: trireme.Model) -> list[trireme.Experience]:
    chat = [{"role": "user", "content": task.prompt}]
    chat.append((await model.chat(chat)).message)
    await model.chat([*chat, {"role": "user", "content": "again"}])
    return model.experiences(reward=1.0)


def start(tiny_dir: Path, tmp_path: Path, **more: Any) -> trireme.Run:
    values = {"model": SMALL, "checkpoint_root_dir": str(tmp_path), **more}
    return trireme.train(**{"model": tiny_dir, "tasks": ROWS, **options_of(values)})


def options_of(values: dict[str, Any]) -> dict[str, Any]:
    """The model's section by its keys, since `model` is the model's path."""
    section = values.pop("model")
    return values | {f"model.{key}": value for key, value in section.items()}


def test_a_run_in_a_running_event_loop(tiny_dir: Path, tmp_path: Path) -> None:
    async def cell() -> trireme.Run:
        steps = {"total_steps": 2, "batch_size": 4}
        return start(tiny_dir, tmp_path, reward=varied, eval_tasks=ROWS[:2], buffer=steps)

    run = asyncio.run(cell())
    assert run.folder == tmp_path / "python" / "grpo"
    assert run.model is not None and (run.model / "model.safetensors").is_file()
    frame = pandas.DataFrame(run.metrics).set_index("step")
    assert list(frame.index) == [0, 1, 2]
    assert frame["rollout/reward/mean"].notna().tolist() == [False, True, True]
    assert frame["actor/grad_norm"].notna().tolist() == [False, True, True]
    assert len(run.rollouts()) == 64 and len(run.rollouts(2)) == 32
    with pytest.raises(ValueError, match=r"step 3 has no stored rollouts: expected one of 1, 2$"):
        run.rollouts(3)
    assert run.summary.evaluations["run"]["last"]["held_out"]["tasks"] == 2


def test_a_workflow_and_a_frame(tiny_dir: Path, tmp_path: Path) -> None:
    rows = pandas.DataFrame(ROWS[:2])
    run = start(tiny_dir, tmp_path, tasks=rows, workflow=twice, **{"algorithm.repeat_times": 2})
    assert {e.reward for e in run.rollouts()} == {1.0}
    assert run.plans[0].steps.batch_size == 2


def test_several_rewards_with_their_weights(tiny_dir: Path, tmp_path: Path) -> None:
    def levels(completions: list[str], level: list[int], **columns: Any) -> list[float | None]:
        return [None if value == 0 else float(value) for value in level]

    def three(task: Task, answer: str) -> float:
        return 3.0

    rewards = [{"name": levels, "weight": 0.5}, three]
    steps = {"total_steps": 1, "batch_size": 4}
    run = start(tiny_dir, tmp_path, reward=rewards, buffer=steps, **{"algorithm.repeat_times": 2})
    assert {e.reward for e in run.rollouts()} <= {3.0, 3.5, 4.0} and run.rollouts()
    assert run.metrics["rollout/rewards/three/mean"][-1] == 3.0
    assert "rollout/rewards/levels/mean" in run.metrics
    with pytest.raises(trireme.ConfigError, match="expected a name, or a section with a `name`"):
        start(tiny_dir, tmp_path, reward=[{"weight": 0.5}])


def multiply(a: int, b: int) -> int:
    """The product of two numbers.

    Args:
        a: One number.
        b: The other.
    """
    return a * b


def test_functions_are_tools_of_a_conversation(tiny_dir: Path, tmp_path: Path) -> None:
    steps = {"total_steps": 1, "batch_size": 2}
    turns = {"buffer.explorer_input.taskset.workflow_args.max_turns": 2}
    room = {"model.max_model_len": 1024}
    tools = [multiply, "calculator"]
    more = {"algorithm.repeat_times": 2, **turns, **room}
    run = start(tiny_dir, tmp_path, reward=varied, tools=tools, buffer=steps, **more)
    rollouts = run.rollouts()
    assert rollouts
    for experience in rollouts:
        names = [tool["function"]["name"] for tool in experience.tools or ()]
        assert names == ["multiply", "calculator"]
    taskset = run.plans[0].config.buffer.explorer_input.taskset
    assert taskset is not None and taskset.workflow_args["max_turns"] == 2


def test_tools_beside_a_workflow_and_without_a_docstring_are_refused(
    tiny_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="a workflow is given: expected one of them"):
        start(tiny_dir, tmp_path, workflow=twice, tools=[multiply])
    with pytest.raises(trireme.ConfigError, match="has no JSON schema"):
        start(tiny_dir, tmp_path, reward=varied, tools=[lambda a: a])


INPUT = "buffer.explorer_input"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"tools": [multiply], f"{INPUT}.default_workflow_type": "simple_workflow"},
         rf"{INPUT}.taskset has the workflow simple_workflow: expected one of them"),
        ({"tools": [multiply], "buffer": {"explorer_input": {"default_workflow_type": "math"}}},
         rf"{INPUT}.taskset has the workflow math"),
        ({"tools": [multiply], f"{INPUT}.taskset.default_workflow_type": "math"},
         rf"{INPUT}.taskset has the workflow math"),
        ({"tools": [multiply], f"{INPUT}.taskset.workflow_args.tools": ["calculator"]},
         rf"{INPUT}.taskset.workflow_args.tools is \['calculator'\]: expected all of them"),
        ({"tools": multiply}, r"tools is multiply alone: expected a list, tools=\[multiply\]"),
        ({"callbacks": "wandb"}, r"callbacks is 'wandb' alone: expected a list"),
        ({"callbacks": [print], "monitor": {"monitor_type": "wandb"}}, "is given, too"),
        ({"callbacks": [print], "monitor": None}, "monitor"),
    ],
)  # fmt: skip
def test_overrides_take_no_tools_and_callbacks_away(
    given: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    known: dict[str, Any] = {name: given.get(name, ()) for name in ("tools", "callbacks")}
    overrides = {key: value for key, value in given.items() if key not in known}
    overrides["checkpoint_root_dir"] = str(tmp_path)
    with pytest.raises(ValueError, match=sentence):
        config_from("m", ROWS, None, None, "grpo", None, overrides, **known)


@pytest.mark.extension("trackers")
def test_callbacks_are_told_of_every_step(tiny_dir: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    def note(metrics: dict[str, float], step: int, part: str) -> None:
        assert metrics
        seen.append((part, step))

    class Board:
        def __init__(self) -> None:
            self.seen: list[tuple[str, int]] = []

        def update(self, metrics: dict[str, float], step: int, part: str) -> None:
            self.seen.append((part, step))

        __call__ = update

    board, called, partly = Board(), Board(), Board()
    callbacks = [note, board.update, called, functools.partial(partly.update)]
    steps = {"total_steps": 2, "batch_size": 2}
    one = {"algorithm.repeat_times": 2}
    start(tiny_dir, tmp_path, reward=varied, callbacks=callbacks, buffer=steps, **one)
    assert {("explorer", 1), ("explorer", 2), ("trainer", 1), ("trainer", 2)} <= set(seen)
    assert board.seen == called.seen == partly.seen == seen
    assert (tmp_path / "python/grpo/monitor/tensorboard").is_dir()
    key = {"monitor.monitor_type": "wandb"}
    with pytest.raises(ValueError, match=r"monitor\.monitor_type is given, too"):
        start(tiny_dir, tmp_path, reward=varied, callbacks=[note], **key)

    def wrong(metrics: dict[str, float]) -> None: ...

    with pytest.raises(trireme.ConfigError, match=r"expected \(metrics, step, part\)"):
        start(tiny_dir, tmp_path, reward=varied, callbacks=[wrong])
    with pytest.raises(trireme.ConfigError, match=r"expected \(metrics, step, part\)"):
        start(tiny_dir, tmp_path, reward=varied, callbacks=[functools.partial(wrong)])
    with pytest.raises(ValueError, match="callbacks hold 7: expected functions"):
        start(tiny_dir, tmp_path, reward=varied, callbacks=[7])
    with pytest.raises(trireme.ConfigError, match="or a class with the methods log"):
        start(tiny_dir, tmp_path, reward=varied, callbacks=[Task])


def test_a_class_that_waits_for_events_is_sent_to_its_key() -> None:
    class Stops:
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...

    sentence = r"Stops, which has on_step_end.*trainer=\{'callbacks': \['my_file:Stops'\]\}"
    given: list[Any] = [Stops, Stops()]
    for callback in given:
        with pytest.raises(ValueError, match=sentence):
            config_from("m", ROWS, None, None, "grpo", None, {}, callbacks=[callback])


def test_columns_of_a_file_are_found_as_those_of_rows(tmp_path: Path) -> None:
    path = tmp_path / "tasks.csv"
    path.write_text("question,solution\n1 + 1?,2\n")
    config = config_from("m", path, None, None, "grpo", path, {})
    taskset = config.buffer.explorer_input.taskset
    assert taskset is not None
    (held_out,) = config.buffer.explorer_input.eval_tasksets
    for one in (taskset, held_out):
        assert one.path == str(path)
        assert (one.format.prompt_key, one.format.response_key) == ("question", "solution")
    assert config.buffer.batch_size == 1


def test_a_cell_of_a_frame_without_a_value_is_none(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"question": ["1 + 1?", "2 + 2?"], "answer": [2, None]})
    frame["day"] = pandas.Series(["monday", pandas.NaT], dtype=object)
    keys = {"checkpoint_root_dir": str(tmp_path)}
    for tasks, expected in (
        (
            frame,
            [
                {"question": "1 + 1?", "answer": 2.0, "day": "monday"},
                {"question": "2 + 2?", "answer": None, "day": None},
            ],
        ),
        (frame["question"], [{"prompt": "1 + 1?"}, {"prompt": "2 + 2?"}]),
    ):
        taskset = config_from("m", tasks, None, None, "grpo", None, keys).buffer.explorer_input
        assert taskset.taskset is not None
        assert list(load_rows(str(taskset.taskset.path))) == expected


def test_what_cannot_run_is_said_as_of_a_yaml(tiny_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(trireme.ConfigError) as caught:
        start(tiny_dir, tmp_path, reward="math_rewad", algorithm="grpo", mode="both")
    assert "did you mean 'math_reward'?" in str(caught.value)
    with pytest.raises(trireme.ConfigError, match=r"did you mean 'trainer\.grad_clip'\?"):
        start(tiny_dir, tmp_path, reward=varied, trainer={"grad_clipp": 1})
    with pytest.raises(ValueError, match=r"tasks\[1\] is 7: expected a row"):
        start(tiny_dir, tmp_path, reward=varied, tasks=["1 + 1?", 7])
    with pytest.raises(ValueError, match="tasks is empty"):
        start(tiny_dir, tmp_path, reward=varied, tasks=[])
    with pytest.raises(
        ValueError, match=r"tasks is dict: it has train, test: expected .* one split"
    ):
        start(tiny_dir, tmp_path, reward=varied, tasks={"train": ROWS, "test": ROWS})
    with pytest.raises(ValueError, match="tasks is NoneType: expected a list of rows"):
        start(tiny_dir, tmp_path, reward=varied, tasks=None)
    seen = [{"prompt": "1 + 1?"}, {"prompt": "and here?", "image": b"\x89PNG"}]
    with pytest.raises(
        ValueError, match=r"tasks\[1\]\['image'\] cannot .*\(it is bytes: .*a picture is the path"
    ):
        start(tiny_dir, tmp_path, reward=varied, tasks=seen)
    assert not (tmp_path / "python" / "grpo").exists()


def test_a_misspelt_argument_with_a_function_is_named(tiny_dir: Path, tmp_path: Path) -> None:
    for name, meant in (("callback", "callbacks"), ("tool", "tools")):
        with pytest.raises(
            trireme.ConfigError, match=f"{name} is not a known key; did you mean '{meant}'"
        ):
            start(tiny_dir, tmp_path, **{name: [multiply]})


def test_a_function_of_the_same_name_is_another_reward(tiny_dir: Path, tmp_path: Path) -> None:
    from trireme.ext.train.train import _named

    def accuracy(task: Task, answer: str) -> float:
        return 1.0

    first = _named(REWARDS, accuracy)
    assert first == "accuracy_2", "the built-in one keeps its name"
    assert _named(REWARDS, accuracy) == first
    others = [_named(REWARDS, lambda task, answer: 0.0) for _ in range(2)]  # of one line, two
    assert len({*others}) == 2 and all(str(name).startswith("reward") for name in others)


def test_an_interrupted_run_saves_and_goes_on(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = 0

    def stopping(task: Task, answer: str) -> float:
        nonlocal seen
        seen += 1
        if seen == 70:  # in the third step
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return float(len(answer))

    options = {"reward": stopping, "name": "mine", "buffer": {"total_steps": 20, "batch_size": 4}}
    sentence = r"step \d+ is saved; the same call resumes from it"
    with pytest.raises(KeyboardInterrupt, match=sentence):
        start(tiny_dir, tmp_path, **options)
    saved = trireme_steps(tmp_path)
    assert saved and saved[-1] < 20
    run = start(tiny_dir, tmp_path, **options)
    assert f"global_step_{saved[-1]}" in capsys.readouterr().out
    assert run.metrics["step"] == [float(step) for step in range(1, 21)]


def test_a_process_has_one_run_at_a_time(tiny_dir: Path, tmp_path: Path) -> None:
    """Two would load models at once, which fails, and end each other's processes."""
    refused: list[str] = []

    def starts_another(task: Task, answer: str) -> float:
        if not refused:
            with pytest.raises(RuntimeError, match="another run of this process") as raised:
                start(tiny_dir, tmp_path / "second", **options, reward=varied)
            refused.append(str(raised.value))
        return float(len(answer))

    options: dict[str, Any] = {"buffer": {"total_steps": 1, "batch_size": 2}}
    for _ in range(2):
        run = start(tiny_dir, tmp_path, **options, reward=starts_another)
        assert refused and run.metrics["rollout/failed/error"] == [0.0]


def test_a_run_that_is_interrupted_before_it_begins_leaves_room_for_the_next(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each later call said that a run had not ended, until Python was started anew."""

    def interrupted() -> bool:
        raise KeyboardInterrupt

    options: dict[str, Any] = {"buffer": {"total_steps": 1, "batch_size": 2}, "reward": varied}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("trireme.ext.train.train.in_notebook", interrupted)
        start(tiny_dir, tmp_path, **options)
    assert start(tiny_dir, tmp_path, **options).metrics["step"] == [1.0]


def trireme_steps(root: Path) -> list[int]:
    folders = (root / "python" / "mine").glob("global_step_*")
    return sorted(int(folder.name.rpartition("_")[2]) for folder in folders)


def test_supervised_training_evaluates_where_it_is_asked_to(tiny_dir: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} + 1?", "response": str(n + 1)} for n in range(8)]
    options: dict[str, Any] = {"model": tiny_dir, "tasks": rows, "algorithm": "sft"}
    options |= {"checkpoint_root_dir": str(tmp_path), "trainer": {"total_steps": 2}}
    sizes: dict[str, Any] = {f"model.{key}": value for key, value in SMALL.items()}
    run = trireme.train(**options, **sizes, eval_tasks=ROWS, reward=varied)
    assert [name for name in run.metrics if name.startswith("eval/held_out/reward")]
    with pytest.raises(ValueError, match="'sft' trains on data: a reward, a workflow and tools"):
        trireme.train(**options, **sizes, reward=varied)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"algorithm": {"algorithm_type": "ppo"}},
            r"algorithm is \{.*a name, .*other keys",
        ),
        ({"algorithm": None}, "algorithm is None: expected a name, such as 'grpo'"),
        ({"model": None}, "model is None: expected a model's folder or hub id"),
        ({"model": {"model_path": "m"}}, r"model is \{.*hub id; its keys are given as"),
        ({"tools": 3}, "tools is 3: expected a list"),
        ({"callbacks": iter([print])}, "callbacks is <list_iterator.*: expected a list"),
        ({"reward": [None]}, "a reward is empty: expected a name, or a section with a `name`"),
        ({"reward": [{"name": None}]}, "the name of a reward is empty"),
        (
            {"trainer": {"callbacks": [print]}},
            r"trainer\.callbacks.* not a supported primi",
        ),
        ({"checkpoint_root_dir": {"a": 1}}, "checkpoint_root_dir is {'a': 1}: expected text"),
    ],
)
def test_arguments_of_another_type_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], said: str
) -> None:
    """Each ended in a traceback of Python's, or wrote rows into a folder of that name."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=said):
        trireme.train(**{"model": tmp_path, "tasks": ["a"], "reward": varied, **given})
    assert {path.name for path in tmp_path.iterdir()} <= {"checkpoints"}


def test_a_path_is_a_value_and_none_is_no_list(tmp_path: Path) -> None:
    keys = {"checkpoint_root_dir": tmp_path / "runs"}
    more: Any = {"tools": None, "callbacks": None}
    config = config_from("m", ["a"], None, None, "grpo", None, keys, **more)
    assert config.checkpoint_root_dir == str(tmp_path / "runs")
    assert (tmp_path / "runs/python/data").is_dir()
