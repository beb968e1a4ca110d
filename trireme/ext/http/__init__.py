"""Engines and mode serve behind HTTP, in OpenAI's and Anthropic's protocols."""
