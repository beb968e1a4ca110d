"""Extension: the trainer's passes of small Llama-like models, compiled."""
