"""Curricula: orders of a taskset's rows by their difficulty."""
