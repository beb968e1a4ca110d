"""Model: what a workflow holds, from messages to token ids and back."""
