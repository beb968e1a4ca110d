"""The explorer: runs tasks and turns their rollouts into experiences."""
