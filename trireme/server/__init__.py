"""Server: rollouts over HTTP, for trainers and agents in other processes."""
