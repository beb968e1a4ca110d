"""vLLM as an engine: runs in a process of vLLM's own environment, behind a rollout server."""
