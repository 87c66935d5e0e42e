"""DeepSpeed's grid of stages and pipelines: made over our groups, then edited in place.

A `PipelineModule` makes its groups before the configuration is known, and so before the job's
communicator is there. Source: deepspeed/runtime/pipe/topology.py and module.py.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from deepspeed import comm
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe.topology import PipelineParallelGrid

from elaswave_plugin.core.recovery_plan.replica_placement import Replica


def launch_replicas(module: Any, launch_slots: Sequence[int]) -> tuple[Replica, ...]:
    """The pipelines that the module was made for; ``launch_slots`` are the slots by rank."""
    topology = module.topology()
    stages, width = topology.get_dim("pipe"), topology.get_dim("data")
    return tuple(
        tuple(launch_slots[topology.get_rank(pipe=stage, data=replica)] for stage in range(stages))
        for replica in range(width)
    )


def make_groups_again(module: Any) -> None:
    """The module's groups, on the WORLD that is there now (collective)."""
    module.world_group = comm.new_group(ranks=range(comm.get_world_size()))
    module._grid = PipelineParallelGrid(process_group=module.world_group, topology=module._topo)
    module.tied_comms = module._index_tied_modules()


def edit_grid(module: Any, replicas: Sequence[Sequence[int]]) -> None:
    """Have the module and its grid know ``replicas``: the rank at each stage of each pipeline.

    Group handles need nothing: the groups were edited in place.
    """
    topology = _with_places(module._topo, replicas)
    grid, rank = module._grid, dist.get_rank()
    place = topology.get_coord(rank)
    module._topo = grid._topo = topology
    module.global_rank = grid.global_rank = rank
    module.world_size = grid.world_size = topology.world_size()
    grid.data_parallel_size = len(replicas)
    grid.data_parallel_id = place.data
    grid.dp_groups = topology.get_axis_comm_lists("data")
    grid.dp_group = next(ranks for ranks in grid.dp_groups if rank in ranks)
    grid.pipe_groups = topology.get_axis_comm_lists("pipe")
    grid.pp_group = next(ranks for ranks in grid.pipe_groups if rank in ranks)
    grid.p2p_groups = [
        [one, ranks[(order + 1) % len(ranks)]]
        for ranks in grid.pipe_groups
        for order, one in enumerate(ranks)
    ]
    grid.slice_group = [rank]
    for spec in module._layer_specs:
        if isinstance(spec, LayerSpec):
            spec.global_rank = rank
    for tied in module.tied_comms.values():
        tied["ranks"] = dist.get_process_group_ranks(tied["group"])


def _with_places(launched: Any, replicas: Sequence[Sequence[int]]) -> Any:
    """The topology with other pipelines, whose ranks may have any order."""
    topology = copy.copy(launched)
    sizes = {"pipe": len(replicas[0]), "data": len(replicas)}
    topology.dims = [sizes[axis] for axis in topology.axes]
    topology.mapping = {
        topology.ProcessCoord(**{"pipe": stage, "data": order}): rank
        for order, replica in enumerate(replicas)
        for stage, rank in enumerate(replica)
    }
    return topology
