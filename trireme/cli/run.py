"""`trireme run`: runs a YAML's stages up to a trained model, and reports failures.

Exit codes: 0 done, 1 the run failed, 2 the configuration cannot run (nothing was started), 128 and
the number of the signal that ended it: 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trireme.config import ConfigError, Plan, load_config
from trireme.config.plan import unmet
from trireme.config.variables import variable
from trireme.engines.spin import allow_spinning
from trireme.files import InUse
from trireme.launch.stop import Stop
from trireme.log import hide_passwords, write_failure
from trireme.monitor.console import Console
from trireme.text import say
from trireme.usercode import sentence_of

if TYPE_CHECKING:
    from trireme.launch.check import Draft

_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",  # of the processes that this one starts
    "TOKENIZERS_PARALLELISM": "false",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}


def set_environment() -> None:
    """Set what torch and tokenizers read when they are imported, unless the user has."""
    allow_spinning()
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def run(
    config: Path | None,
    overrides: Sequence[str],
    plugin_dirs: Sequence[Path],
    *,
    compare: bool = False,
    fresh: bool = False,
    strict: bool = False,
    heading: str = "",
    named: Callable[[Iterable[Any]], Iterable[Any]] = list,
) -> int:
    """Run the stages of a YAML (None: the demo); returns the exit code.

    `compare` also spends the last stage's time on more supervised training. `fresh` begins a new
    run, with the next free name. `strict` refuses another engine or device than the YAML names.
    `heading` is printed once the configuration can run. `named` rewrites its problems, such as by
    the flags that have set its keys.
    """
    set_environment()
    stop = Stop()
    stop.listen()
    try:
        try:
            made = draft_of(config, overrides, plugin_dirs, fresh)
            if heading:
                say(heading, flush=True)
            if strict and (lacks := [one for plan in made.plans for one in unmet(plan)]):
                raise ConfigError([*dict.fromkeys(lacks)])
            if fresh:
                from trireme.launch.check import refuse_old_rows

                stop.fresh = True
                refuse_old_rows(made)
                say(f"a new run: name={made.plans[0].config.name}", flush=True)
            if compare:
                from trireme.launch.run import refuse_comparison

                refuse_comparison(made.plans)
        except ConfigError as error:
            source = "the demo, since no YAML is named" if config is None else error.source
            complain(str(ConfigError(named(error.problems), source)))
            return 2
        except ValueError as error:
            complain(str(error))
            return 2
        stop.listen()  # plug-ins and environments may have installed handlers of their own
        # `made` holds the rows that were read, which stages reuse
        return run_plans(made.plans, stop, compare_sft=compare)
    except KeyboardInterrupt:
        say(f"stopped by {stop.name}: {stop.what_is_left()}", file=sys.stderr)
        return stop.code


@contextmanager
def brief_threads() -> Iterator[None]:
    """Report a thread that a disk or the network ends, such as TensorBoard's, in a sentence; one
    that a bug ends keeps its traceback.
    """
    before = threading.excepthook

    def failed(how: threading.ExceptHookArgs) -> None:
        if not isinstance(how.exc_value, OSError):
            before(how)
            return
        name = how.thread.name if how.thread else "unknown"
        say(f"warning: thread '{name}' has ended: {how.exc_value}", file=sys.stderr)

    threading.excepthook = failed
    try:
        yield
    finally:
        threading.excepthook = before


def run_plans(plans: Sequence[Plan], stop: Stop, *, compare_sft: bool = False) -> int:
    """Run the stages; an expected failure becomes a sentence and a file with its traceback.

    `compare_sft` asks what more supervised training would have brought.
    """
    from trireme.launch.run import run_stages

    console = Console()
    for note in dict.fromkeys(note for plan in plans for note in plan.notes):
        console.note(note)
    try:
        with brief_threads():
            run_stages(plans, console=console, stop=stop, compare_sft=compare_sft)
    except ConfigError as error:
        console.close()
        complain(str(error))
        return 2
    except InUse as error:  # the log in that folder belongs to the other run
        console.close()
        complain(str(error))
        return 1
    except Exception as error:
        if (sentence := sentence_of(error)) is None:  # Python prints its traceback
            raise
        console.close()
        complain(sentence)
        details = write_failure(log_folder(plans), error)
        if details is not None:
            say(f"details: {details}", file=sys.stderr)
        return 1
    finally:
        console.close()
    return 0


def complain(text: str) -> None:
    """Print what is wrong on stderr, the first line marked."""
    say(f"error: {hide_passwords(text)}", file=sys.stderr)


def draft_of(
    config: Path | None,
    overrides: Sequence[str],
    plugin_dirs: Sequence[Path],
    fresh: bool = False,
) -> Draft:
    """Return the plans of a YAML, with the parts that were made; `fresh`: of a new run, with the
    next free name. Raises ValueError if they cannot run.

    The data that the first stage's trainer reads is encoded when that stage begins.
    """
    add_plugin_dirs(plugin_dirs)
    if config is None:
        from trireme.demo.prepare import demo_config

        config = demo_config(overrides)
    loaded = load_config(config, overrides)  # its problems are reported before torch is loaded
    if fresh:
        from trireme.config.check import free_name

        loaded = load_config(config, [*overrides, f"name={free_name(loaded)}"])
    from trireme.launch.check import checked

    return checked(loaded)


def add_plugin_dirs(plugin_dirs: Sequence[Path]) -> None:
    """Put folders before those of TRIREME_PLUGIN_DIRS, which are searched for plug-ins
    everywhere.
    """
    known = variable("PLUGIN_DIRS")
    places = [*(str(folder.resolve()) for folder in plugin_dirs), *filter(None, [known])]
    if places:
        os.environ["TRIREME_PLUGIN_DIRS"] = os.pathsep.join(places)


def log_folder(plans: Sequence[Plan]) -> Path:
    """Return the folder where the job as a whole logs: next to the stages' folders, or in the only
    one.
    """
    return plans[0].root_dir / "log" / plans[0].explorer_name
