"""vLLM as an engine: it runs in a process of vLLM's own environment, behind a rollout server."""
