"""SQL: experiences in a database, and tables as data sets."""
