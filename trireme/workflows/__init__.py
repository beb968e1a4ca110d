"""Workflows: the procedures that try a task with a model."""
