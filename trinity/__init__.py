"""Trinity: Trireme under the import paths that users' files already have."""
