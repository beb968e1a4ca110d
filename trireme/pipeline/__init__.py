"""The steps between explorer and buffer: operators on a step's experiences before training."""
