"""Small worlds: a mailbox, a database, and experiments in text."""
