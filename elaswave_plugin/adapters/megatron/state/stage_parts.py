"""Makes a model chunk that of another pipeline stage or tp position, in place; weights come later.

Embedding and head follow from the constructor of Megatron-Core's model, which runs again on the
same object as it was called, except for the stage (megatron/core/models/gpt/gpt_model.py and
bert/bert_model.py).
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.utils import VocabUtility
from megatron.core.transformer.moe.moe_layer import MoELayer

from elaswave_plugin.adapters.constructed import arguments_of
from elaswave_plugin.adapters.megatron.compat.rng import undone_draws

# The models of which a stage is built again; their heirs may want more than that.
_MODELS = (GPTModel, BertModel)


def why_fixed(chunks: Sequence[DistributedDataParallel]) -> str | None:
    """The reason why no worker can change its stage in this job; None where they can.

    Where there is one stage only, any model is that of all workers.
    """
    if chunks[0].config.pipeline_model_parallel_size == 1:
        return None
    models = _models(chunks[0])
    if len(models) != 1 or type(models[0]) not in _MODELS:
        names = ", ".join(type(model).__name__ for model in models) or "no GPTModel"
        return f"the model is {names}, wanted one GPTModel or BertModel of Megatron-Core itself"
    if arguments_of(models[0]) is None:
        return "the model was built before elaswave_plugin was attached"
    return None


def take_stage(chunk: DistributedDataParallel, *, first: bool, last: bool) -> bool:
    """Have an embedding where ``first`` and a head where ``last``, as that stage's model has.

    Return True if the model was built again: its layers are those of the launch, its values
    undefined. Megatron-Core's groups have to know the new stage already.
    """
    (model,) = _models(chunk)
    if (model.pre_process, model.post_process) == (first, last):
        return False
    like, training = next(chunk.module.parameters()), model.training
    arguments = arguments_of(model)
    assert arguments is not None
    constructor: Any = type(model).__init__
    bound = inspect.signature(constructor).bind(model, *arguments[0], **arguments[1])
    groups = ProcessGroupCollection.use_mpu_process_groups()
    embedding_group = groups.embd
    # The other stage has the shared embedding already, and takes no part in a sum.
    groups.embd = None
    bound.arguments.update(pre_process=first, post_process=last, pg_collection=groups)
    with undone_draws():
        constructor(*bound.args, **bound.kwargs)
    groups.embd = model.embd_group = embedding_group
    model.to(device=like.device, dtype=like.dtype)
    model.train(training)
    return True


def move_to_tp_position(model: torch.nn.Module) -> None:
    """Have the modules believe the tp position that the groups tell now."""
    module: Any
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            group = module.tp_group
            module.vocab_start_index, module.vocab_end_index = (
                VocabUtility.vocab_range_from_global_vocab_size(
                    module.num_embeddings, group.rank(), group.size()
                )
            )
        elif hasattr(module, "tp_rank") and hasattr(module, "_tp_group"):
            # Megatron-Core's layers on top of Transformer Engine's.
            module.tp_rank = module._tp_group.rank()
        elif isinstance(module, MoELayer):
            dispatcher = module.token_dispatcher
            dispatcher.tp_rank = dispatcher.tp_group.rank()


def _models(chunk: DistributedDataParallel) -> list[Any]:
    return [module for module in chunk.modules() if isinstance(module, _MODELS)]
