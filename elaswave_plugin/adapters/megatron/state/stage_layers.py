"""Changes the transformer layers of a model chunk in place; their weights come later."""

from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    get_transformer_layer_offset,
)

from elaswave_plugin.adapters.megatron.compat.rng import undone_draws


def why_fixed(chunks: Sequence[DistributedDataParallel]) -> str | None:
    """The reason why layers cannot change stage in this job; None where they can."""
    if len(chunks) > 1:
        return "the stages are interleaved"
    blocks = [module for module in chunks[0].modules() if isinstance(module, TransformerBlock)]
    if len(blocks) != 1:
        return f"the model has {len(blocks)} transformer blocks, wanted one"
    specs = blocks[0].submodules.layer_specs
    every_so_often = blocks[0].config.moe_layer_freq
    if blocks[0].config.num_moe_experts is not None and set(
        every_so_often if isinstance(every_so_often, list) else [every_so_often]
    ) != {1}:
        return "not every layer is a mixture of experts (moe_layer_freq)"
    if blocks[0].config.heterogeneous_block_specs or any(spec != specs[0] for spec in specs):
        return "the layers are not all alike"
    if not isinstance(specs[0], ModuleSpec) or not issubclass(specs[0].module, TransformerLayer):
        return "the layers are not Megatron-Core's transformer layers"
    return None


def take_layers(
    chunk: DistributedDataParallel, numbers: Sequence[int]
) -> list[TransformerLayer] | None:
    """Have exactly the layers ``numbers`` (from 1 on), in order; returns the ones built for it.

    None where nothing changes. What leaves is dropped, what is new has values of its own until the
    state is written, and the modules that stay are the same ones.
    """
    (block,) = (module for module in chunk.modules() if isinstance(module, TransformerBlock))
    present = {layer.layer_number: layer for layer in block.layers}
    if list(present) == list(numbers):
        return None
    like = next(chunk.module.parameters())
    built = {
        number: _build(block, number).to(device=like.device, dtype=like.dtype)
        for number in numbers
        if number not in present
    }
    block.layers = torch.nn.ModuleList((present | built)[number] for number in numbers)
    block.num_layers_per_pipeline_rank = len(numbers)
    for layer in built.values():
        layer.train(block.training)
    return list(built.values())


def _build(block: TransformerBlock, number: int) -> TransformerLayer:
    """A layer as ``TransformerBlock._build_layers`` makes it; its random draws are undone."""
    offset = get_transformer_layer_offset(
        block.config, block.vp_stage, block.pg_collection.pp.rank()
    )
    with undone_draws():
        layer: TransformerLayer = build_module(
            block.submodules.layer_specs[0],
            config=block.config,
            # The layer adds the offset itself.
            layer_number=number - offset,
            pg_collection=block.pg_collection,
            vp_stage=block.vp_stage,
        )
    return layer
