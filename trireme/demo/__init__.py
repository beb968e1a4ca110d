"""The built-in demo: its problems, its tiny model and its YAML."""
