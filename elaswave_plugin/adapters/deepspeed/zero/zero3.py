"""ZeRO stage 3: every parameter is cut over all workers, weights as well as optimizer state.

A parameter of L elements is padded to a multiple of n and cut into n equal partitions; the masters
of a sub-group are its partitions one after the other (deepspeed/runtime/zero, stage3.py and
partition_parameters.py).
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partition_parameters import free_param

from elaswave_plugin.adapters.deepspeed.compat.patches import constructor_arguments
from elaswave_plugin.adapters.deepspeed.zero import zero_state
from elaswave_plugin.adapters.deepspeed.zero.zero3_external import agree_on_external
from elaswave_plugin.adapters.deepspeed.zero.zero3_frozen import FrozenWeights
from elaswave_plugin.adapters.deepspeed.zero.zero3_partitions import cut_again
from elaswave_plugin.tracking.state_dump import NamedPiece

# Autograd functions and counters that DeepSpeed keeps on modules and makes only where absent: those
# of a former layout would drive the former coordinator (parameter_offload.py, pre_bwd_fn).
_CACHED_ON_MODULES = (
    "pre_bwd_fn",
    "post_bwd_fn",
    "applied_pre_backward_ref_cnt",
    "ds_grads_remaining",
)
# What the hooks on the gradients of an unchanged object need; they stay where they are.
_HOOKS = ("_grad_acc_hooks", "_leaf_module_hooks", "leaf_parameters")
_MAKES_HOOKS = "create_reduce_and_remove_grad_hooks"


class PartitionedWeightsState(zero_state.ZeroState):
    """The partitions of a ``DeepSpeedZeroOptimizer_Stage3``."""

    def __init__(self, engine: Any) -> None:
        self._zero = engine.optimizer
        inner = self._zero.optimizer
        # Kept here, since a loss may interrupt the constructor when it runs again.
        self._arguments = constructor_arguments(self._zero)
        self._groups: list[list[Any]] = [[] for _ in inner.param_groups]
        for order, params in enumerate(self._zero.fp16_groups):
            self._groups[self._zero.sub_group_to_group_id[order]].extend(params)
        super().__init__(engine, inner, [param for group in self._groups for param in group])
        trained = {id(param) for param in self.params}
        self._frozen = FrozenWeights(
            param for param in engine.module.parameters() if id(param) not in trained
        )
        self._order = FetchOrder()
        self._hooks = {
            name: getattr(self._zero, name) for name in _HOOKS if hasattr(self._zero, name)
        }

    @property
    def _masters(self) -> list[torch.Tensor]:
        return self._zero.fp32_partitioned_groups_flat

    def lengths(self) -> tuple[int, ...]:
        """Elements of each parameter, in the order of the groups."""
        return tuple(param.ds_numel for param in self.params)

    def drop(self) -> None:
        """Release what an interrupted forward or backward pass had gathered."""
        if "parameter_offload" in self._zero.__dict__:
            self._order.keep(self._zero.parameter_offload)
        parameter_offload.FWD_MODULE_STACK.clear()
        self._engine.module.ds_inflight_param_registry.clear()
        for param in self._engine.module.parameters():
            param.grad = None
            param.ds_active_sub_modules.clear()
            free_param(param)

    def recut(self) -> None:
        """Cut every parameter again, and run the constructor of the same object again."""
        optimizer, inner = self._zero, self._inner
        args, kwargs = self._arguments
        if "parameter_offload" in optimizer.__dict__:
            optimizer.parameter_offload.destroy()
        self._forget_modules()
        cut_again(self.params)
        self._frozen.recut()
        inner.state.clear()
        for group, params in zip(inner.param_groups, self._groups, strict=True):
            group["params"] = list(params)
        optimizer.__dict__.clear()
        # Making the hooks again gathers every parameter, one after the other.
        optimizer.__dict__[_MAKES_HOOKS] = lambda: None
        optimizer.__init__(*args, **kwargs)
        del optimizer.__dict__[_MAKES_HOOKS]
        optimizer.__dict__.update(self._hooks)
        if self._engine._support_torch_style_backward:
            optimizer.register_grad_acc_post_hook(self._engine._backward_post_hook)

    def _forget_modules(self) -> None:
        register = parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module
        # The count of modules is a default argument that never goes back; a newcomer starts at 0.
        register.__defaults__[0][0] = 0
        for module in self._engine.module.modules():
            for name in _CACHED_ON_MODULES:
                module.__dict__.pop(name, None)
            module._parameters = module.__dict__.get("_original_parameters", module._parameters)

    def write_weights(self, masters: torch.Tensor) -> None:
        """Install the masters; the 16-bit partitions follow them."""
        zero_state.write_masters(self._inner, self._masters, masters)
        for master, weights in zip(
            self._masters, self._zero.fp16_partitioned_groups_flat, strict=True
        ):
            weights.data.copy_(master.detach())

    def sync_weights(self) -> Iterator[torch.Tensor]:
        """Gather the parameters that stay whole; the others are gathered where they are used."""
        persistent = self._zero.persistent_parameters
        for param in persistent:
            # What is there already would not be gathered.
            free_param(param)
        if persistent:
            persistent[0].all_gather(persistent)
        for param in persistent:
            yield param.detach().reshape(-1)

    def share(self) -> None:
        """Have the weights that are not trained, whole, on each node."""
        self._frozen.share()

    def resume(self) -> None:
        """Fetch what the passes before the change have used, ahead and in their order."""
        agree_on_external(self._engine.module)
        self._order.give(self._zero.parameter_offload)

    def named_pieces(self) -> Iterator[NamedPiece]:
        """This worker's partition of every parameter."""
        rank = dist.get_rank()
        for master, params in zip(self._masters, self._zero.fp16_groups, strict=True):
            offset = 0
            for param in params:
                size = param.ds_tensor.ds_numel
                start = rank * size
                real = max(0, min(size, param.ds_numel - start))
                for part, data in self.parts_of(master).items():
                    if real:
                        yield NamedPiece(
                            name=self._engine.param_names[param],
                            part=part,
                            start=start,
                            numel=param.ds_numel,
                            data=data[offset : offset + real],
                        )
                offset += size


# Private to their class: that a record is complete, and what it consists of.
_MODE, _MODULES, _USES = (
    f"_PartitionedParameterCoordinator__{name}"
    for name in ("trace_mode", "submodule_order", "param_order")
)


class FetchOrder:
    """The order in which ZeRO-3 fetches parameters, carried over a change of the layout.

    DeepSpeed's coordinator records in one pass which module follows which, and from then on fetches
    ahead and keeps what is used again soon (partitioned_param_coordinator.py). The order has
    nothing to do with the number of workers. A coordinator without it gathers each parameter when
    it is needed and compares its record between the workers. Here is the last complete record that
    this worker has seen; none before the first.
    """

    def __init__(self) -> None:
        self._record: dict[str, Any] = {}

    def keep(self, offload: Any) -> None:
        """Keep the record of a ``DeepSpeedZeRoOffload``, if it is complete."""
        coordinator = offload.get_param_coordinator()
        if coordinator.is_complete_trace():
            self._record = {name: getattr(coordinator, name) for name in (_MODE, _MODULES, _USES)}

    def give(self, offload: Any) -> None:
        """Give the record to a new offload (collective over WORLD).

        Only if everyone has the same one: a loss may have come when some had completed it and
        others had not, and a worker that comes later has none. The coordinator stays the new one:
        what an old one has derived from its record depends on how far its worker had come.
        """
        mine = self._digest()
        extremes = torch.tensor([mine, -mine], dtype=torch.int64)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        largest, smallest = int(extremes[0]), -int(extremes[1])
        if largest == smallest != 0:
            vars(offload.get_param_coordinator()).update(self._record)

    def _digest(self) -> int:
        """Of the record, alike on every worker that has the same; 0 of none."""
        if not self._record:
            return 0
        modules = [module.ds_id for module in self._record[_MODULES]]
        uses = [(use.param.ds_id, use.step_id_last_used_at) for use in self._record[_USES]]
        return (xxhash.xxh3_64_intdigest(repr((modules, uses)).encode()) >> 1) | 1
