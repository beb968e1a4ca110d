"""The reward of the pictures."""

from trireme import Task


def right_word(task: Task, reply: str) -> float:
    """Return 1 if the reply is the right word, else 0."""
    return float(reply.strip() == task.truth)
