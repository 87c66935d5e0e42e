"""The changes for backwards that add weight gradients up themselves (gradient_accumulation_fusion).

Megatron-Core's linear layers, and Transformer Engine's of some versions, keep in the forward pass
where the gradient is to be added (core/tensor_parallel/layers.py, ``ctx.main_grad``).
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear


def fuses(config: object) -> bool:
    """Return whether weight gradients go to ``main_grad`` without autograd."""
    return bool(getattr(config, "gradient_accumulation_fusion", False))


def add_in_one_sum(model: torch.nn.Module) -> None:
    """Have what a micro-batch adds to ``main_grad`` be one sum, and in nothing's place.

    A head that is given the embedding's weight has a gradient for it, too. Where the head's is not
    fused, autograd adds the two up first: sums over micro-batches are then the same, on any
    worker. Layers of Transformer Engine put the gradient of the first micro-batch since they
    were built in the place of what is there, which may be another one's by then.
    """
    module: Any
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear) and module.weight is None:
            module.gradient_accumulation_fusion = False
        if getattr(module, "is_first_microbatch", False):
            module.is_first_microbatch = False
