"""Trackers: sends metrics to TensorBoard, wandb, MLflow, SwanLab, Trackio or users' code.

Invariants:
- A tracker is a listener of the run's stream, which never waits for it. One that fails or hangs
  costs the run only a warning; `metrics.jsonl` has every figure anyway.
- The id of a tracked run is stored in `trackers.json`, so that a resumed run continues in it.
- Each metric with a usual name in this field is also sent under that name.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trireme.config import Plan
from trireme.config.hidden import resolved
from trireme.files import in_turn, json_or, write_json
from trireme.launch.listeners import RunListener
from trireme.monitor.events import Ended, Event, RolloutDone, Stream, measured
from trireme.monitor.figures import usual_names
from trireme.registry import TRACKERS, refuse_unknown_options
from trireme.text import storable
from trireme.usercode import refuse_signature

if TYPE_CHECKING:  # importing it would load torch before the thread settings are made
    from torch.utils.tensorboard import SummaryWriter

    from trireme.experience import Experience
    from trireme.launch.stage import Stage

FILE_NAME = "trackers.json"
REMARK = "the run continues; monitor/metrics.jsonl has its metrics"
"""The end of the warning about a tracker that fails."""
ROLLOUTS = 8
"""The number of rows in a table of sample rollouts."""
Rollout = Mapping[str, Any]
"""A rollout to look at: step, task, prompt, completion, reward, truth."""


class Tracker(Protocol):
    """Shows a run. Made as `Tracker(run, **monitor_args)`, by a class or another callable; a
    function `(metrics, step, part)` may replace one. Functions and methods may be async.
    """

    @property
    def id(self) -> str | None:
        """The id by which a resumed run finds it again; None if it cannot."""
        ...

    def log(self, metrics: Mapping[str, float], step: int, part: str) -> None:
        """Log the metrics of one step; `part` is explorer, trainer, eval or bench."""
        ...

    def rollouts(self, rows: Sequence[Rollout], step: int) -> None:
        """Log some rollouts of a step."""
        ...

    def close(self, *, failed: bool = False) -> None:
        """Send the remaining data. `failed`: the run was stopped, or ended with an error."""
        ...


@dataclass(frozen=True)
class TrackedRun:
    """The facts about a run that a tracker receives."""

    folder: Path
    """The folder of the run's monitors."""
    project: str = ""
    group: str = ""
    name: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved configuration."""
    id: str | None = None
    """The id of the tracked run that a resume continues; None: a new one."""

    def described(self) -> dict[str, Any]:
        """Return the keywords that describe a run to the libraries' `init`."""
        return {
            "project": self.project or "trireme",
            "group": self.group or None,
            "name": self.name,
            "config": dict(self.config),
        }

    def local(self, kind: str) -> Path:
        """Return a folder for a tracker's local files."""
        path = self.folder / kind
        path.mkdir(parents=True, exist_ok=True)
        return path


class Callback:
    """A user's function as a tracker."""

    id = None

    def __init__(self, function: Callable[[dict[str, float], int, str], object]) -> None:
        self._function = function

    def log(self, metrics: Mapping[str, float], step: int, part: str) -> Any:
        """Call the function with the metrics. The result of an async function is awaited like that
        of an async method.
        """
        return self._function(dict(metrics), step, part)

    def rollouts(self, rows: Sequence[Rollout], step: int) -> None:
        """Do nothing: a function takes only metrics."""

    def close(self, *, failed: bool = False) -> None:
        """Do nothing."""


class Tracking:
    """A tracker as a listener: made, called and closed in the listener's thread."""

    def __init__(self, name: str, make: Callable[[], Tracker], started: Callable[[str], None]):
        """`started` stores the id of the tracked run."""
        self.name = f"the tracker {name}"
        self._make, self._started = make, started
        self._tracker: Tracker | None = None
        self._rows: list[Rollout] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop of async functions and methods, one for the whole run, so that their resources
        stay usable."""

    def start(self) -> None:
        """Make the tracker."""
        self._tracker = self._make()
        id = getattr(self._tracker, "id", None)  # a class of three methods has none
        if id is not None:
            self._started(id)

    def hear(self, event: Event) -> None:
        """Send an event's metrics, also under the field's usual names."""
        tracker = self._tracker
        assert tracker is not None, "it was started"
        if (figures := measured(event)) is not None:
            metrics, step, part = figures
            names = usual_names()
            usual = {names[name]: value for name, value in metrics.items() if name in names}
            self._wait(tracker.log({**metrics, **usual}, step, part))
        elif isinstance(event, RolloutDone):
            self._rows.append(row_of(event.experience))
            if len(self._rows) == ROLLOUTS:
                self._send_rows(tracker)
        elif isinstance(event, Ended):
            try:
                self._send_rows(tracker)
            finally:
                self._close(tracker, event.failed)

    def _send_rows(self, tracker: Tracker) -> None:
        rows, self._rows = self._rows, []
        if rows:
            self._wait(tracker.rollouts(rows, rows[-1]["step"]))

    def _close(self, tracker: Tracker, failed: bool) -> None:
        try:
            self._wait(tracker.close(failed=failed))
        finally:
            if self._loop is not None:
                self._loop.close()

    def _wait(self, result: Any) -> None:
        if inspect.isawaitable(result):
            self._loop = self._loop or asyncio.new_event_loop()
            self._loop.run_until_complete(result)


def row_of(experience: Experience) -> Rollout:
    """Return a rollout's row in a table."""
    return {
        "step": int(str(experience.eid.batch).partition("/")[0]),
        "task": str(experience.eid.task),
        "prompt": storable(experience.prompt_text or ""),
        "completion": storable(experience.response_text or ""),
        "reward": experience.reward,
        "truth": storable(str(experience.info.get("truth", ""))),
    }


class Trackers(RunListener):
    """Makes the trackers of `monitor.monitor_type` follow a run: see RunListener."""

    def examine(self, plan: Plan) -> tuple[()]:
        """Raise ValueError for problems with the trackers of a plan."""
        examine_trackers(plan.config.monitor.monitor_type, plan.config.monitor.monitor_args)
        return ()

    def listen(self, stage: Stage) -> None:
        """Subscribe TensorBoard and the trackers."""
        config, folder = stage.plan.config, stage.folder.monitor
        name = "-".join(filter(None, (config.name, stage.plan.stage_name)))
        values = resolved(stage.plan, stage.model_path)
        subscribe_trackers(
            stage.stream,
            TrackedRun(folder, config.project, config.group, name, values),
            config.monitor.monitor_type,
            stage.steps_that_count,
            args=config.monitor.monitor_args,
            part=stage.part or "",
        )


def subscribe_trackers(
    stream: Stream,
    run: TrackedRun,
    kinds: str | Sequence[str] = "tensorboard",
    keep_until: Mapping[str, int] | None = None,
    *,
    args: Mapping[str, Any] | None = None,
    part: str = "",
) -> None:
    """Subscribe the trackers of `monitor.monitor_type` to the stream of a run.

    `keep_until`: the last valid step of each part, if a run resumes (or starts from scratch: 0).
    `part`: this command runs only that part. Raises ValueError for an unknown type.
    """
    names = names_of(kinds)
    trackers = open_trackers(run, names, args, part=part)
    if "tensorboard" in names:
        stream.subscribe(TensorBoardMonitor(run.folder / "tensorboard", keep_until))
    for tracker in trackers:
        stream.subscribe(tracker, start=tracker.start, awaited=False, remark=REMARK)


def names_of(kinds: str | Sequence[str]) -> list[str]:
    """Return `monitor.monitor_type` as a list, empty for `none`."""
    return [name for name in ([kinds] if isinstance(kinds, str) else kinds) if name != "none"]


def examine_trackers(kinds: str | Sequence[str], args: Mapping[str, Any] | None) -> None:
    """Raise ValueError for a tracker that is not there or not installed, or options of none."""
    names = names_of(kinds)
    for name in names:
        missing = _PACKAGES.get(name)
        if missing and importlib.util.find_spec(missing[0]) is None:
            raise ValueError(
                f"monitor.monitor_type '{name}' needs the package {missing[0]}: "
                f"pip install {missing[1]}"
            )
        if name == "tensorboard":  # its import takes a second, and it is always installed
            continue
        made = TRACKERS.get(name)
        whose = f"monitor.monitor_type '{name}'"
        if inspect.isfunction(made):
            refuse_signature(whose, made, made, "(metrics, step, part)")
        elif not callable(made) or (inspect.isclass(made) and not _has_methods(made)):
            waits = inspect.isclass(made) and any(name.startswith("on_") for name in dir(made))
            raise ValueError(
                f"{whose} is {made!r:.60}: expected a function (metrics, step, part), or a class "
                "with the methods log, rollouts and close"
                + (" (one with on_step_end and the like goes into trainer.callbacks)" * waits)
            )
        options = _options(names, name, args)
        if inspect.isfunction(made) and options:
            raise ValueError(f"monitor.monitor_args: the function '{name}' takes no options")
    if len(names) > 1:
        refuse_unknown_options("monitor.monitor_args", args or {}, names)
    elif names == ["tensorboard"] and args:
        refuse_unknown_options("monitor.monitor_args of tensorboard", args, ())


def _has_methods(kind: type) -> bool:
    return all(callable(getattr(kind, name, None)) for name in ("log", "rollouts", "close"))


def open_trackers(
    run: TrackedRun, kinds: Sequence[str], args: Mapping[str, Any] | None, *, part: str = ""
) -> list[Tracking]:
    """Open all but TensorBoard, in order. `part`: this command runs only that part, with a separate
    tracked run.
    """
    path = run.folder / FILE_NAME
    ids = _ids(path)
    suffix = f"-{part}" if part else ""

    def open_one(name: str) -> Tracking:
        key, made, options = name + suffix, TRACKERS.get(name), _options(kinds, name, args)
        tracked = TrackedRun(
            run.folder, run.project, run.group, run.name + suffix, run.config, ids.get(key)
        )

        def started(id: str) -> None:
            with in_turn(path.with_name(f".{FILE_NAME}.lock")):  # another command's entries stay
                write_json(path, _ids(path) | {key: id})

        if inspect.isfunction(made):
            return Tracking(name, lambda: Callback(made), started)
        return Tracking(name, lambda: made(tracked, **options), started)

    return [open_one(name) for name in kinds if name != "tensorboard"]


def _ids(path: Path) -> dict[str, str]:
    return {name: id for name, id in json_or(path, dict[str, str]()).items() if type(id) is str}


def _options(names: Sequence[str], name: str, args: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options of one tracker: all of them, or those under its name if there are several."""
    settings = args or {}
    return dict(settings) if len(names) == 1 else dict(settings.get(name) or {})


# `accelerate.tracking` does not fit: its calls raise without a `PartialState`, which begins a
# process group where a launcher's variables are set, and its trackers end failed runs as a success.
_PACKAGES = {
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "swanlab": ("swanlab", "swanlab"),
    "trackio": ("trackio", "trackio"),
}


class Wandb:
    """Weights & Biases; with `mode: offline` it writes files for `wandb sync`."""

    def __init__(self, run: TrackedRun, **options: Any) -> None:
        wandb: Any = import_module("wandb")
        kept = {"id": run.id, "resume": "allow"} if run.id else {}
        self._wandb = wandb
        here = {"dir": str(run.local("wandb"))}
        self._run = wandb.init(**(run.described() | here | kept | options))
        self._known: set[str] = set()
        self.id: str | None = self._run.id

    def log(self, metrics: Mapping[str, float], step: int, part: str) -> None:
        """Log a step; each part counts its own steps: wandb's single counter would refuse the
        slower part.
        """
        axis = f"{part}_step"
        for name in metrics.keys() - self._known:
            self._run.define_metric(name, step_metric=axis)
        self._known |= metrics.keys()
        self._run.log({**metrics, axis: step})

    def rollouts(self, rows: Sequence[Rollout], step: int) -> None:
        """Log rollouts as a table, one per step."""
        columns = list(rows[0])
        table = self._wandb.Table(columns, [[row[c] for c in columns] for row in rows])
        self._run.log({"rollouts": table, "explorer_step": step})

    def close(self, *, failed: bool = False) -> None:
        """End the run with an exit code."""
        self._run.finish(exit_code=int(failed))


class MLflow:
    """MLflow; without `tracking_uri` or MLFLOW_TRACKING_URI in files of the run's folder."""

    def __init__(self, run: TrackedRun, *, tracking_uri: str | None = None) -> None:
        mlflow: Any = import_module("mlflow")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        here = run.local("mlflow").resolve().as_uri()
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or here
        self._client, self._metric = mlflow.MlflowClient(tracking_uri=uri), mlflow.entities.Metric
        if run.id is None:
            name = run.project or "trireme"
            there = self._client.get_experiment_by_name(name)
            experiment = there.experiment_id if there else self._client.create_experiment(name)
            tags = {"group": run.group} if run.group else {}
            made = self._client.create_run(experiment, run_name=run.name, tags=tags)
            self._client.log_dict(made.info.run_id, dict(run.config), "config.json")
            self.id: str | None = made.info.run_id
        else:
            self._client.update_run(run.id, status="RUNNING")
            self.id = run.id

    def log(self, metrics: Mapping[str, float], step: int, part: str) -> None:
        """Log a step; names may not contain `@`: `mean@4` becomes `mean_at_4`."""
        now = int(time.time() * 1000)
        rows = [
            self._metric(name.replace("@", "_at_"), float(value), now, step)
            for name, value in metrics.items()
        ]
        for start in range(0, len(rows), 1000):  # the limit of a call
            self._client.log_batch(self.id, metrics=rows[start : start + 1000])

    def rollouts(self, rows: Sequence[Rollout], step: int) -> None:
        """Log rollouts as JSON lines, one file per step."""
        text = "".join(json.dumps(row) + "\n" for row in rows)
        self._client.log_text(self.id, text, f"rollouts/step_{step}.jsonl")

    def close(self, *, failed: bool = False) -> None:
        """End the run with its status."""
        self._client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


class SwanLab:
    """SwanLab; `mode: local` or `offline` sends nothing."""

    def __init__(self, run: TrackedRun, **options: Any) -> None:
        swanlab: Any = import_module("swanlab")
        kept = {"id": run.id, "resume": "allow"} if run.id else {}
        self._swanlab = swanlab
        here = {"log_dir": str(run.local("swanlab"))}
        self._run = swanlab.init(**(run.described() | here | kept | options))
        self.id: str | None = self._run.id

    def log(self, metrics: Mapping[str, float], step: int, part: str) -> None:
        """Log the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def rollouts(self, rows: Sequence[Rollout], step: int) -> None:
        """Log rollouts as texts, each with its reward as the caption."""
        texts = [
            self._swanlab.Text(
                f"{row['prompt']}\n---\n{row['completion']}", caption=f"reward {row['reward']}"
            )
            for row in rows
        ]
        self._run.log({"rollouts": texts}, step=step)

    def close(self, *, failed: bool = False) -> None:
        """End the run with its state."""
        self._run.finish(state="crashed" if failed else "success")


class Trackio:
    """Trackio: a local board, `trackio show`; `space_id` sends it to a Space."""

    def __init__(self, run: TrackedRun, **options: Any) -> None:
        trackio: Any = import_module("trackio")
        self._trackio = trackio
        kept = {"resume": "allow" if run.id else "never", "embed": False}
        self._run = trackio.init(**(run.described() | kept | options))
        self.id: str | None = self._run.name

    def log(self, metrics: Mapping[str, float], step: int, part: str) -> None:
        """Log the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def rollouts(self, rows: Sequence[Rollout], step: int) -> None:
        """Log rollouts as a table, one per step."""
        pandas: Any = import_module("pandas")
        self._run.log({"rollouts": self._trackio.Table(dataframe=pandas.DataFrame(rows))}, step)

    def close(self, *, failed: bool = False) -> None:
        """End the run."""
        self._run.finish()


# The explorer runs the evaluations: its curves and theirs belong together.
_FOLDER = {"eval": "explorer", "bench": "explorer"}


class TensorBoardMonitor:
    """Writes event files that `tensorboard --logdir` reads."""

    name = "TensorBoard"

    def __init__(self, folder: str | Path, keep_until: Mapping[str, int] | None = None) -> None:
        """`keep_until`: the curves of an earlier attempt after this step of a part are hidden."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore
        from torch.utils.tensorboard import SummaryWriter  # imports torch

        self._open, self._summary = SummaryWriter, Summary
        self.folder = Path(folder)
        self._keep_until = dict(keep_until or {})
        self._writers: dict[str, SummaryWriter] = {}

    def log(self, metrics: Mapping[str, float], step: int, part: str) -> None:
        """Log all metrics of a step; on disk when this returns."""
        name = _FOLDER.get(part, part)
        if name not in self._writers:
            last = self._keep_until.get(name)
            # 0: nothing was there, or everything belongs to a run that starts from scratch
            purge = None if last is None else last + 1 if last else 0
            there = (self.folder / name).exists()
            self._writers[name] = self._open(
                str(self.folder / name), purge_step=purge if there else None
            )
        writer = self._writers[name]
        # one event for all: the writer's queue has ten places, and a full one makes its callers
        # wait
        values = [self._summary.Value(tag=tag, simple_value=float(v)) for tag, v in metrics.items()]
        assert writer.file_writer is not None, "it is open"
        writer.file_writer.add_summary(self._summary(value=values), step)
        writer.flush()

    def hear(self, event: Event) -> None:
        """Write an event's metrics, and close at the run's end."""
        if (figures := measured(event)) is not None:
            self.log(*figures)
        elif isinstance(event, Ended):
            self.close()

    def close(self) -> None:
        """End the writers' threads and close their files."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
