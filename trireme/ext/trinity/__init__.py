"""Trinity-RFT's import paths, classes of algorithms and rewards, and saved files."""
