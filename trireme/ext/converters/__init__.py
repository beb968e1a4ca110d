"""Converters: FSDP shards and Megatron's distributed checkpoints."""
