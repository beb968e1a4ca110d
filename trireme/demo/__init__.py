"""The built-in demo: its problems, its tiny model and its YAML."""

from pathlib import Path

YAML = Path(__file__).with_name("arithmetic.yaml")
