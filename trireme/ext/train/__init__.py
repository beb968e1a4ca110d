"""trireme.train(): a run from Python, of functions and rows of the program that calls it."""
