"""A TP x PP x DP job: its layout at launch, and what modules cache of their tp position."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.utils import VocabUtility

from elaswave_plugin.adapters.megatron import buffers
from elaswave_plugin.adapters.megatron.refuse import check_grid
from elaswave_plugin.adapters.megatron.tied_embeddings import TiedWeight, find_tied_weight
from elaswave_plugin.adapters.megatron.units import unit_lengths
from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.core.layout import ParallelLayout, launch_layout
from elaswave_plugin.core.pipeline_flow import flow_of, level_layers
from elaswave_plugin.core.seating import GridSeating
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.runtime.worker import Worker


class Grid:
    """What the launch fixed for the whole job, alike on every worker."""

    def __init__(
        self,
        worker: Worker,
        chunks: Sequence[DistributedDataParallel],
        *,
        num_microbatches: int,
        why_layers_stay: str | None,
    ) -> None:
        """Collective over WORLD; raises ConfigurationError for what is carried in DP jobs only.

        ``why_layers_stay``: the reason why no layer can change stage; None where they can.
        """
        check_grid(chunks[0].config, native_groups=worker.groups.has_native_groups)
        self.layout = launch_layout(
            tp=parallel_state.get_tensor_model_parallel_world_size(),
            pp=parallel_state.get_pipeline_model_parallel_world_size(),
            dp=parallel_state.get_data_parallel_world_size(),
            num_layers=chunks[0].config.num_layers,
            vpp=len(chunks),
        )
        _check_layers(chunks, self.layout)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        mine = stage, unit_lengths(chunks), find_tied_weight(chunks)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        if worker.alone:
            everyone = _read_stages(worker.remembered["stages"])
        else:
            worker.remember(stages=_write_stages(everyone))
        self.tied: dict[int, TiedWeight] = {s: tied for s, _, tied in everyone if tied is not None}
        policy = worker.config.dataflow
        partition = None
        if _moves_layers(worker.config, why_layers_stay):
            partition = partial(
                level_layers,
                launch_cuts=self.layout.cuts,
                num_microbatches=num_microbatches,
                policy=policy,
            )
        self.seating = GridSeating.at_launch(
            self.layout,
            groups=worker.groups.members(),
            units={unit: length for _, units, _ in everyone for unit, length in units.items()},
            partition=partition,
        )
        self.deal = partial(flow_of, num_microbatches=num_microbatches, policy=policy)


def move_to_tp_position(model: torch.nn.Module) -> None:
    """Have the modules believe the tp position that the groups tell now; weights come later."""
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            group = module.tp_group
            module.vocab_start_index, module.vocab_end_index = (
                VocabUtility.vocab_range_from_global_vocab_size(
                    module.num_embeddings, group.rank(), group.size()
                )
            )


def _check_layers(chunks: Sequence[DistributedDataParallel], layout: ParallelLayout) -> None:
    spans = layout.layers(parallel_state.get_pipeline_model_parallel_rank())
    wanted = [number for start, stop in spans for number in range(start + 1, stop + 1)]
    numbers = list(buffers.layer_numbers(chunks))
    if numbers != wanted:
        raise ConfigurationError(
            f"this stage has the layers {numbers}, wanted {wanted}; give every pipeline stage the"
            " same number of layers"
        )


def _moves_layers(config: ElasticConfig, why_not: str | None) -> bool:
    """Whether layers change stage after a loss; raises ConfigurationError where they have to."""
    if why_not and config.move_layers == "always":
        raise ConfigurationError(
            f"move_layers is always, and layers cannot change stage here: {why_not}; leave it out"
        )
    return config.moves_layers and not why_not


Stage = tuple[int, dict[int, int], TiedWeight | None]


def _write_stages(everyone: Sequence[Stage]) -> list[Any]:
    """What each stage holds, once, as JSON can carry it."""
    by_stage = {stage: [stage, list(units.items()), tied] for stage, units, tied in everyone}
    return [by_stage[stage] for stage in sorted(by_stage)]


def _read_stages(written: list[Any]) -> list[Stage]:
    """What `_write_stages` wrote."""
    return [
        (stage, dict(units), None if tied is None else TiedWeight(*tied))
        for stage, units, tied in written
    ]
