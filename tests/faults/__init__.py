"""Faults: what a run survives, tried on real commands."""
