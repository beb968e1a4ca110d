"""A package that extends Trireme: see parts.py."""
