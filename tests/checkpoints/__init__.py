"""Checkpoints as files: read chunk by chunk, and killed while they are written."""
