"""The local page over the folders of runs: curves, rollouts, tokens, time, configuration."""
