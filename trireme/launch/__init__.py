"""Launchers: put the parts together for a plan, and run it."""

GC_THRESHOLDS = (100_000, 50, 20)
"""Objects made until the youngest are collected, and collections until the older ones are: for a
command's imports (cli/main.py) and for whole runs (run.py)."""
