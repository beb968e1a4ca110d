"""`trireme debug`: runs a YAML's workflow on one task, and shows every token and its training."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from trireme.cli.run import add_plugin_dirs, complain
from trireme.config import load_config
from trireme.text import say


def debug(
    config: Path,
    overrides: Sequence[str],
    plugin_dirs: Sequence[Path],
    *,
    task: int = 0,
    rollouts: int = 1,
    replies: Sequence[str] = (),
) -> int:
    """Print the exchange; returns the exit code: 1 the workflow failed, 2 nothing could run."""
    add_plugin_dirs(plugin_dirs)
    say(f"{config}: loading torch and the task", file=sys.stderr, flush=True)
    try:
        loaded = load_config(config, overrides)
        from trireme.ext.evaluation.trial import TrialFailed, try_plan
        from trireme.launch.check import checked

        plans = [plan for plan in checked(loaded).plans if plan.mode in ("both", "explore")]
        if not plans:
            raise ValueError("no stage explores: expected mode both or explore")
        plan = plans[-1]
        try:
            say(try_plan(plan, place=task, rollouts=rollouts, replies=list(replies) or None))
        except TrialFailed as error:
            complain(str(error))
            say(error.trace, file=sys.stderr)
            return 1
    except (ValueError, OSError) as error:
        complain(str(error))
        return 2
    return 0
