"""Stands in for apex.optimizers."""

from torch.optim import SGD as FusedSGD

from apex.optimizers.fused_adam import FusedAdam

__all__ = ["FusedAdam", "FusedSGD"]
