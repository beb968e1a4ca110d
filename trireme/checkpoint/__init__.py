"""Checkpoint: what a job's folder holds, how it is written, read again, and exported."""
