"""Harbor: tasks in folders, tried without a container."""
