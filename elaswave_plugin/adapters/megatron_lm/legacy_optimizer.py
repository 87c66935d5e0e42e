"""The optimizer's state in checkpoints of the format torch, of each stage and TP position.

A script that names the distributed optimizer has a second file, distrib_optim.pt, with a flat
tensor for each buffer of gradients as Megatron-Core lays it out at the launch (megatron/core/
optimizer/distrib_optimizer.py, ``get_parameter_state_dp_zero``). One that names none has the state
of a plain optimizer beside the weights (optimizer.py, ``FP32Optimizer.state_dict`` and that of
``Float16OptimizerWithFloat16Params``).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from elaswave_plugin.adapters.megatron.state import adam, whole_state
from elaswave_plugin.adapters.megatron.state.optimizer_state import FlatShard
from elaswave_plugin.adapters.megatron.state.whole_state import MASTER, PARTS, Whole
from elaswave_plugin.core.layout.shards import MOMENTS
from elaswave_plugin.errors import CheckpointUnreadableError

_NUMEL, _MASTERS = "numel_unpadded", "fp32_from_fp16_params"


class LegacyOptimizer:
    """Stands before what an optimizer gives to, and takes from, checkpoints of the format torch."""

    _shard: FlatShard

    def __init__(self, outer: Any, distributed: DistributedOptimizer, *, is_named: bool) -> None:
        """Remember how Megatron-Core has laid out its buffers; comes before that is changed.

        ``is_named``: whether the script names the distributed optimizer.
        """
        self._distributed, self._is_named = distributed, is_named
        self._has_masters = bool(distributed.config.fp16 or distributed.config.bf16)
        self._layout = [_positions(buffer) for buffer in distributed.buffers]
        self._whole: dict[torch.nn.Parameter, Whole] | None = None
        self._load = outer.load_state_dict
        outer.load_state_dict = self.load_state_dict
        outer.load_parameter_state = self.load_parameter_state
        outer.save_parameter_state = self.save_parameter_state
        if not is_named:
            outer.state_dict = self.state_dict

    def bind(self, shard: FlatShard) -> None:
        """Read and write this shard from now on."""
        self._shard = shard

    def gather(self) -> None:
        """Put together what the next save writes; collective over the replicas of a stage."""
        distributed, found = self._distributed, dict[torch.nn.Parameter, Whole]()
        is_first = distributed.data_parallel_group.rank() == 0
        for param in self._shard.params:
            piece = whole_state.own_piece(distributed, param)
            whole = whole_state.whole_of(distributed, param, piece)
            found[param] = {part: one.cpu() for part, one in whole.items()} if is_first else {}
        self._whole = found if is_first else None

    # ---- a plain optimizer ----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the plain optimizer, as it was gathered."""
        assert self._whole is not None
        inner, groups = self._distributed.optimizer, []
        state: dict[int, dict[str, torch.Tensor]] = {}
        step = adam.applied_steps(inner)
        for params, group in zip(self._shard.groups, inner.param_groups, strict=True):
            ids = range(len(state), len(state) + len(params))
            for number, param in zip(ids, params, strict=True):
                moments = {n: self._whole[param][n].view(param.shape) for n in MOMENTS}
                state[number] = adam.fresh_state(inner, moments)
                if "step" in state[number]:
                    state[number]["step"] = torch.tensor(float(step))
            groups.append({**group, "params": list(ids)})
        plain = {"state": state if step else {}, "param_groups": groups}
        if not self._has_masters:
            return plain
        masters = [
            [self._whole[param][MASTER].view(param.shape) for param in params]
            for params in self._shard.groups
        ]
        scaler = self._distributed.grad_scaler
        more = {} if scaler is None else {"grad_scaler": scaler.state_dict()}
        return {"optimizer": plain, **more, _MASTERS: masters}

    def load_state_dict(self, state: Any) -> None:
        """Load the state of a plain optimizer; any other goes on to the next."""
        plain = state.get("optimizer", state) if isinstance(state, Mapping) else {}
        if "state" not in plain or "param_state" in state:
            self._load(state)
            return
        self._load_plain(plain, state)

    def _load_plain(self, plain: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        groups, tensors = plain["param_groups"], plain["state"]
        sizes = [len(params) for params in self._shard.groups]
        if [len(group["params"]) for group in groups] != sizes:
            seen = [len(group["params"]) for group in groups]
            raise CheckpointUnreadableError(
                f"the checkpoint's optimizer has groups of {seen} parameters, and the model has "
                f"{sizes}: load it without its optimizer, by --no-load-optim"
            )
        found: dict[torch.nn.Parameter, Whole] = {}
        step = 0.0
        for number, (params, group) in enumerate(zip(self._shard.groups, groups, strict=True)):
            step = max(step, float(group.get("step", 0)))
            for order, (param, name) in enumerate(zip(params, group["params"], strict=True)):
                own = tensors.get(name, {})
                step = max(step, float(own.get("step", 0)))
                found[param] = {part: own[part].float() for part in MOMENTS if part in own}
                if self._has_masters:
                    found[param][MASTER] = state[_MASTERS][number][order].detach().float()
        scaled = self._distributed.grad_scaler
        if scaled is not None and "grad_scaler" in state:
            scaled.load_state_dict(state["grad_scaler"])
        for own, group in zip(self._distributed.optimizer.param_groups, groups, strict=True):
            own.update(
                {key: value for key, value in group.items() if key in own and key != "params"}
            )
        self._install(found, int(step))

    # ---- the distributed optimizer --------------------------------------------------------------

    def save_parameter_state(self, filename: str) -> None:
        """Write distrib_optim.pt on the first replica."""
        if self._whole is None:
            return
        state: dict[Any, Any] = {"buckets_coalesced": True}
        for number, (kind, positions, numel) in enumerate(self._layout):
            flat = {part: torch.zeros(numel, dtype=torch.float32) for part in PARTS}
            for param, start in positions.items():
                for part, values in self._whole[param].items():
                    flat[part][start : start + param.numel()] = values
            state[number] = {kind: {**flat, _NUMEL: numel}}
        torch.save(state, filename)

    def load_parameter_state(self, filename: str, *, update_legacy_format: bool = False) -> None:
        """Read the own pieces of distrib_optim.pt; raises CheckpointUnreadableError."""
        if update_legacy_format:
            raise CheckpointUnreadableError(
                f"{filename} is of a format of before February 2024: convert it once without "
                "--elaswave, by --ckpt-convert-update-legacy-dist-opt-format"
            )
        # The other file has brought tensors in the place of the shard's.
        self._shard.adopt()
        state = torch.load(filename, map_location="cpu", mmap=True, weights_only=True)
        found: dict[torch.nn.Parameter, Whole] = {}
        for number, (kind, positions, numel) in enumerate(self._layout):
            flat = state[number][kind]
            if flat[_NUMEL] != numel:
                raise CheckpointUnreadableError(
                    f"{filename} has {flat[_NUMEL]} elements in buffer {number}, and the job has "
                    f"{numel}: a checkpoint of the format torch is for one number of replicas and "
                    "one --ddp-bucket-size; load it without its optimizer, by --no-load-optim"
                )
            for param, start in positions.items():
                span = slice(start, start + param.numel())
                found[param] = {part: flat[part][span] for part in PARTS}
        self._install(found, adam.applied_steps(self._distributed.optimizer))

    def _install(self, found: dict[torch.nn.Parameter, Whole], step: int) -> None:
        for param, whole in found.items():
            whole_state.install(self._distributed, param, whole)
        self._shard.set_applied_steps(step)


def _positions(buffer: Any) -> tuple[Any, dict[torch.nn.Parameter, int], int]:
    """The dtypes of a buffer, where each parameter begins in it without padding, and its length."""
    lengths: Sequence[int] = [bucket.numel_unpadded for bucket in buffer.buckets]
    shifts = [sum(lengths[:n]) - bucket.offset for n, bucket in enumerate(buffer.buckets)]
    starts = {
        param: start + shifts[bucket]
        for param, (start, _, bucket) in buffer.param_index_map.items()
    }
    return (buffer.param_dtype, buffer.grad_dtype), starts, sum(lengths)
