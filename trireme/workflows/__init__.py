"""Workflows: what a rollout does with a task and a model."""
