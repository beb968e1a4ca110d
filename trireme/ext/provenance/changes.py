"""Changes: says what has changed since a run's last start, and what each change does to a resume.

A resume goes on with the checkpoint's weights, moments and places in the data; all else is as the
YAML says now. Each sentence here says which of the two holds for a key, or why it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

from trireme.checkpoint.layout import JobFolder
from trireme.checkpoint.manifest import Loaded
from trireme.config.schema import Config
from trireme.config.section import Section
from trireme.ext.provenance.starts import add_end, add_start, read_starts, same_part, this_start
from trireme.launch.listeners import RunListener
from trireme.launch.resume import ADAPTER_BASE, refuse_meaningless
from trireme.log import get_logger
from trireme.monitor.events import Ended, Event, Noted

if TYPE_CHECKING:
    from trireme.launch.stage import Stage

logger = get_logger("launcher")


class Provenance(RunListener):
    """Records each attempt of a run, and reports at a resume what has changed: see RunListener."""

    def __init__(self) -> None:
        self._start: dict[str, Any] = {}
        self._lines: list[str] = []

    def begin(self, stage: Stage) -> None:
        """Compare this attempt with the last one."""
        self._start = this_start(stage.plan, stage.model_path, stage.resumed)
        self._lines = since_last_start(stage, self._start)

    def listen(self, stage: Stage) -> None:
        """Record the attempt. Of the later events of a run, its end alone is recorded."""
        add_start(stage.folder, self._start)
        stage.stream.subscribe(Ending(stage.folder, self._start))
        for line in self._lines:
            logger.info(line)
            stage.emit(Noted(line))


class Ending:
    """Records how an attempt ended."""

    name = "the record of this start's end"

    def __init__(self, folder: JobFolder, start: Mapping[str, Any]) -> None:
        self._folder, self._start = folder, start

    def hear(self, event: Event) -> None:
        """Record the end."""
        if isinstance(event, Ended):
            add_end(self._folder, self._start, event)


def since_last_start(stage: Stage, start: dict[str, Any]) -> list[str]:
    """List what has changed since a resumed run's last start; nothing for a new run.

    Raises ConfigError for a resume that is not possible.
    """
    folder, resumed, explored = stage.folder, stage.resumed, stage.explored
    earlier = [old for old in read_starts(folder) if same_part(old, start)]
    if not stage.resumes:
        if not earlier or stage.plan.mode not in ("both", "train"):
            return []
        return ["the last start left no checkpoint: the run begins at step 1 again"]
    old = earlier[-1] if earlier else None
    if resumed is not None:
        refuse_as_recorded(stage, resumed, earlier, start)
    if old is None:
        return ["what has changed since its last start is not known: there is no run/ folder"]
    state = explored or {"step": resumed.step if resumed else 0, "taskset": {}}
    train = resumed.step if resumed else state["step"]
    row = state["taskset"].get("current_index")
    changed = changes(old, start, train=train + 1, explore=state["step"] + 1, row=row)
    if not changed:
        return ["nothing has changed since its last start"]
    since = f"changed since its last start ({old['time']}):"
    return [since, *(f"  {change}" for change in changed)]


def refuse_as_recorded(
    stage: Stage, resumed: Loaded, earlier: Sequence[Mapping[str, Any]], start: Mapping[str, Any]
) -> None:
    """Raise ConfigError if the checkpoint is of another run, by the last start that records it.

    Earlier releases recorded what a checkpoint was made with in `run/starts.json`, as `resumes`,
    and not in its manifest.
    """
    old = next((one for one in reversed(earlier) if isinstance(one.get("resumes"), dict)), None)
    if old is None or "made_with" in resumed.run_state:
        return
    was, now = {**old["resumes"]}, {**stage.made_with}
    if ADAPTER_BASE in now:
        was[ADAPTER_BASE], now[ADAPTER_BASE] = old["model"]["weights"], start["model"]["weights"]
    refuse_meaningless(stage.folder, resumed.step, was, now)


# Beginning of a key -> what a change of it does; the longest beginning that fits holds. {train} and
# {explore} are the first train and explore step that it can bear on, {row} the data's next row.
_EFFECTS = {
    "": "from train step {train} on",
    "model.model_path": "its weights are ignored, since the checkpoint's are loaded; tokenizer, "
    "chat template and, where there is one, the reference model are those of the new path",
    "model.critic_model_path": "ignored: the checkpoint's value model is loaded",
    "model.": "rollouts from explore step {explore} on",
    "algorithm.algorithm_type": "from train step {train} on; what waits in the buffer was made for "
    "the former one",
    "algorithm.repeat_times": "groups from explore step {explore} on; those in the buffer keep "
    "their size",
    "algorithm.optimizer.": "from train step {train} on; the optimizer's moments stay",
    "algorithm.critic.optimizer.": "from train step {train} on; the optimizer's moments stay",
    "buffer.batch_size": "explore steps from {explore} on; the tasks continue at row {row}; the "
    "end of a run over a data set moves, and that of a schedule that spans it",
    "buffer.train_batch_size": "from train step {train} on; the end of a run over a data set "
    "moves, and that of a schedule that spans it",
    "buffer.total_epochs": "moves the end of the run, and a schedule that spans it",
    "buffer.total_steps": "moves the end of the run, and a schedule that spans it",
    "buffer.explorer_input.taskset": "tasks from explore step {explore} on: the run continues at "
    "row {row}, of whatever the data are now",
    "buffer.explorer_input.eval_tasksets": "evaluations from now on: not comparable with those "
    "before",
    "buffer.explorer_input.": "explore steps from {explore} on",
    "buffer.trainer_input.": "from train step {train} on: the run continues at its place in the "
    "data, whatever they are now",
    "buffer.trainer_input.experience_buffer.capacity": "from now on",
    "data_processor.": "experiences from explore step {explore} on",
    "seed": "samples from explore step {explore} on; no run with a single seed gives the same",
    "deterministic": "from now on",
    "plugins": "your own code, from now on",
    "synchronizer.": "from train step {train} on",
    "trainer.total_steps": "moves the end of the run, and a schedule that spans it",
    "trainer.save": "checkpoints from now on",
    "trainer.max_checkpoints_to_keep": "older checkpoints are deleted at the next one",
    "explorer.": "rollouts from explore step {explore} on",
    "explorer.eval": "evaluations from now on",
    "cluster.": "where the parts run; the last bits of a sum may differ",
    "monitor.": "from now on; numbers do not depend on it",
    "log.": "from now on; numbers do not depend on it",
    "project": "none: the folder is the same",
    "name": "none: the folder is the same",
    "group": "none: the folder is the same",
    "checkpoint_root_dir": "none: the folder is the same",
    "continue_from_checkpoint": "none at a resume",
    "versions.": "from now on; the last bits of results may differ",
    "code.": "from now on",
    "model weights": "ignored, since the checkpoint's are loaded",
    "model tokenizer": "prompts from explore step {explore} on are encoded by the new one",
}


def changes(
    old: Mapping[str, Any], new: Mapping[str, Any], *, train: int, explore: int, row: int | None
) -> list[str]:
    """One line for each difference of two entries of `starts`, with its effect.

    `train` and `explore` are the next steps, `row` how many rows of the tasks were handed out.
    """
    at = {"train": train, "explore": explore, "row": "where it was" if row is None else row}
    out = []
    for key, before, now in _differences(old, new):
        hashed = _is_hash(before) or _is_hash(now)
        values = " differ" if hashed else f": {_short(before)} -> {_short(now)}"
        effect = _EFFECTS[max((start for start in _EFFECTS if key.startswith(start)), key=len)]
        out.append(f"{key}{values}: {effect.format(**at)}")
    return out


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Name, old and new value of all that a run's course may depend on."""
    yield from _unequal(*(_with_defaults(each["config"], Config) for each in (old, new)))
    for key, facts in new["data"].items():
        was = old["data"].get(key)
        if was and was["path"] == facts["path"] and was["sha256"] != facts["sha256"]:
            differ = was["rows"] != facts["rows"]
            yield (
                f"{key} rows" if differ else f"{key} contents",
                *((was["rows"], facts["rows"]) if differ else (was["sha256"], facts["sha256"])),
            )
    if old["model"]["path"] == new["model"]["path"]:
        for kind in ("weights", "tokenizer"):
            if old["model"][kind] != new["model"][kind]:
                yield f"model {kind}", old["model"][kind], new["model"][kind]
    for path in sorted({*old["plugins"], *new["plugins"]}):
        was, is_ = old["plugins"].get(path), new["plugins"].get(path)
        if was != is_ and was and is_:
            yield f"plugins {Path(path).name}", was, is_
    for part in ("versions", "code"):
        yield from _unequal(old[part], new[part], part)


def _with_defaults(value: Any, kind: Any) -> Any:
    """Return a value of one of the schema's types, with the defaults of keys that its sections
    lack.

    An earlier release did not write newer keys, and its runs used their defaults.
    """
    if isinstance(kind, type) and issubclass(kind, Section) and isinstance(value, Mapping):
        kinds = {name: field.annotation for name, field in kind.model_fields.items()}
        whole = {**kind.model_construct().model_dump(), **value}
        return {name: _with_defaults(inner, kinds.get(name)) for name, inner in whole.items()}
    origin, inner = get_origin(kind), get_args(kind)
    if origin is list and isinstance(value, list):
        return [_with_defaults(item, inner[0]) for item in value]
    if origin is dict and isinstance(value, Mapping):
        return {name: _with_defaults(item, inner[1]) for name, item in value.items()}
    for each in inner:  # a union
        value = _with_defaults(value, each)
    return value


def _unequal(before: Any, now: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Compare nested sections by their full names. One that only one of the two has is a single
    difference; so is a list of plain values.
    """
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in dict.fromkeys((*before, *now)):
            whole = f"{key}.{name}" if key else str(name)
            yield from _unequal(before.get(name), now.get(name), whole)
    elif _has_sections(before) or _has_sections(now):
        for index, (was, is_) in enumerate(zip_longest(before or (), now or ())):
            yield from _unequal(was, is_, f"{key}[{index}]")
    elif before != now:
        yield key, before, now


def _has_sections(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, Mapping) for item in value)


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64 and " " not in value


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    if isinstance(value, Mapping):  # what a section says of itself
        given = {name: part for name, part in value.items() if part not in (None, "", [], {})}
        text = f"{{{', '.join(f'{name}: {part}' for name, part in given.items())}}}"
    return text if len(text) <= 80 else f"{text[:77]}..."
