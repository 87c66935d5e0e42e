"""Megatron-LM's own training loop, as its pretraining scripts run it."""
