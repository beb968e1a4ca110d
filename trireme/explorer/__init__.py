"""The explorer: tries tasks, and turns what happens into experiences."""
