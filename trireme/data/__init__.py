"""Data: rows, and how they become tasks and experiences."""
