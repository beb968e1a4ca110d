"""The embedded engine: continuous batching on Hugging Face models, in this process."""
