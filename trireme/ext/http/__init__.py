"""HTTP servers for engines and mode serve, in OpenAI's and Anthropic's protocols."""

INSTANCE = "x-trireme-instance"
"""A header of every answer, which changes whenever the server starts."""
