"""TensorBoard, wandb, MLflow, SwanLab, Trackio and custom trackers, called at every step."""
