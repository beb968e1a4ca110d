"""Data-Juicer: its filters and scores, in a process of a separate Python."""
