"""Stands in for Apex's layer norm, of which Megatron-Core makes that of its local layers."""

import torch


class FusedLayerNormAffineFunction(torch.autograd.Function):
    """Torch's own layer norm and its gradient."""

    @staticmethod
    def forward(ctx, input, weight, bias, normalized_shape, eps, memory_efficient=False):
        """Normalize."""
        output, mean, rstd = torch.native_layer_norm(input, normalized_shape, weight, bias, eps)
        ctx.save_for_backward(input, mean, rstd, weight, bias)
        ctx.normalized_shape = normalized_shape
        return output

    @staticmethod
    def backward(ctx, gradient):
        """As torch does."""
        input, mean, rstd, weight, bias = ctx.saved_tensors
        shape, wanted = ctx.normalized_shape, [True, True, True]
        gradients = torch.ops.aten.native_layer_norm_backward(
            gradient, input, shape, mean, rstd, weight, bias, wanted
        )
        return (*gradients, None, None, None)
