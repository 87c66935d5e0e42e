"""Checkpoints on disk: written beside their place, checked, then named."""
