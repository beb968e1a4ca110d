"""An estimate of the device memory of a trainer's rank, before anything starts."""
