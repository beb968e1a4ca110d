"""Images: conversations with pictures, for vision-language models of the Qwen kind."""
