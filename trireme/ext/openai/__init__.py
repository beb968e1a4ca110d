"""OpenAI's API in front of the Model: bodies, replies, streams, and clients in this process."""
