"""Algorithms: what is learned from experiences, as a table of small pure functions."""
