"""Environments to act in (gyms, reasoning-gym, verifiers, OpenEnv) and processes to run them in."""
