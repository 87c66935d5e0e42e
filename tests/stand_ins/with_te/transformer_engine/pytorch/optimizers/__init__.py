"""Stands in for transformer_engine.pytorch.optimizers."""

from cpu_kernels import (
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_scale_tensor,
)
from torch.optim import SGD as FusedSGD

from transformer_engine.pytorch.optimizers.fused_adam import FusedAdam

__all__ = [
    "FusedAdam",
    "FusedSGD",
    "multi_tensor_applier",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
]
