"""The synchronizer: coordinates explorer and trainer, and verifies that weights have arrived."""
