"""Import path of buffers."""
