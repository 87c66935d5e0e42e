"""Checkpoints of a script that names no distributed optimizer, though its job has one.

What the distributed optimizer saves in the fully reshardable format and what the plain optimizers
save are tensors of the same names and shapes. The difference is where the rest stands, what the
float32 masters are called, and that a model in float32 has none (megatron/core/optimizer/
optimizer.py, ``Float16OptimizerWithFloat16Params`` and ``FP32Optimizer``).
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from elaswave_plugin.adapters.megatron.compat.own_ranges import MASTER, own_ranges

# What the metadata of a checkpoint of a distributed optimizer names.
SHARDING, _RESHARDABLE = "distrib_optim_sharding_type", "fully_reshardable"
_STATE, _TYPE = "param_state", "param_state_sharding_type"
_OF_DISTRIBUTED = "optimizer.state.param."
_OF_PLAIN = "optimizer.state.fp32_param."


class PlainCheckpoints:
    """Stands before the sharded state of an optimizer, where the metadata names no sharding."""

    def __init__(self, outer: Any, distributed: DistributedOptimizer) -> None:
        """``outer``: what the script holds, which has ``distributed`` alone."""
        self._distributed, config = distributed, distributed.config
        self._has_masters = bool(config.fp16 or config.bf16)
        self._counts_by_tensor = isinstance(
            distributed.optimizer, torch.optim.Adam | torch.optim.AdamW
        )
        self._save, self._load = outer.sharded_state_dict, outer.load_state_dict
        outer.sharded_state_dict = self.sharded_state_dict
        outer.load_state_dict = self.load_state_dict

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Any,
        is_loading: bool = False,
        metadata: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Any:
        """Return the state for a checkpoint, to be saved or to be loaded into."""
        native = dict(metadata or {})
        is_plain = SHARDING not in native
        if is_plain:
            native[SHARDING] = _RESHARDABLE
        state = self._save(model_sharded_state_dict, is_loading, metadata=native, **more)
        if is_plain:
            for tensors in state[_STATE].values():
                # A worker that has no place, or no range, has something else there.
                if isinstance(tensors, MutableMapping):
                    self._rename_master(tensors)
            state = self._as_plain(state)
        return state

    def load_state_dict(self, state: Any) -> None:
        """Load what a checkpoint brought into the state above."""
        is_plain = isinstance(state, Mapping) and _STATE in state and _TYPE not in state
        self._load(self._as_distributed(state) if is_plain else state)

    def _rename_master(self, tensors: MutableMapping[str, Any]) -> None:
        """In float32 the weights are the masters, which nobody saves twice."""
        for place in [one for one in tensors if one.startswith(f"{MASTER} ")]:
            master = tensors.pop(place)
            if self._has_masters:
                name = master.key.removeprefix(_OF_DISTRIBUTED)
                tensors[place] = replace(master, key=_OF_PLAIN + name)

    def _as_plain(self, state: MutableMapping[str, Any]) -> dict[str, Any]:
        groups = state["optimizer"]["param_groups"]
        inner: dict[str, Any] = {"param_groups": groups, "state": {}}
        if self._counts_by_tensor:
            steps = [group.pop("step") for group in groups]
            if steps[0]:
                inner["state"]["common_step"] = torch.tensor(float(steps[0]))
        if not self._has_masters:
            return {**inner, _STATE: state[_STATE]}
        scaler = {"grad_scaler": state["grad_scaler"]} if "grad_scaler" in state else {}
        return {"optimizer": inner, **scaler, _STATE: state[_STATE]}

    def _as_distributed(self, state: Mapping[str, Any]) -> dict[str, Any]:
        inner = state["optimizer"] if self._has_masters else state
        groups = [dict(group) for group in inner["param_groups"]]
        if self._counts_by_tensor:
            step = float(inner.get("state", {}).get("common_step", 0))
            groups = [{**group, "step": step} for group in groups]
        if not self._has_masters:
            # Weights are loaded before the optimizer is.
            for index, (weight, own) in enumerate(own_ranges(self._distributed)):
                state[_STATE][index][f"{MASTER} 0"] = weight.detach().flatten()[own]
        scaler = {"grad_scaler": state["grad_scaler"]} if "grad_scaler" in state else {}
        return {
            "optimizer": {"param_groups": groups},
            **scaler,
            _STATE: state[_STATE],
            _TYPE: _RESHARDABLE,
        }
