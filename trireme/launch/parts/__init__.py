"""The parts of a run, each made from a plan. The Plan has decided; nothing here does."""
