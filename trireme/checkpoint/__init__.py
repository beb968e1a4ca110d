"""The files in a job's folder: how they are written, read again, and exported."""
