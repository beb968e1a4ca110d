"""Algorithms: the ways to learn from experiences, as a table of small pure functions."""
