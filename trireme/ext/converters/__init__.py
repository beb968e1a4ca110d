"""Converters: `trireme convert`, with FSDP shards and Megatron's distributed checkpoints."""
