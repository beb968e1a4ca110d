"""Experience replay: a buffer that gives experiences several times, by priority."""
