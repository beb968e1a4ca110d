"""How models of other families than Hermes' write tool calls (gpt-oss, DeepSeek, Llama ...)."""
