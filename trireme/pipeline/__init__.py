"""Between explorer and buffer: what is done to a step's experiences before they are trained."""
