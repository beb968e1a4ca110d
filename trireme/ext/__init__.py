"""Extensions: capabilities that can be deleted, a folder each; see extensions.py."""
