"""Experience replay: a buffer that returns experiences several times, by priority."""
