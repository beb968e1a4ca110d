"""What people see of a run: metrics, curves, the console, the summary."""
