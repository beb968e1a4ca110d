"""Classes of one's own that a training calls, as transformers' TrainerCallback and ms-swift's."""
