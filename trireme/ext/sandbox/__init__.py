"""A sandbox for programs that a model writes: rewards by tests and by rows, and the tool python."""
