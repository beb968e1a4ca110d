"""`trireme workflows`: the workflows and rewards that a YAML may name, plug-ins included."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from trireme.cli.listing import first_line, print_table


def workflows(plugin_dirs: Sequence[Path]) -> int:
    """Print two tables; returns the exit code."""
    from trireme.cli.run import add_plugin_dirs
    from trireme.rewards.reward import REWARDS
    from trireme.workflows.plugins import load_plugins
    from trireme.workflows.workflow import WORKFLOWS

    try:
        add_plugin_dirs(plugin_dirs)
        load_plugins()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for heading, registry in (("workflow", WORKFLOWS), ("reward", REWARDS)):
        rows = [(name, first_line(registry.get(name))) for name in registry.names()]
        print_table((heading, "what it does"), rows)
    return 0
