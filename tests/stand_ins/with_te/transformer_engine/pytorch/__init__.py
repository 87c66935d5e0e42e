"""Stands in for transformer_engine.pytorch: its norm and layers, and names of others."""

from types import SimpleNamespace

import torch

from transformer_engine.pytorch import distributed, fp8, optimizers
from transformer_engine.pytorch.layers import DotProductAttention, LayerNormLinear, Linear

__all__ = [
    "DotProductAttention",
    "LayerNormLinear",
    "Linear",
    "distributed",
    "fp8",
    "optimizers",
]


class _Norm:
    """The arguments and marks of a norm, whichever of torch's computes it."""

    def __init__(
        self,
        normalized_shape=None,
        eps=1e-5,
        sequence_parallel=False,
        params_dtype=None,
        zero_centered_gamma=False,
        device="cpu",
        hidden_size=None,
    ):
        assert not zero_centered_gamma
        super().__init__(
            normalized_shape or hidden_size, eps=eps, device=device, dtype=params_dtype
        )
        for param in self.parameters():
            param.sequence_parallel = sequence_parallel


class LayerNorm(_Norm, torch.nn.LayerNorm):
    """Megatron-Core uses it behind the last layer, whatever the layers are made of."""


class RMSNorm(_Norm, torch.nn.RMSNorm):
    """The same of a model with such norms."""


class _NeedsGpu(torch.nn.Module):
    def __init__(self, *args, **kwargs):
        raise NotImplementedError(f"{type(self).__name__} has no stand-in")


class GroupedLinear(_NeedsGpu):
    """No stand-in."""


ops = SimpleNamespace(Sequential=_NeedsGpu, FusibleOperation=_NeedsGpu)
