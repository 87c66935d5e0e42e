"""Layers of Transformer Engine and Apex, where they are installed: whether their bits repeat."""

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from benchmarks.gpu.device import Device
from benchmarks.gpu.notes import Notes, NotRun

WIDTH, HEADS, TOKENS, BATCH = 1024, 16, 512, 2


def run_layers(device: Device, notes: Notes) -> None:
    """Run a layer of each library twice from the same start. Raises NotRun where none is there."""
    if device.is_stand_in:
        raise NotRun("Transformer Engine and Apex need a GPU, and nothing stands in for them here")
    # Read when its attention is chosen: kernels that repeat their bits.
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    missing = []
    for name, make in (
        ("transformer_engine.pytorch", _transformer_layer),
        ("apex.normalization", _fused_norm),
    ):
        try:
            library = import_module(name)
        except ImportError as error:
            missing.append(f"{name} ({error})")
            continue
        first, second = (_passes(make(library)) for _ in range(2))
        same = all(torch.equal(*pair) for pair in zip(first, second, strict=True))
        notes.check(f"{name}: forward and backward repeat their bits", same)
    if len(missing) == 2:
        raise NotRun(f"not installed: {', '.join(missing)}")
    for one in missing:
        notes.say(f"not installed: {one}")


def _transformer_layer(library: Any) -> torch.nn.Module:
    layer: torch.nn.Module = library.TransformerLayer(
        WIDTH, 4 * WIDTH, HEADS, params_dtype=torch.bfloat16, hidden_dropout=0.0
    )
    return layer.cuda()


def _fused_norm(library: Any) -> torch.nn.Module:
    layer: torch.nn.Module = library.FusedLayerNorm(WIDTH)
    return layer.cuda().bfloat16()


def _passes(layer: Callable[..., Any]) -> list[torch.Tensor]:
    """Output and gradient of the input for weights and an input drawn again with the same seed."""
    generator = torch.Generator("cuda").manual_seed(5)
    assert isinstance(layer, torch.nn.Module)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.02, generator=generator)
    shape = (TOKENS, BATCH, WIDTH)
    inputs = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
    inputs.requires_grad_()
    output = layer(inputs)
    output.float().square().sum().backward()
    assert inputs.grad is not None
    return [output.detach(), inputs.grad]
