"""A worker without a place in the layout: a script learns the job's sizes there, and saves nothing.

What it gives to a checkpoint has the shape of what others save.
"""

from collections.abc import Callable
from typing import Any

from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase

from elaswave_plugin.around import around

_NO_RANK = -1
# What makes the shards of the optimizer's state, in each of the formats.
_PARAM_STATE = "sharded_param_state_"


def answer_for(config: ModelParallelConfig, *, placed: bool) -> None:
    """Have ``parallel_state`` name sizes of the job, and no first and last worker without a place.

    Its groups have that worker alone: it would be the first of all kinds, in a job without stages.
    What a script keeps of that, as Megatron-LM's train() does the schedule, it has in its place.
    """
    rank, tp, pp = None, None, None
    if not placed:
        rank = _NO_RANK
        tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    parallel_state.set_data_parallel_rank(rank)
    parallel_state.set_pipeline_model_parallel_rank(rank)
    parallel_state.set_tensor_model_parallel_world_size(tp)
    parallel_state.set_pipeline_model_parallel_world_size(pp)


def save_no_shards(part: Any, *, while_unplaced: Callable[[], bool]) -> None:
    """A model or optimizer: shards keep their place in what it gives to a checkpoint, unsaved."""

    def sharded_state_dict(native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        state = native(*args, **kwargs)
        return dict_list_map_inplace(_unsaved, state) if while_unplaced() else state

    part.sharded_state_dict = around(sharded_state_dict)(part.sharded_state_dict)


def load_no_weights(model: Any, *, while_unplaced: Callable[[], bool]) -> None:
    """A model: nothing of a checkpoint is its own, so that nothing of it is missing either."""

    def load_state_dict(native: Callable[..., Any], state: Any, *args: Any, **kwargs: Any) -> Any:
        if while_unplaced():
            return native({}, strict=False)
        return native(state, *args, **kwargs)

    model.load_state_dict = around(load_state_dict)(model.load_state_dict)


def make_no_shards(distributed_optimizer: Any, *, while_unplaced: Callable[[], bool]) -> None:
    """It looks its parameters up in the model's shards, and finds none there."""

    def sharded_param_state(native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return {"none": _nothing()} if while_unplaced() else native(*args, **kwargs)

    for name in dir(distributed_optimizer):
        if name.startswith(_PARAM_STATE):
            native = getattr(distributed_optimizer, name)
            setattr(distributed_optimizer, name, around(sharded_param_state)(native))


def _unsaved(leaf: Any) -> Any:
    return _nothing() if isinstance(leaf, ShardedBase) else leaf


def _nothing() -> LocalNonpersistentObject:
    return LocalNonpersistentObject(None)
