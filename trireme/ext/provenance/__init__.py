"""A record of each attempt of a run, and of the changes at a resume."""
