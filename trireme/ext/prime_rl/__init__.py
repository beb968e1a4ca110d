"""Answers to the keys of prime-rl's TOML files, with the keys that replace them."""
