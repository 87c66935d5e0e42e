"""Finds the layers that normalise a sample by the other samples of its micro-batch."""

import torch
from torch.nn.modules.batchnorm import _BatchNorm


def batch_layers(model: torch.nn.Module) -> list[str]:
    """Return "name (class)" of each layer that does so, in passes of training.

    Not of one that is kept in evaluation mode, nor of SyncBatchNorm, whose statistics are those of
    all workers.
    """
    return [
        f"{name or 'the model'} ({type(layer).__name__})"
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm) and _by_its_batch(layer, model)
    ]


def _by_its_batch(layer: _BatchNorm, model: torch.nn.Module) -> bool:
    if isinstance(layer, torch.nn.SyncBatchNorm):
        return False
    # In an evaluation all are in that mode.
    return layer.training or layer.running_mean is None or not model.training
