"""The computations of the stand-ins for CUDA kernels, with torch's own arithmetic."""

import torch
from torch.optim.adamw import adamw


def update(group, params, state):
    """One AdamW step of these parameters of a group, counted already, by torch's own function."""
    beta1, beta2 = group["betas"]
    adamw(
        [p.data for p in params],
        [p.grad for p in params],
        [state[p]["exp_avg"] for p in params],
        [state[p]["exp_avg_sq"] for p in params],
        [],
        [torch.tensor(float(group["step"] - 1)) for _ in params],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def multi_tensor_scale(chunk_size, overflow_flag, tensor_lists, scale):
    """Each tensor of the second list becomes that of the first one, scaled."""
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_scale_tensor(chunk_size, overflow_flag, tensor_lists, scale):
    """As above, the scale in a tensor."""
    multi_tensor_scale(chunk_size, overflow_flag, tensor_lists, scale)


def multi_tensor_l2norm(chunk_size, overflow_flag, tensor_lists, per_tensor):
    """The norm of all of them; no norms of each."""
    (tensors,) = tensor_lists
    return torch.stack([tensor.norm() for tensor in tensors]).norm().reshape(1), None


def multi_tensor_applier(kernel, overflow_flag, tensor_lists, *args):
    """Call a kernel as the real ones are called."""
    return kernel(2048 * 32, overflow_flag, tensor_lists, *args)
