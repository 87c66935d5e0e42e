"""Optimizer state of DeepSpeed by ZeRO stage."""
