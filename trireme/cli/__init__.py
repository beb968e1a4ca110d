"""The command line: one file a command, each a few lines over the parts."""
