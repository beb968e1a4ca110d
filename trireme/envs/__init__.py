"""Environments: what agents act in. Each has `reset` and `step`; engines and models know none."""
