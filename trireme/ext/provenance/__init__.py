"""A record of each start of a run, and what has changed at a resume."""
