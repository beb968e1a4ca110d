"""Train: trains a model from Python, by the same Plan, checks and errors as a YAML.

The run uses a separate thread, so that it works where an event loop runs already (a notebook), and
so that Ctrl-C, or a notebook's stop button, ends it at its next safe point with a checkpoint.
"""

from __future__ import annotations

import hashlib
import html
import inspect
import json
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from trireme.algorithms.recipes import row_of
from trireme.buffer.blocks import stored_experiences
from trireme.buffer.picture_files import picture_bytes
from trireme.checkpoint.layout import JobFolder
from trireme.config import Plan
from trireme.config.load import config_of
from trireme.config.schema import Config
from trireme.config.stages import used_tasksets
from trireme.data.rows import USUAL, NoRows, load_rows, usual
from trireme.experience import Experience
from trireme.ext.train.figure import Figure, figure_of
from trireme.ext.train.notebook import CellConsole, in_notebook
from trireme.files import write_text
from trireme.launch.check import checked
from trireme.launch.run import run_stages
from trireme.launch.stop import Stop
from trireme.monitor.console import Console, summary_rows
from trireme.monitor.figures import Summary
from trireme.monitor.monitor import FILE_NAME, read_metrics
from trireme.registry import ORMS, REWARDS, TOOLS, TRACKERS, WORKFLOWS, Registry, did_you_mean
from trireme.trainer.steering import EVENTS

BATCH_SIZE = 32
REPEAT_TIMES = 8
TOOLS_WORKFLOW = "multi_turn_scheduler"
WAKE_S = 0.2
"""A signal may reach another thread than the one that waits, which then sees it when it wakes."""
_one_run = threading.Lock()
"""Locked while a run is under way. Two would set and reset the same environment variables, by which
each ends the processes that its rollouts leave; write into each other's log; and load models at the
same time, which transformers cannot.
"""
Tasks = str | Path | Iterable[Any]
RewardSpec = str | Callable[..., Any] | Mapping[str, Any]
"""A reward: its name, the function, or a mapping of either as `name`, `weight` and options."""
Reward = RewardSpec | Sequence[RewardSpec]


@dataclass
class Run:
    """The result of a run and the folder that holds it."""

    folder: Path
    """The job's folder: `trireme view <folder>`."""
    model: Path | None
    """The folder of the trained model, for `from_pretrained`; None where none was saved."""
    summary: Summary = field(repr=False)
    """The content of `summary.json`: accuracies, seconds, warnings."""
    plans: list[Plan] = field(repr=False)
    """The Plans that ran, one per stage."""

    @property
    def metrics(self) -> dict[str, list[float | None]]:
        """Return every figure of the last stage as a column, for `pandas.DataFrame(run.metrics)`.

        Each step is a row. None marks a step without such a figure.
        """
        steps: dict[int, dict[str, float]] = {}
        for row in read_metrics(self._last.monitor / FILE_NAME):
            steps.setdefault(row["step"], {}).update(row["metrics"])
        names = dict.fromkeys(name for figures in steps.values() for name in figures)
        columns: dict[str, list[float | None]] = {"step": [float(step) for step in sorted(steps)]}
        return columns | {name: [steps[step].get(name) for step in sorted(steps)] for name in names}

    def plot(self, *names: str) -> Figure:
        """Draw figures of the last stage over its steps; without names the mean reward of the
        rollouts, or the loss, and what the evaluations measured. Raises ValueError for unknown
        names.
        """
        metrics = self.metrics
        if unknown := [name for name in names if name not in metrics]:
            hint = did_you_mean(unknown[0], metrics) or f": it has {', '.join(metrics)}"
            raise ValueError(f"there is no metric '{unknown[0]}'{hint}")
        usual = [name for name in metrics if name == "rollout/reward/mean"]
        usual = usual or [name for name in metrics if name.endswith("_loss")][:1]
        measured = [f"{kind}/mean@" for kind in ("accuracy", "reward")]
        for begins in measured:
            found = [n for n in metrics if n.startswith("eval/") and f"/{begins}" in n]
            usual += found
            if found:
                break
        steps = metrics["step"]
        curves = {}
        for name in names or usual:
            pairs = zip(steps, metrics[name], strict=True)
            curves[name] = [(x, y) for x, y in pairs if x is not None and y is not None]
        return figure_of(curves)

    def _repr_html_(self) -> str:
        """The run in a notebook: its curves, and the table of its end."""
        rows = summary_rows(self.summary)
        style = "text-align: left; white-space: pre-wrap; font-family: monospace"
        cells = "".join(
            f"<tr><th style='text-align: left'>{html.escape(label)}</th>"
            f"<td style='{style}'>{html.escape(text)}</td></tr>"
            for label, text in rows
        )
        table = f"<table>{cells}</table>"
        try:
            return f"{self.plot().svg}{table}"
        except ValueError:  # a run without a step
            return table

    def rollouts(self, step: int | None = None) -> list[Experience]:
        """Read the rollouts of an explore step of the last stage; None: all that are stored.

        Raises ValueError for a step of which none is stored.
        """
        store = self._last.buffer / "explorer_output.db"
        if not store.is_file():
            if step is not None:
                raise ValueError(f"step {step} has no stored rollouts: this run has none at all")
            return []
        where, values = ("", ()) if step is None else ("WHERE batch = ?", (step,))
        stored = partial(picture_bytes, self._last.buffer)
        with sqlite3.connect(f"{store.absolute().as_uri()}?mode=ro", uri=True) as connection:
            found = list(stored_experiences(connection, stored, where, values))
            if step is not None and not found:
                query = "SELECT DISTINCT batch FROM experiences ORDER BY batch"
                steps = [str(batch) for (batch,) in connection.execute(query)]
                shown = steps if len(steps) <= 5 else [*steps[:2], "...", steps[-1]]
                raise ValueError(
                    f"step {step} has no stored rollouts: expected one of {', '.join(shown)}"
                )
        return found

    @property
    def _last(self) -> JobFolder:
        return JobFolder(self.plans[-1].job_dir, self.plans[-1].explorer_name)


def train(
    *,
    model: str | Path,
    tasks: Tasks,
    reward: Reward | None = None,
    workflow: str | Callable[..., Any] | None = None,
    algorithm: str = "grpo",
    eval_tasks: Tasks | None = None,
    tools: Sequence[str | Callable[..., Any]] | None = (),
    callbacks: Sequence[str | Callable[..., Any]] | None = (),
    **overrides: Any,
) -> Run:
    """Train a model, and wait until it is trained.

    `model` is a folder or a hub id. `tasks` (and `eval_tasks`) are the path of a data set, rows as
    dictionaries, prompts as text, a `datasets.Dataset` or a pandas frame, of values that JSON has.
    `reward` and `workflow` are functions or names; several rewards are a list, each of them also a
    mapping with its weight (`{"name": right, "weight": 0.5}`). `tools` are functions with type
    hints and a docstring, or names, which replies may call until one calls none. `callbacks` are
    functions `(metrics, step, part)`, or classes as in docs/trackers.md, called at every step.
    `overrides` are the YAML's keys: a section as a dictionary (`trainer={"total_steps": 20}`), or a
    whole key (`**{"trainer.total_steps": 20}`).

    Without keys of your own a step has 32 tasks at most, with 8 rollouts each. A run resumes where
    an earlier one of the same `name` ended; without a name each run starts from scratch.

    Raises ConfigError with all problems before anything starts, RuntimeError if another run of this
    process has not ended, and KeyboardInterrupt if it was interrupted.
    """
    plans = checked(
        config_from(
            *(model, tasks, reward, workflow, algorithm, eval_tasks, overrides),
            tools=tools,
            callbacks=callbacks,
            arguments=[*inspect.signature(train).parameters],
        )
    ).plans
    local = _has_function(reward) or any(
        map(callable, [workflow, *(tools or ()), *(callbacks or ())])
    )
    places = plans[-1].places
    if places.spread and local:
        raise ValueError(
            f"{places.launcher.capitalize()}'s processes cannot see a function of this one: put "
            "it into a file, and name it as my_file:name"
        )
    summary = _in_thread(plans)
    saved = Path(summary.model_dir) if summary.model_dir else None
    return Run(plans[0].root_dir, saved, summary, plans)


def config_from(
    model: str | Path,
    tasks: Tasks,
    reward: Reward | None,
    workflow: str | Callable[..., Any] | None,
    algorithm: str,
    eval_tasks: Tasks | None,
    overrides: Mapping[str, Any],
    *,
    tools: Sequence[str | Callable[..., Any]] | None = (),
    callbacks: Sequence[str | Callable[..., Any]] | None = (),
    arguments: Sequence[str] = (),
    folder: Path | None = None,
) -> Config:
    """Build the configuration of a YAML with these keys; `arguments` are the caller's, which a key
    may refer to. Rows are written into `folder`; None: into `checkpoint_root_dir`.
    """
    _refuse_other_types(model, algorithm, tools, callbacks)
    tools, callbacks = tools or (), callbacks or ()
    overrides = {k: str(v) if isinstance(v, Path) else v for k, v in overrides.items()}
    above = overrides.get("checkpoint_root_dir")
    if not isinstance(above, str) or not above:  # the check reports anything but text
        above = Config().checkpoint_root_dir
    root = folder or Path(above)
    named = bool(overrides.get("name"))
    data, first, count = _data_set(tasks, root, "tasks")
    values: dict[str, Any] = {
        "project": "python",
        "name": f"{algorithm}",
        "continue_from_checkpoint": named,
        "model": {"model_path": str(model)},
        "algorithm": {"algorithm_type": algorithm},
    }
    buffer: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    names = [_named(TOOLS, tool) for tool in tools]
    if callbacks:
        values["monitor"] = {"monitor_type": _trackers(callbacks)}
    from_data = row_of(algorithm).from_data
    if from_data:
        values["mode"] = "train"
        buffer["train_batch_size"] = min(BATCH_SIZE, count or BATCH_SIZE)
        buffer["trainer_input"] = {"experience_buffer": {"path": data}}
    else:
        values["algorithm"]["repeat_times"] = REPEAT_TIMES
        buffer["batch_size"] = min(BATCH_SIZE, count or BATCH_SIZE)
        inputs["taskset"] = {"path": data, "format": columns_in(first)}
    if eval_tasks is not None or not from_data:
        inputs["default_workflow_type"] = _named(WORKFLOWS, workflow) or "simple_workflow"
        if reward is not None:
            inputs["default_reward_fn_type"] = _rewards(reward)
        if eval_tasks is not None:
            held_out, first, _ = _data_set(eval_tasks, root, "eval_tasks")
            greedy = {"temperature": 0.0}
            inputs["eval_tasksets"] = [
                {"name": "held_out", "path": held_out, "format": columns_in(first),
                 "rollout_args": greedy}
            ]  # fmt: skip
        buffer["explorer_input"] = inputs
        if tools:
            _use_tools(inputs, workflow, names)
    elif reward is not None or workflow is not None or tools:
        raise ValueError(
            f"'{algorithm}' trains on data: a reward, a workflow and tools are used only where "
            "eval_tasks are given"
        )
    config = config_of(values | {"buffer": buffer}, overrides, arguments)
    _refuse_lost(config, values.get("monitor"), names)
    return config


def _refuse_other_types(model: Any, algorithm: Any, tools: Any, callbacks: Any) -> None:
    """Raise ValueError for an argument of another type than text, a path or a list."""
    if not isinstance(model, str | Path):
        keys = "; its keys are given as **{'model.max_model_len': 512}"
        expected = f"expected a model's folder or hub id{keys * isinstance(model, Mapping)}"
        raise ValueError(f"model is {model!r:.60}: {expected}")
    if not isinstance(algorithm, str):
        keys = "; the section's other keys are given as **{'algorithm.repeat_times': 4}"
        expected = f"expected a name, such as 'grpo'{keys * isinstance(algorithm, Mapping)}"
        raise ValueError(f"algorithm is {algorithm!r:.60}: {expected}")
    for what, several in (("tools", tools), ("callbacks", callbacks)):
        if isinstance(several, str) or callable(several):
            one = getattr(several, "__name__", repr(several))
            raise ValueError(f"{what} is {one} alone: expected a list, {what}=[{one}]")
        if several is not None and not isinstance(several, list | tuple):
            raise ValueError(f"{what} is {several!r:.60}: expected a list")


def _refuse_lost(
    config: Config, monitor: Mapping[str, Any] | None, tools: Sequence[str | None]
) -> None:
    """Raise ValueError if the overrides replace settings of callbacks or tools."""
    if monitor is not None and config.monitor.monitor_type != monitor["monitor_type"]:
        raise ValueError(
            "callbacks are trackers, and monitor.monitor_type is given, too: expected all of them "
            "in one, for example callbacks=['tensorboard', 'wandb', my_function]"
        )
    for used in used_tasksets(config) if tools else ():
        if used.workflow != TOOLS_WORKFLOW:
            raise ValueError(
                f"tools are for conversations that tool_call_scheduler leads, and {used.key} has "
                f"the workflow {used.workflow}: expected one of them (a workflow passes its own to "
                "model.chat)"
            )
        others = used.config.workflow_args.get("tools")
        if others != tools:
            raise ValueError(
                f"tools are given, and {used.key}.workflow_args.tools is {others}: expected all of "
                "them in tools=[...]"
            )


def _use_tools(inputs: dict[str, Any], workflow: Any, names: Sequence[str | None]) -> None:
    """Make conversations of all tasksets in which replies may call these tools."""
    if workflow is not None:
        raise ValueError(
            "tools are for conversations that tool_call_scheduler leads, and a workflow is given: "
            "expected one of them (a workflow passes its own to model.chat)"
        )
    inputs["default_workflow_type"] = TOOLS_WORKFLOW
    for taskset in filter(None, [inputs.get("taskset"), *inputs.get("eval_tasksets", [])]):
        taskset["workflow_args"] = {"scheduler": "tool_call_scheduler", "tools": [*names]}


def _trackers(callbacks: Sequence[str | Callable[..., Any]]) -> list[str | None]:
    names = [_named(TRACKERS, _as_function(callback)) for callback in callbacks]
    return names if "tensorboard" in names else ["tensorboard", *names]


def _as_function(callback: str | Callable[..., Any]) -> str | Callable[..., Any]:
    """Wrap a bound method, a partial or an object in a plain function: any other callable makes a
    tracker. A class, and a partial of one, does that here too.
    """
    made = getattr(callback, "func", callback)
    event = next((name for name in EVENTS if callable(getattr(made, name, None))), None)
    no_tracker = inspect.isclass(made) or not callable(callback)
    if event and no_tracker and not hasattr(made, "log"):
        kind = made if inspect.isclass(made) else type(made)
        raise ValueError(
            f"callbacks hold {kind.__name__}, which has {event}, an event that trackers do not "
            "receive: such a class goes into trainer.callbacks, for example "
            f"trainer={{'callbacks': ['my_file:{kind.__name__}']}}"
        )
    if isinstance(callback, str) or inspect.isfunction(callback) or inspect.isclass(made):
        return callback
    if not callable(callback):
        raise ValueError(
            f"callbacks hold {callback!r:.60}: expected functions (metrics, step, part), or "
            "classes as in docs/trackers.md"
        )

    def told(metrics: dict[str, float], step: int, part: str) -> Any:
        return callback(metrics, step, part)

    told.__name__ = getattr(callback, "__name__", type(callback).__name__)
    told.__wrapped__ = callback  # its signature is what the check inspects
    return told


def _data_set(tasks: Tasks, root: Path, what: str) -> tuple[str, dict[str, Any], int | None]:
    """Return path of the tasks, their first row, and their number if known here.

    Rows without a file are written to one, which is named by its content.
    """
    if isinstance(tasks, str | Path):
        if not Path(tasks).expanduser().is_file():
            return str(tasks), {}, None
        try:
            stored = load_rows(Path(tasks).expanduser())
        except NoRows:  # the check reports its problem, with the key
            return str(tasks), {}, None
        return str(tasks), dict(stored[0]), len(stored)
    several = isinstance(tasks, Mapping)
    if several or not hasattr(tasks, "__iter__"):
        hint = f": it has {', '.join(map(str, tasks))}" if several else ""
        raise ValueError(
            f"{what} is {type(tasks).__name__}{hint}: expected a list of rows or prompts, one "
            "split of a data set, a frame, or a path"
        )
    rows = [{"prompt": row} if isinstance(row, str) else row for row in _records(tasks)]
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ValueError(
                f"{what}[{number}] is {row!r:.60}: expected a row (a dictionary) or a prompt (text)"
            )
    if not rows:
        raise ValueError(f"{what} is empty: expected at least one row")
    lines = "".join(_line(row, f"{what}[{number}]") for number, row in enumerate(rows))
    name = hashlib.sha256(lines.encode()).hexdigest()[:16]
    path = root.expanduser().absolute() / "python" / "data" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, lines)
    return str(path), dict(rows[0]), len(rows)


def _records(tasks: Iterable[Any]) -> Iterable[Any]:
    """Return the rows of a pandas frame, where a cell without a value is None; other tasks as they
    are.
    """
    frame: Any = tasks
    if not hasattr(frame, "iloc") or not hasattr(frame, "columns"):  # a column alone has no columns
        return tasks
    return frame.astype(object).where(frame.notna(), None).to_dict(orient="records")


def _line(row: Mapping[str, Any], where: str) -> str:
    """Return a row as a line of JSON. Raises ValueError for a value that JSON does not have."""
    cells = []
    for column, value in row.items():
        try:
            cells.append(f"{json.dumps(str(column))}: {json.dumps(value, default=_plain)}")
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{where}[{column!r}] cannot be written as JSON ({error}): expected text, numbers, "
                "lists and dictionaries; a picture is the path of its file or a data URL, and a "
                "data set that holds others is given by its path"
            ) from error
    return f"{{{', '.join(cells)}}}\n"


def _plain(value: Any) -> Any:
    """Convert a number or array of numpy's to Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"it is {type(value).__name__}: {value!r:.40}")


def columns_in(row: Mapping[str, Any]) -> dict[str, str]:
    """Find the columns of prompt and truth, as far as a row shows them."""
    columns = {key: usual(key, list(row)) for key in USUAL}
    return {key: name for key, name in columns.items() if name is not None}


def _named(registry: Registry, thing: str | Callable[..., Any] | None) -> str | None:
    """Return a name for a function in the YAML: its own, unless that means another."""
    if thing is None or isinstance(thing, str):
        return thing
    plain_name = getattr(thing, "__name__", type(thing).__name__)
    plain_name = plain_name if plain_name.isidentifier() else registry.name
    name, number = plain_name, 1
    while name in registry.built_in() or name in ORMS.names() or name in registry:
        if name in registry and name not in registry.built_in() and registry.get(name) is thing:
            return name
        number += 1
        name = f"{plain_name}_{number}"
    registry.register_module(name, thing)
    return name


def _rewards(reward: Reward) -> Any:
    if isinstance(reward, list | tuple):
        return [_reward(one) for one in reward]
    return [_reward(reward)] if isinstance(reward, Mapping) else _reward(reward)


def _reward(one: Any) -> Any:
    if not isinstance(one, Mapping):
        return _named(REWARDS, one)
    return {**one, "name": _named(REWARDS, one["name"])} if "name" in one else one


def _has_function(reward: Reward | None) -> bool:
    several = reward if isinstance(reward, list | tuple) else [reward]
    return any(callable(r.get("name") if isinstance(r, Mapping) else r) for r in several)


def _show(console: Console) -> None:
    if isinstance(console, CellConsole):
        console.show()


@contextmanager
def _alone() -> Iterator[None]:
    """Be the only run of this process meanwhile. Raises RuntimeError while another is under way,
    such as one that did not end in its time.
    """
    if not _one_run.acquire(blocking=False):
        raise RuntimeError(
            "another run of this process has not ended: expected one at a time; start each of "
            "several in a process of its own"
        )
    try:
        yield
    finally:
        _one_run.release()


def _in_thread(plans: list[Plan]) -> Summary:
    """Run the stages in a thread. KeyboardInterrupt: it was asked to end, and has ended. Raises
    RuntimeError while another run is under way.
    """
    stop, summaries, failed = Stop(), list[Summary](), list[BaseException]()
    ended = threading.Event()  # an interrupted `Thread.join` takes a living thread for ended

    console = CellConsole() if in_notebook() else Console()

    def work() -> None:
        try:
            with _alone():
                for note in dict.fromkeys(note for plan in plans for note in plan.notes):
                    console.note(note)
                summaries.append(run_stages(plans, console=console, stop=stop))
        except BaseException as error:
            failed.append(error)
        finally:
            console.close()
            ended.set()

    with console.warnings() if isinstance(console, CellConsole) else nullcontext():
        threading.Thread(target=work, name="trireme.train", daemon=True).start()
        try:
            while not ended.wait(WAKE_S):
                _show(console)
        except KeyboardInterrupt:
            stop.request()
            console.note(
                f"interrupted: ending at the next safe point, in {stop.limit:g} s at most "
                "(cluster.stop_timeout)"
            )
            _show(console)
            ended.wait(stop.limit)
    _show(console)
    if failed and isinstance(failed[0], KeyboardInterrupt):
        raise KeyboardInterrupt(stop.what_is_left().replace("command", "call")) from None
    if failed:
        raise failed[0]
    if not summaries:
        raise KeyboardInterrupt(
            f"not ended after {stop.limit:g} s (cluster.stop_timeout): it waits for "
            f"{stop.waits_for()}"
        )
    return summaries[0]
