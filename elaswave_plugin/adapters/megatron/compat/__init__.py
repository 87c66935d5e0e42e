"""Versions, patch records and random draws of Megatron-Core."""
