"""Models that set rewards: judges (single, by a rubric, comparing) and reward models."""
