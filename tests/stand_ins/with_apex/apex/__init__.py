"""A stand-in for Apex: what Megatron-Core imports of it."""

from apex import multi_tensor_apply, normalization, optimizers

__all__ = ["multi_tensor_apply", "normalization", "optimizers"]
