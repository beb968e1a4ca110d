"""Measuring and trying models outside a run: trireme eval, chat and debug, and try_workflow."""
