"""An estimate of what a trainer's rank needs of its device, before anything starts."""
