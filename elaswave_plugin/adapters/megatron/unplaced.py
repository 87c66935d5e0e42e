"""What a worker without a place in the layout saves: nothing, in the shape of what others save.

It holds tensors of an earlier step. But it may be rank 0, and rank 0 saves what all have alike.
"""

from collections.abc import Callable
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase

# What makes the shards of the optimizer's state, in each of the formats.
_PARAM_STATE = "sharded_param_state_"


def save_no_shards(part: Any, *, while_unplaced: Callable[[], bool]) -> None:
    """A model or optimizer: shards keep their place in what it gives to a checkpoint, unsaved."""
    native = part.sharded_state_dict

    def sharded_state_dict(*args: Any, **kwargs: Any) -> Any:
        state = native(*args, **kwargs)
        return dict_list_map_inplace(_unsaved, state) if while_unplaced() else state

    part.sharded_state_dict = sharded_state_dict


def make_no_shards(distributed_optimizer: Any, *, while_unplaced: Callable[[], bool]) -> None:
    """It looks its parameters up in the model's shards, and finds none there."""
    for name in dir(distributed_optimizer):
        if name.startswith(_PARAM_STATE):
            native = getattr(distributed_optimizer, name)
            setattr(distributed_optimizer, name, _unless_unplaced(native, while_unplaced))


def _unless_unplaced(
    native: Callable[..., Any], while_unplaced: Callable[[], bool]
) -> Callable[..., Any]:
    def sharded_param_state(*args: Any, **kwargs: Any) -> Any:
        return {"none": _nothing()} if while_unplaced() else native(*args, **kwargs)

    return sharded_param_state


def _unsaved(leaf: Any) -> Any:
    return _nothing() if isinstance(leaf, ShardedBase) else leaf


def _nothing() -> LocalNonpersistentObject:
    return LocalNonpersistentObject(None)
