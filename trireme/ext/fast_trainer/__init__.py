"""Compiled forward and backward passes for small Llama-like models in the trainer on a CPU."""
