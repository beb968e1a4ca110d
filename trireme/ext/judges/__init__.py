"""Models that give rewards: judges (one by one, by a rubric, side by side) and reward models."""
