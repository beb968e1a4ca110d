"""Launchers: put the parts together for a plan, and run it."""
