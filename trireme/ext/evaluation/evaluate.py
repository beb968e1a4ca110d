"""`trireme eval`: models on task sets, with pass@k, mean@n, their confidence, and a comparison."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import yaml

from trireme.cli.arguments import Given, with_flags
from trireme.cli.listing import in_columns
from trireme.config import ConfigError, Plan, Problem
from trireme.ext.evaluation.options import EvalOptions
from trireme.ext.evaluation.scores import Estimate, difference, estimate, pass_at
from trireme.ext.external_model.api import Api
from trireme.files import write_json
from trireme.text import say

if TYPE_CHECKING:
    from trireme.explorer.metrics import Evaluated

Measured = list[tuple[str, "list[Evaluated]"]]
"""Each model that could be evaluated, and its results."""

_ENDING = (signal.SIGTERM, signal.SIGHUP)
_NAMED = re.compile(r"([^=:/?]+)=")
LONGEST = 2048
"""Tokens of prompt and reply together, without a YAML and if the model allows as many."""


def evaluate_models(options: EvalOptions, flags: Given | None = None) -> int:
    """Evaluate each model, print the table; returns the exit code. `flags` have set keys, and are
    named in their problems.

    A model that cannot be evaluated has no row, and the code is 1; the others have theirs.
    """
    from trireme.cli.run import complain, set_environment

    set_environment()
    say("loading torch, and checking models and tasks", file=sys.stderr, flush=True)
    measured: Measured = []
    signals: list[int] = []
    try:
        if options.out is not None:
            _refuse_out(options.out)
        with _interrupts(signals), tempfile.TemporaryDirectory(prefix="trireme-eval-") as root:
            plans = [_plan(model, options, Path(root)) for model in options.models]
            code = _try_each(options, plans, measured)
    except ConfigError as error:
        complain(str(ConfigError(with_flags(error.problems, flags), error.source)))
        code = 2
    except ValueError as error:
        complain(str(error))
        code = 2
    except (RuntimeError, OSError, ImportError) as error:
        complain(str(error))
        code = 1
    except KeyboardInterrupt:
        say("stopped", file=sys.stderr)
        code = 128 + (signals or [signal.SIGINT])[0]
    if measured:
        say("\n".join(_report(options, measured)), flush=True)
    return code


def _refuse_out(path: Path) -> None:
    """Raise ValueError if the file cannot be written, which otherwise shows after a model."""
    if path.is_dir():
        raise ValueError(f"--out {path} is a folder: expected a file, as in scores.json")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ValueError(f"--out {path}: {above} is no folder in which files can be written")


@contextmanager
def _interrupts(came: list[int]) -> Iterator[None]:
    """Make SIGTERM and SIGHUP stop the work inside as Ctrl-C does, and append them to `came`."""

    def stop(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.raise_signal(signal.SIGINT)  # an event loop has its own way to stop on it

    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    ours = [n for n in _ENDING if signal.getsignal(n) is not signal.SIG_IGN]  # nohup
    before: dict[int, Any] = {number: signal.signal(number, stop) for number in ours}
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # a script's `command &` ignores it, and then no event loop has a way to stop on it
        before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _try_each(options: EvalOptions, plans: Sequence[Plan], measured: Measured) -> int:
    """Add each model's results to `measured`, and write it; 1 if a model could not be evaluated."""
    from trireme.cli.run import complain
    from trireme.ext.evaluation.trial import evaluate

    apis = [_api_of(model) for model in options.models]
    hosts = {urlsplit(url).netloc for _, url in apis if url}
    keys = [plan.engine.key or os.environ.get("OPENAI_API_KEY") for plan in plans]
    if len(hosts) > 1 and any(keys):
        raise ValueError(
            f"--model names APIs of {' and '.join(sorted(hosts))}, and all of them would receive "
            "the same key: measure them one by one, each with its own OPENAI_API_KEY"
        )
    code = 0
    for model, plan, (name, url), key in zip(options.models, plans, apis, keys, strict=True):
        say(f"{model} ...", file=sys.stderr, flush=True)
        api = Api(name, url, key) if url else None
        try:
            measured.append((model, evaluate(plan, rollouts=options.rollouts, api=api)))
        except (RuntimeError, OSError, ImportError) as error:
            complain(f"{model}: {error}")
            code = 1
            continue
        if options.out is not None:
            write_json(options.out, _values(options, measured))
    return code


def _api_of(model: str) -> tuple[str, str]:
    """Name and address of `NAME@URL`, empty for any other model."""
    name, at, url = model.partition("@")
    return (name, url) if at and "://" in url and "://" not in name else ("", "")


def _plan(model: str, options: EvalOptions, root: Path) -> Plan:
    from trireme.config.load import load_config
    from trireme.ext.evaluation.chat import model_in
    from trireme.launch.check import checked

    path = options.config
    keys = ["mode=bench", "stages=[]", "explorer.eval_interval=1"]
    keys.append("model.external_model.enable=false")  # --model determines the model
    if path is None:
        path = root / "eval.yaml"
        path.write_text(yaml.safe_dump(_tree(options)), encoding="utf-8")
    if "://" in model:
        if options.config is None and not any(
            k.startswith("model.model_path=") for k in options.keys
        ):
            raise ValueError(
                f"--model {model} is a server: expected a YAML, or model.model_path=FOLDER, "
                "whose tokenizer it shares"
            )
        if not any(_api_of(model)):
            urls = yaml.safe_dump([model], default_flow_style=True).strip()
            keys += ["explorer.rollout_model.engine_type=remote"]
            keys += [f"explorer.rollout_model.base_urls={urls}"]
    else:
        place = Path(model)
        keys.append(f"model.model_path={model_in(place).resolve() if place.is_dir() else model}")
    for name in ("temperature", "max_tokens"):
        if (value := getattr(options, name)) is not None:
            key = "max_response_tokens" if name == "max_tokens" else name
            keys.append(f"model.{key}={value}")
    config = load_config(path, [*keys, *options.keys])
    rollout_model = "explorer.rollout_model"
    if "://" not in model and config.explorer.rollout_model.engine_type == "remote":
        if any(key.startswith(f"{rollout_model}.engine_type=") for key in options.keys):
            raise ValueError(
                f"--model {model} with {rollout_model}.engine_type=remote: expected torch or vllm, "
                "since the server would answer with its own weights"
            )
        keys += [f"{rollout_model}.engine_type=torch", f"{rollout_model}.base_urls=[]"]
        config = load_config(path, [*keys, *options.keys])
    if not config.buffer.explorer_input.eval_tasksets:
        where = f"{options.config} has no" if options.config else "there are no --tasks, and no"
        what = f"{where} buffer.explorer_input.eval_tasksets: expected tasks to try"
        raise ConfigError([Problem("", what)])
    for taskset in config.buffer.explorer_input.eval_tasksets:
        n = options.rollouts or taskset.repeat_times
        if options.ks and max(options.ks) > n:
            raise ValueError(
                f"-k {max(options.ks)}: expected at most {n}, the rollouts of a task (-n)"
            )
    # after the file was read, since its data may be below its own ${checkpoint_root_dir}
    return checked(config.model_copy(update={"checkpoint_root_dir": str(root)})).plans[-1]


def _tree(options: EvalOptions) -> dict[str, Any]:
    # a path has other signs before its first "=": the options of verifiers:NAME?OPTIONS
    matches = [(_NAMED.match(task), task) for task in options.tasks or ()]
    names = [(found[1], task[found.end() :]) if found else ("", task) for found, task in matches]
    inputs: dict[str, Any] = {
        "default_workflow_type": options.workflow or "math_workflow",
        "eval_tasksets": [
            {"name": name or _name(path), "path": path, "format": _columns(options, path)}
            for name, path in names
        ],
    }
    if options.reward:
        inputs["default_reward_fn_type"] = options.reward
    model = {"max_prompt_tokens": LONGEST // 2, "max_response_tokens": LONGEST // 2}
    return {"name": "eval", "model": model, "buffer": {"explorer_input": inputs}}


def _name(path: str) -> str:
    stem = Path(path).stem
    return f"tasks_{stem}" if stem.isdigit() else stem  # only digits are no taskset's name


def _columns(options: EvalOptions, path: str) -> dict[str, str]:
    """Return the columns of prompt and answer: the given ones, else those that the first row shows,
    as `trireme.train` finds them.
    """
    from trireme.data.rows import DataSet, is_remote, load_rows
    from trireme.ext.train.train import columns_in

    columns = {"prompt_key": options.prompt_key, "response_key": options.response_key}
    if None in columns.values() and not is_remote(DataSet(path)):
        with suppress(ValueError, ImportError, OSError):  # the run's own check reports it
            found = columns_in(load_rows(path)[0])
            columns = {key: found.get(key) if c is None else c for key, c in columns.items()}
    usual = {"prompt_key": "question", "response_key": "answer"}
    columns = {key: usual[key] if c is None else c for key, c in columns.items()}
    return {key: column for key, column in columns.items() if column}


def _report(options: EvalOptions, measured: Measured) -> list[str]:
    """Return the table, and for two models or more the difference of each from the first one."""
    head = ["model", "taskset", "tasks", "measure", "estimate", "95 % interval"]
    rows = [head]
    for model, tasksets in measured:
        for one in tasksets:
            for name, values in _measures(options, one).items():
                seen = estimate(values)
                numbers = [f"{seen.mean:.3f}", _interval(seen)]
                rows.append([model, one.taskset, str(len(values)), name, *numbers])
    lines = in_columns(rows)
    base, base_tasksets = measured[0]
    for model, tasksets in measured[1:]:
        lines += ["", f"{model} compared with {base}, over the same tasks"]
        rows, notes = [["taskset", "measure", "difference", "95 % interval", "p"]], []
        for first, second in zip(base_tasksets, tasksets, strict=True):
            if first.measure != second.measure:
                notes.append(
                    f"{first.taskset} is not compared: {base} is measured by {first.measure}, "
                    f"{model} by {second.measure}"
                )
                continue
            ours = _measures(options, second)
            for name, values in _measures(options, first).items():
                gap = difference(values, ours[name])
                numbers = [f"{gap.mean:+.3f}", _interval(gap, "+"), f"{gap.p:.3f}"]
                rows.append([first.taskset, name, *numbers])
        lines += [*(in_columns(rows) if rows[1:] else []), *notes]
    for model, tasksets in measured:
        for one in tasksets:
            for why, count in one.failures.most_common(3):
                lines.append(
                    f"{model}, {one.taskset}: {count} rollouts failed and count as 0: {why}"
                )
    return lines


def _interval(seen: Estimate, sign: str = "") -> str:
    """Return the confidence interval; a single task has none."""
    if math.isinf(seen.low):
        return "-"
    return f"{seen.low:{sign}.3f} to {seen.high:{sign}.3f}"


def _measures(options: EvalOptions, one: Evaluated) -> dict[str, list[float]]:
    """Name -> a value of each task. Raises ValueError for a k of more rollouts than there are."""
    n = max(len(values) for values in one.values)
    out = {f"{one.measure} mean@{n}": [sum(values) / len(values) for values in one.values]}
    for k in options.ks or ([] if n == 1 else [1, n]):
        out[f"pass@{k}"] = [pass_at(k, values, options.success) for values in one.values]
    return out


def _values(options: EvalOptions, measured: Measured) -> list[Mapping[str, Any]]:
    return [
        {
            "model": model,
            **vars(one),
            "estimates": {
                name: _finite(asdict(estimate(values)))
                for name, values in _measures(options, one).items()
            },
        }
        for model, tasksets in measured
        for one in tasksets
    ]


def _finite(numbers: Mapping[str, float]) -> dict[str, float | None]:
    """Replace infinite numbers, which JSON does not allow and the interval of a single task has."""
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}
