"""Environments: the contract of the worlds that agents act in; engines and models know none."""
