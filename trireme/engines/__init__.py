"""Engines: what generates tokens; the embedded one, and those to come, keep one contract."""
