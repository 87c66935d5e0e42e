"""Names of modules and weights that hold on every stage: a layer has its number in the model."""

from collections.abc import Iterator, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.transformer_layer import TransformerLayer


def numbered_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Each module once, by the prefix of its tensors' names, in the order of ``named_modules``."""
    told: set[torch.nn.Module] = set()
    ahead = [("", model)]
    while ahead:
        prefix, module = ahead.pop()
        if module in told:
            continue
        told.add(module)
        if isinstance(module, TransformerLayer):
            block = prefix.removesuffix(".").rpartition(".")[0]
            prefix = f"{block}.{module.layer_number - 1}."
        yield prefix, module
        children = reversed(module._modules.items())
        ahead += [(f"{prefix}{name}.", child) for name, child in children if child is not None]


def global_names(
    chunks: Sequence[DistributedDataParallel],
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Each parameter once, by its name, with its tp position where there are several."""
    tp = parallel_state.get_tensor_model_parallel_rank()
    several = parallel_state.get_tensor_model_parallel_world_size() > 1
    told: set[torch.nn.Parameter] = set()
    for chunk in chunks:
        for prefix, module in numbered_modules(chunk.module):
            for own, param in module._parameters.items():
                if param is not None and param not in told:
                    told.add(param)
                    yield (f"{prefix}{own} (tp {tp})" if several else f"{prefix}{own}"), param
