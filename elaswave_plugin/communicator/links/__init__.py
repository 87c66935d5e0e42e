"""Tensors as bytes between trainers, epoch by epoch."""
