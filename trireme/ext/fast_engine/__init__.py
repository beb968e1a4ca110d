"""A faster forward pass for Llama-like models in the embedded engine on a CPU."""
