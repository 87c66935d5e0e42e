"""The facts that the launch of a TP x PP x DP job fixes: its layout, and each stage's contents."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from elaswave_plugin.adapters.megatron.framework import MegatronFramework
from elaswave_plugin.adapters.megatron.state import buffers
from elaswave_plugin.adapters.megatron.state.frozen import frozen_names
from elaswave_plugin.adapters.megatron.state.layer_units import unit_lengths
from elaswave_plugin.adapters.megatron.step.link_probe import measure_link
from elaswave_plugin.adapters.megatron.step.weight_gradients import why_whole_backward
from elaswave_plugin.adapters.megatron.sums.tied_embeddings import TiedWeight, find_tied_weight
from elaswave_plugin.adapters.megatron.unsupported import check_grid, why_whole_pieces
from elaswave_plugin.config import ElasticConfig, parse_clocks
from elaswave_plugin.core.layout.layout import ParallelLayout, launch_layout
from elaswave_plugin.core.planner.costs import StateBytes, within_memory
from elaswave_plugin.core.planner.dvfs import ClockTable
from elaswave_plugin.core.planner.pipeline_flow import SplitBackward, flow_of
from elaswave_plugin.core.recovery_plan.placement import GridPlacement
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.recovery.clocks import clocks_for
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.values.plain import gathered


class Stage(NamedTuple):
    """One pipeline stage's contents: elements by unit, the shared embedding, optimizer groups.

    ``whole``: why its backwards cannot be split, if so. ``element_bytes``: of weights, gradients
    and optimizer state; ``device_bytes``: what its GPU has for the job, 0 on a CPU; ``frozen``: the
    weights that are not trained; why layers and workers stay, if so.
    """

    stage: int
    units: dict[int, int]
    tied: TiedWeight | None
    groups: dict[str, int]
    whole: str | None
    element_bytes: tuple[int, int, int]
    device_bytes: int
    frozen: tuple[str, ...]
    why_layers_stay: str | None
    why_workers_stay: str | None


class Grid:
    """The facts that the launch fixes for the whole job, alike on every worker."""

    def __init__(
        self,
        worker: Worker,
        framework: MegatronFramework,
        *,
        num_microbatches: int,
        micro_batch_size: int,
        why_whole: str | None,
    ) -> None:
        """Collective over WORLD; raises ConfigurationError for what is carried in DP jobs only.

        ``why_whole``: why the script gives whole micro-batches only, if so.
        """
        chunks = framework.chunks
        check_grid(chunks[0].config)
        self.layout = launch_layout(
            tp=parallel_state.get_tensor_model_parallel_world_size(),
            pp=parallel_state.get_pipeline_model_parallel_world_size(),
            dp=parallel_state.get_data_parallel_world_size(),
            num_layers=chunks[0].config.num_layers,
            vpp=len(chunks),
            reserve=worker.spare_width,
        )
        _check_layers(chunks, self.layout)
        stages = _stages(worker, framework)
        for one in stages:
            framework.shard.group_of.update(one.groups)
        framework.frozen_names = frozenset(name for one in stages for name in one.frozen)
        layers_stay = next((one.why_layers_stay for one in stages if one.why_layers_stay), None)
        workers_stay = next((one.why_workers_stay for one in stages if one.why_workers_stay), None)
        self.tied = {one.stage: one.tied for one in stages if one.tied is not None}
        work: dict[str, Any] = {
            "num_microbatches": num_microbatches,
            "micro_batch_size": micro_batch_size,
            "policy": worker.config.dataflow,
            "may_resize": _resizes(
                worker.config, why_whole or why_whole_pieces(chunks), micro_batch_size
            ),
        }
        gpu = _gpu_of(chunks[0])
        units = {unit: length for one in stages for unit, length in one.units.items()}
        state = _state(worker.config, stages, units, self.layout)
        room = _activation_room(worker.config, self.layout, on_gpu=gpu is not None)
        work["activation_room"] = room
        whole = next((one.whole for one in stages if one.whole), None)
        work["split_backward"] = _split_backward(worker.config, whole)
        work |= _clock_limits(worker.config, workers=len(self.layout.workers) + worker.reserve)
        self.deal = partial(within_memory, state, flow_of, **work)
        partition = None
        if _moves_layers(worker.config, layers_stay, num_stages=len(self.layout.stages)):
            partition = partial(
                self.deal, launch_cuts=self.layout.cuts, move_workers=workers_stay is None
            )
        self.placement = GridPlacement.at_launch(
            self.layout,
            groups=worker.groups_at_launch(),
            units=units,
            partition=partition,
            why_workers_stay=workers_stay,
            why_layers_stay=_why_layers_stay(worker.config, layers_stay),
        )
        worker.stopwatch.clocks = clocks_for(worker.config, gpu)
        if gpu is None and not worker.detached:
            worker.stopwatch.times.link_rate = measure_link()


def _stages(worker: Worker, framework: MegatronFramework) -> list[Stage]:
    """Gather each stage's contents from its workers; a newcomer reads its predecessor's record."""
    mine = Stage(
        parallel_state.get_pipeline_model_parallel_rank(),
        unit_lengths(framework.chunks),
        find_tied_weight(framework.chunks),
        framework.shard.group_of,
        why_whole_backward(framework.chunks),
        element_bytes(framework.chunks[0]),
        _device_bytes(framework.chunks[0]),
        frozen_names(framework.chunks),
        framework.why_layers_stay(),
        framework.why_workers_stay(),
    )
    told = mine._asdict() | {"tied": mine.tied and tuple(mine.tied)}
    everyone = [_job_constants(Stage(**one)) for one in gathered(told)]
    if worker.detached:
        return [_job_constants(Stage(*one)) for one in worker.job_constants["stages"]]
    least = min(one.device_bytes for one in everyone)
    several: dict[int, list[Stage]] = {}
    for one in everyone:
        several.setdefault(one.stage, []).append(one)
    stages = [
        # Of the weights, a tp position knows its own part.
        of_stage[-1]._replace(
            device_bytes=least,
            frozen=tuple(sorted({name for one in of_stage for name in one.frozen})),
        )
        for of_stage in several.values()
    ]
    worker.remember(stages=[[*one[:1], list(one.units.items()), *one[2:]] for one in stages])
    return stages


def _job_constants(told: Stage) -> Stage:
    """A stage as JSON has told it."""
    return told._replace(
        units=dict(told.units),
        tied=None if told.tied is None else TiedWeight(*told.tied),
        frozen=tuple(told.frozen),
    )


def element_bytes(chunk: DistributedDataParallel) -> tuple[int, int, int]:
    """Of weights and gradients on every worker, and of the optimizer state that they share.

    Adam has two moments in float32, and masters where weights are kept in fewer bits.
    """
    buffer = chunk.buffers[0]
    weights, gradients = buffer.param_dtype.itemsize, buffer.grad_dtype.itemsize
    float_bytes = torch.float32.itemsize
    return weights, gradients, (2 if weights == float_bytes else 3) * float_bytes


def _device_bytes(chunk: DistributedDataParallel) -> int:
    """Return the bytes of a chunk's GPU that this process uses or that are free; 0 on a CPU."""
    device = next(chunk.parameters()).device
    if device.type != "cuda":
        return 0
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def _state(
    config: ElasticConfig, stages: Sequence[Stage], units: dict[int, int], layout: ParallelLayout
) -> StateBytes:
    return state_bytes(
        config,
        units,
        element_bytes=stages[0].element_bytes,
        largest=max(sum(one.units.values()) for one in stages),
        width=layout.dp,
        device_bytes=stages[0].device_bytes,
    )


def state_bytes(
    config: ElasticConfig,
    units: dict[int, int],
    *,
    element_bytes: tuple[int, int, int],
    largest: int,
    width: int,
    device_bytes: int = 0,
) -> StateBytes:
    """Build a plan's byte counts; raises ConfigurationError for a limit below the launch's need.

    ``largest``: elements of the worker that has most; ``width``: workers at launch that have them.
    """
    weight_bytes, gradient_bytes, optimizer_bytes = element_bytes
    limit_bytes: float = device_bytes or float("inf")
    if config.memory_limit_gib is not None:
        limit_bytes = config.memory_limit_gib * 2**30
    state = StateBytes(
        units=units,
        weight_bytes=weight_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=optimizer_bytes,
        limit_bytes=limit_bytes,
        is_estimate=config.memory_limit_gib is None,
    )
    needed = state.held_bytes(largest, width=width)
    if config.memory_limit_gib is not None and needed > limit_bytes:
        raise ConfigurationError(
            f"memory_limit_gib is {config.memory_limit_gib:.3g}, and weights, gradients and"
            f" optimizer state of a worker take {needed / 2**30:.3g} GiB at launch; wanted"
            " more than that, or leave it out"
        )
    return state


def _check_layers(chunks: Sequence[DistributedDataParallel], layout: ParallelLayout) -> None:
    spans = layout.layers(parallel_state.get_pipeline_model_parallel_rank())
    wanted = [number for start, stop in spans for number in range(start + 1, stop + 1)]
    numbers = list(buffers.layer_numbers(chunks))
    # The one stage of a job without others may have several rows of layers, as T5 has.
    if len(layout.stages) > 1 and numbers != wanted:
        raise ConfigurationError(
            f"this stage has the layers {numbers}, wanted {wanted}; give every pipeline stage the"
            " same number of layers"
        )


def _clock_limits(config: ElasticConfig, *, workers: int) -> dict[str, Any]:
    """Return a plan's choice of clocks; raises ConfigurationError for a cap below clock 1.

    ``workers``: the most that there may be.
    """
    if config.clocks == "off":
        return {}
    table = ClockTable(clocks=parse_clocks(config.clock_table))
    needed_w = workers * table.watts(1.0)
    cap_w = needed_w if config.power_cap_w is None else config.power_cap_w
    if needed_w > cap_w:
        raise ConfigurationError(
            f"power_cap_w is {cap_w:g}, and {workers} workers draw {needed_w:g} W at clock 1;"
            " wanted at least that, or leave it out"
        )
    return {"clocks": table, "power_cap_w": cap_w}


def _resizes(config: ElasticConfig, why_whole: str | None, micro_batch_size: int) -> bool:
    """Return whether auto may cut micro-batches; raises ConfigurationError if resize cannot."""
    if config.loss in ("samples", "sum"):
        why_whole = why_whole or f"loss is {config.loss}, and parts are added up by their tokens"
    if why_whole and config.dataflow == "resize":
        raise ConfigurationError(
            f"dataflow is resize, and micro-batches cannot be cut here: {why_whole}; set dataflow"
            " to auto"
        )
    return config.consistency == "fast" and micro_batch_size > 1 and not why_whole


def _activation_room(
    config: ElasticConfig, layout: ParallelLayout, *, on_gpu: bool
) -> float | None:
    """Return a worker's limit as a multiple of the first stage's at launch; None: by its slots."""
    if config.activation_room is not None and layout.vpp > 1:
        raise ConfigurationError(
            f"activation_room is {config.activation_room:g}, and the pipeline is interleaved (vpp"
            f" {layout.vpp}), whose one order of operations holds what it holds; leave it out"
        )
    deals = config.dataflow in ("auto", "redeal")
    if config.activation_room is None and on_gpu and deals and layout.vpp == 1:
        return 1.0
    return config.activation_room


def _split_backward(config: ElasticConfig, why_whole: str | None) -> SplitBackward:
    """Return whether weight gradients go apart; raises ConfigurationError if "always" cannot."""
    if why_whole and config.split_backward == "always":
        raise ConfigurationError(
            f"split_backward is always, and backwards cannot be split here: {why_whole}; leave it"
            " out"
        )
    return "never" if why_whole else config.split_backward


def _gpu_of(chunk: DistributedDataParallel) -> str | None:
    """The UUID of the GPU that holds a chunk; None on a CPU."""
    device = next(chunk.parameters()).device
    if device.type != "cuda":
        return None
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _why_layers_stay(config: ElasticConfig, why_not: str | None) -> str | None:
    """Say why no layer changes stage, not even on request; None where layers can."""
    return "move_layers is never" if config.move_layers == "never" else why_not


def _moves_layers(config: ElasticConfig, why_not: str | None, *, num_stages: int) -> bool:
    """Return whether losses move layers; raises ConfigurationError if "always" cannot."""
    if num_stages == 1:
        why_not = "there is one pipeline stage"
    if why_not and config.move_layers == "always":
        raise ConfigurationError(
            f"move_layers is always, and layers cannot change stage here: {why_not}; leave it out"
        )
    return config.moves_layers and not why_not
