"""Buffer: what carries experiences from the explorer to the trainer."""
