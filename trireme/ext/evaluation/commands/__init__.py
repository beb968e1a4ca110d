"""The commands: one function each, with its options and help; its implementation is
imported late.
"""
