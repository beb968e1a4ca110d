"""Import paths of tasks, experiences, workflows and rewards."""
