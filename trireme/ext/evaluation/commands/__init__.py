"""The commands: one function each, with its options and help; what it runs is imported late."""
