"""Launcher: chooses what starts the parts of a stage, and declares the contract of a launcher.

`cluster.launcher` names a launcher of LAUNCHERS, a class that implements `Launcher`, or is `local`:
the parts run in the process of the command. A launcher's checks import no slow package, and none
that may not be installed: these are imported when it starts the parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from trireme.config import Findings, Problem
from trireme.config.gpus import Gpus
from trireme.extensions import missing
from trireme.registry import LAUNCHERS, did_you_mean, is_path

if TYPE_CHECKING:
    from trireme.config.plan import Plan
    from trireme.config.schema import ClusterConfig, Config
    from trireme.config.stages import StageFacts
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
    """The decision whether a launcher starts the parts, with notes and problems."""

    starts: bool
    notes: Sequence[str] = ()
    problems: Sequence[Problem] = ()
    cluster_key: str = ""
    """The key that names a cluster of other machines than this one; '': none does."""


class ChosenLauncher(NamedTuple):
    """What starts the parts of a stage, and where."""

    name: str = LOCAL
    """A name in LAUNCHERS, or `local`."""
    cluster_key: str = ""
    """See `LauncherChoice`."""


class Launcher(Protocol):
    """Starts the parts of a stage in separate processes; made without arguments."""

    def examine(self, config: Config, gpus: int) -> LauncherChoice:
        """Decide whether it starts the parts on a machine with `gpus` GPUs, and check the
        configuration. Called if `cluster.launcher` names it, or is `auto`, so that it may choose
        itself, or `local`.
        """
        ...

    def gpus_of(self, cluster: ClusterConfig) -> Gpus | None:
        """Return the most GPUs of any machine of the cluster, and the memory of the smallest; None
        if no cluster is named.

        Raises TimeoutError, ValueError or RuntimeError if the cluster does not answer.
        """
        ...

    async def run(self, stage: Stage, stop: Stop, measure_end: bool) -> StageResult:
        """Run an open stage to its end (see `run_plan` in launch/run.py). Raises the first cause of
        a failure.
        """
        ...

    async def evaluate(self, plan: Plan, rollouts: int | None) -> list[Evaluated]:
        """Run the plan's evaluation tasksets, each task `rollouts` times or its own number."""
        ...


def launcher_named(name: str) -> Launcher:
    """Return the launcher of this name. Raises ValueError if there is none."""
    return LAUNCHERS.get(name)()


def check_launcher(name: str) -> Findings:
    """Report an unknown launcher's name as a problem; for a dotted path see `choose_launcher`."""
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


def choose_launcher(config: Config, gpus: int) -> tuple[ChosenLauncher, Findings]:
    """Choose what starts the parts on a machine with `gpus` GPUs."""
    findings, chosen = Findings(), ChosenLauncher()
    for name, launcher in _asked(config.cluster.launcher, findings):
        choice = launcher.examine(config, gpus)
        findings.add(Findings([*choice.problems], [*choice.notes]))
        chosen = ChosenLauncher(
            name if choice.starts and chosen.name == LOCAL else chosen.name,
            chosen.cluster_key or choice.cluster_key,
        )
    return chosen, findings


def launchers_named() -> str:
    """Name the launchers in a sentence, with a capital as products have it."""
    return " or ".join(name.capitalize() for name in LAUNCHERS) or "a launcher"


def _asked(name: str, findings: Findings) -> Iterator[tuple[str, Launcher]]:
    """Yield the launchers that the key means, as far as they can be imported."""
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


def gpus_elsewhere(stages: Sequence[StageFacts]) -> tuple[Gpus | None, Findings]:
    """Ask a named cluster for the GPUs of its machines; None: those of this machine count."""
    findings = Findings()
    if all(stage.asks_api for stage in stages):
        return None, findings
    config = stages[0].config
    chosen, _ = choose_launcher(config, 0)  # its findings are those of the stages
    if chosen.name == LOCAL:
        return None, findings
    try:
        return launcher_named(chosen.name).gpus_of(config.cluster), findings
    except (TimeoutError, ValueError, RuntimeError) as error:  # a run ends of it, and says so too
        findings.note(f"{chosen.cluster_key or KEY}: this plan counts no GPU, since {error}")
        return None, findings
