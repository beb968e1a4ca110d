"""verl's options, read under trainer.trainer_config."""
