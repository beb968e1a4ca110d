"""Conversations led turn by turn: schedulers, tools, MCP servers, gyms, and loss scales."""
