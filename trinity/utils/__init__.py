"""Import paths of the registry and the log."""
