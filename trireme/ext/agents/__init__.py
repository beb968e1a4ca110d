"""Agent programs as rollouts: any program that speaks to an API, and AgentScope's agents."""
