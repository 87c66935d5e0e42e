"""Names of modules and weights that hold on every stage: a layer has its number in the model."""

from collections.abc import Iterator, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.transformer_layer import TransformerLayer


def numbered_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Each module, by the prefix of its tensors' names."""
    numbered = {
        f"{name}.": f"{name.rpartition('.')[0]}.{layer.layer_number - 1}."
        for name, layer in model.named_modules()
        if isinstance(layer, TransformerLayer)
    }
    for name, module in model.named_modules():
        local = f"{name}." if name else ""
        prefix = next((one for one in numbered if local.startswith(one)), "")
        yield numbered.get(prefix, "") + local.removeprefix(prefix), module


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
