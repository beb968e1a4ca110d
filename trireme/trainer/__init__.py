"""The trainer: learns from experiences."""
