"""Engines in other processes, and how weights reach them."""
