"""Environments: the contract of what agents act in; engines and models know none."""
