"""Launchers: assemble the parts of a plan and run it."""

GC_THRESHOLDS = (100_000, 50, 20)
"""The number of new objects that starts a collection of the youngest generation, and the number of
collections that starts one of each older generation: for a command's imports (cli/main.py) and for
whole runs (run.py)."""
