"""The buffer, which carries experiences from the explorer to the trainer."""
