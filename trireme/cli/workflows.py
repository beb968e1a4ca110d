"""`trireme workflows`: the workflows and rewards that a YAML may name, plug-ins included."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trireme.cli.listing import first_line, plugins_loaded, print_table


def workflows(plugin_dirs: Sequence[Path]) -> int:
    """Print two tables; returns the exit code."""
    from trireme.rewards.reward import REWARDS
    from trireme.workflows.workflow import WORKFLOWS

    if not plugins_loaded(plugin_dirs):
        return 2
    for heading, registry in (("workflow", WORKFLOWS), ("reward", REWARDS)):
        rows = [(name, first_line(registry.get(name))) for name in registry.names()]
        print_table((heading, "what it does"), rows)
    return 0
