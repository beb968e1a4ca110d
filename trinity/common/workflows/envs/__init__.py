"""Import paths of environments' workflows."""
