"""Engines, rollouts and mode serve behind HTTP: the OpenAI, Anthropic and rollout servers."""
