"""Recognizes in a run's metrics why it does not learn, and says what to do about it."""
