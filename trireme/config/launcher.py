"""Launcher: who starts the parts of a stage, and what every launcher says of itself.

`cluster.launcher` names a launcher of LAUNCHERS, a class that keeps the contract `Launcher`, or is
`local`: the parts are in the process of the command. Asking a launcher imports nothing that takes
long, and nothing that may not be installed: that is imported when it starts the parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from trireme.config import Findings, Problem
from trireme.extensions import missing
from trireme.registry import LAUNCHERS, did_you_mean, is_path

if TYPE_CHECKING:
    from trireme.config.plan import Plan
    from trireme.config.schema import ClusterConfig, Config
    from trireme.explorer.metrics import Evaluated
    from trireme.launch.results import StageResult
    from trireme.launch.stage import Stage
    from trireme.launch.stop import Stop

KEY = "cluster.launcher"
LOCAL = "local"
"""The value of the key for one process."""
AUTO = "auto"
"""The value of the key for the first launcher that starts the parts by itself, else `local`."""


@dataclass(frozen=True)
class LauncherChoice:
    """The answer whether a launcher starts the parts, with the notes and problems about it."""

    starts: bool
    notes: Sequence[str] = ()
    problems: Sequence[Problem] = ()


class Launcher(Protocol):
    """Starts the parts of a stage in processes of their own; made without arguments."""

    def examine(self, config: Config, gpus: int) -> LauncherChoice:
        """Decide whether it starts the parts on a machine with so many GPUs, and check the
        configuration. It is asked where `cluster.launcher` names it, and where that is `auto`, so
        that it may decide itself, or `local`.
        """
        ...

    def gpus_of(self, cluster: ClusterConfig) -> int | None:
        """The most GPUs that a machine of the cluster has; None where no cluster is named.

        Raises TimeoutError, ValueError or RuntimeError where the cluster does not answer.
        """
        ...

    async def run(self, stage: Stage, stop: Stop, measure_end: bool) -> StageResult:
        """Run a stage that is open to its end (see `run_plan` in launch/run.py). Raises the first
        cause where it fails.
        """
        ...

    async def evaluate(self, plan: Plan, rollouts: int | None) -> list[Evaluated]:
        """Try the plan's evaluation tasksets, each task `rollouts` times or its own number."""
        ...


def launcher_named(name: str) -> Launcher:
    """The launcher of this name. Raises ValueError where there is none."""
    return LAUNCHERS.get(name)()


def check_launcher(name: str) -> Findings:
    """Note as a problem a name that no launcher has; of a dotted path see `choose_launcher`."""
    findings = Findings()
    if name in (AUTO, LOCAL) or name in LAUNCHERS or is_path(name):
        return findings
    if lacks := missing("launcher", name):
        findings.problem(KEY, f"is {name!r}, which {lacks}")
    else:
        names = [AUTO, LOCAL, *LAUNCHERS]
        expected = f"{', '.join(names)}{did_you_mean(name.lower(), names)}"
        findings.problem(KEY, f"is {name!r}: expected one of {expected}")
    return findings


def choose_launcher(config: Config, gpus: int) -> tuple[str, Findings]:
    """Choose who starts the parts on a machine with so many GPUs."""
    findings, chosen = Findings(), LOCAL
    for name, launcher in _asked(config.cluster.launcher, findings):
        choice = launcher.examine(config, gpus)
        findings.add(Findings([*choice.problems], [*choice.notes]))
        if choice.starts and chosen == LOCAL:
            chosen = name
    return chosen, findings


def _asked(name: str, findings: Findings) -> Iterator[tuple[str, Launcher]]:
    """The launchers that the key means, of those that can be imported."""
    names = list(LAUNCHERS) if name in (AUTO, LOCAL) else [name]
    for each in names:
        if each not in LAUNCHERS and not is_path(each):
            continue
        try:
            yield each, launcher_named(each)
        except (ValueError, ImportError) as error:
            if each == name:
                findings.problem(KEY, f"is {name!r}, and cannot be used: {error}")
            else:
                findings.note(f"{KEY} ({name}): '{each}' is left out: {error}")
