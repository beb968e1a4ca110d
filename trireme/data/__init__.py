"""Data: rows, and their conversion to tasks and experiences."""
