"""TensorBoard, wandb, MLflow, SwanLab, Trackio and trackers of one's own, told of every step."""
