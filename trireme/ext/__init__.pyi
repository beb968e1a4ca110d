"""What `from trireme import ...` finds in extensions, for type checkers and editors.

Written by scripts/extension_names.py.
"""
