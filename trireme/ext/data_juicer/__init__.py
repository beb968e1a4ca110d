"""Data-Juicer: its filters and scores, in a process of its own Python."""
