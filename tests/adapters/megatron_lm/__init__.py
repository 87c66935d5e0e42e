"""Megatron-LM's own pretrain_gpt.py, unmodified, in elastic jobs."""
