"""Diagnosis: recognizes in a run's metrics why it does not learn, and suggests a remedy."""
