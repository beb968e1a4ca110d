"""The model that workflows call: from messages to token ids and back."""
