"""ALFWorld: the real engine in worker processes, its data, and a generator of games for it."""
