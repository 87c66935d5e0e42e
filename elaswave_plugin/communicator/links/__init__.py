"""Tensors as bytes between trainers, view by view."""
