"""Engines: generate tokens. The embedded one and all others implement one contract."""
