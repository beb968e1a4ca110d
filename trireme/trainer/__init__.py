"""Trainer: turns experiences into moves of the weights."""
