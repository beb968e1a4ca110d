"""Launchers: assemble the parts of a plan and run it."""

import gc
import sys

GC_THRESHOLDS = (100_000, 50, 20)
"""The number of new objects that starts a collection of the youngest generation, and the number of
collections that starts one of each older generation: for a command's imports (cli/main.py) and for
whole runs (run.py)."""


def before_exit() -> None:
    """Exclude all objects from the collections at the interpreter's exit, which would take half a
    second: not where triton is loaded, which prints whatever they did not free, for torch 2.15
    hundreds of names (nanobind's report of leaks).
    """
    if "triton" in sys.modules:
        gc.unfreeze()
    else:
        gc.freeze()
