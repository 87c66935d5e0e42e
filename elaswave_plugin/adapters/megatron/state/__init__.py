"""Buffers, optimizer state and stages of Megatron-Core."""
