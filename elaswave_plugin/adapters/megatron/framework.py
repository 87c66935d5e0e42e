"""One model of a job: its DDP chunks, their optimizer, and its scheduler; see `bound_models.py`."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.transformer_layer import TransformerLayer

from elaswave_plugin.adapters.megatron.compat.versions import ask_again
from elaswave_plugin.adapters.megatron.state import (
    buffers,
    free_worker,
    frozen,
    stage_layers,
    stage_parts,
)
from elaswave_plugin.adapters.megatron.state.expert_bias import ExpertBiases, routers
from elaswave_plugin.adapters.megatron.state.global_names import global_names
from elaswave_plugin.adapters.megatron.state.layer_units import units_of
from elaswave_plugin.adapters.megatron.state.open_passes import OpenPasses
from elaswave_plugin.adapters.megatron.state.optimizer_state import FlatShard
from elaswave_plugin.adapters.megatron.state.whole_state import LoadedState
from elaswave_plugin.adapters.megatron.step.layer_timer import watch_passes
from elaswave_plugin.adapters.megatron.step.weight_gradients import add_in_one_sum
from elaswave_plugin.adapters.megatron.sums.kept_sums import KeptSums
from elaswave_plugin.adapters.megatron.sums.reduction import GradientReduction
from elaswave_plugin.adapters.pass_hooks import watch_evaluation
from elaswave_plugin.around import around
from elaswave_plugin.core.planner.pipeline_flow import Flow, PipelineFlow
from elaswave_plugin.core.recovery_plan.plan import RecoveryPlan
from elaswave_plugin.core.step.dataflow import Dataflow, Shares
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.step_state.step_state import digest_of
from elaswave_plugin.tracking.state_dump import NamedPiece
from elaswave_plugin.values.plain import bytes_of, decode, encode
from elaswave_plugin.values.set_within import set_within

# What schedules write into the optimizer's groups.
_SCHEDULED = ("lr", "weight_decay")


def make_room(
    chunks: Sequence[DistributedDataParallel],
    optimizer: DistributedOptimizer,
    config_overrides: Any = None,
    *,
    spare_width: int,
) -> FlatShard:
    """Lay out buffers and optimizer so that every width fits; collective over WORLD.

    The widths up to that of the launch, and ``spare_width`` more.
    With pipeline stages every part of the model that may change its stage gets its own bucket.
    What was loaded into the optimizer, or is loaded afterwards, is kept.
    """
    group = chunks[0].intra_dp_cp_group
    buffers.divide_before_sums(chunks)
    loaded = LoadedState(optimizer)
    for chunk in chunks:
        buffers.lay_out(chunk, list(units_of(chunk).values()), group.size() + spare_width)
        buffers.set_width(chunk, group.size(), group.rank())
    shard = FlatShard(optimizer, config_overrides)
    shard.recut()
    loaded.install(shard.params)
    return shard


class MegatronFramework:
    """The model, optimizer and scheduler of one worker."""

    def __init__(
        self,
        worker: Worker,
        *,
        chunks: Sequence[DistributedDataParallel],
        optimizer: Any,
        distributed_optimizer: DistributedOptimizer,
        scheduler: Any,
        prepare: Callable[[torch.nn.Module], None],
        shard: FlatShard | None = None,
    ) -> None:
        """``prepare`` a module for training: each chunk now, and layers that come later.

        ``shard``: the state as ``make_room`` has cut it, with what was loaded since.
        """
        self._worker = worker
        self.chunks = tuple(chunks)
        self._optimizer, self._scheduler = optimizer, scheduler
        self._distributed = distributed_optimizer
        self.inner_optimizer: torch.optim.Optimizer = distributed_optimizer.optimizer
        """The one of torch, or of its kind, that Megatron-Core's drives."""
        self._applied_steps = 0
        self._timers_of_script: set[Any] = set()
        for config in (*(chunk.config for chunk in self.chunks), distributed_optimizer.config):
            # After a loss workers run other passes, and one without a place none.
            config.barrier_with_L1_time = False
        self.is_placed = True
        """Whether this worker has a part of the model."""
        self.frozen_names = frozenset(frozen.frozen_names(self.chunks))
        """Weights that are not trained, also of other stages where the job tells."""
        self.is_updating = False
        """Whether the optimizer makes its step."""
        self._weights_in_place: frozenset[int] = frozenset()
        self._announce, self._prepare = worker.phases.enter, prepare
        self.shard = shard or make_room(
            self.chunks, distributed_optimizer, spare_width=worker.spare_width
        )
        """The flat state, as it was cut last."""
        self.adopt()
        # Buckets keep room for it.
        self._largest_width = self._group.size() + worker.spare_width
        self.reduction = GradientReduction(
            self.chunks,
            kept=KeptSums(worker, self.chunks),
            slot=worker.slot,
            exact=worker.promises_bits,
            announce=self._announce,
            summing=worker.stopwatch.summing,
        )
        self._expert_biases = ExpertBiases(self.chunks)
        for chunk in self.chunks:
            add_in_one_sum(chunk)
            prepare(chunk)
            chunk.start_param_sync = around(self._gather)(chunk.start_param_sync)
        gathering = "start_param_sync_for_bucket_group_subset"
        if hasattr(distributed_optimizer, gathering):
            # From 0.18 on the optimizer gathers by itself, not through the chunks.
            native = getattr(distributed_optimizer, gathering)
            setattr(distributed_optimizer, gathering, around(self._gather)(native))
        self._passes = OpenPasses(self.chunks)
        self._watched: list[Any] = []
        worker.stopwatch.on_gpu = next(self.chunks[0].parameters()).is_cuda
        self._watch_layers()
        self._watch_step()
        wrapped = [part for chunk in self.chunks for part in (chunk, chunk.module)]
        for part in (*wrapped, optimizer):
            free_worker.save_no_shards(part, while_unplaced=lambda: not self.is_placed)
        for part in wrapped:
            free_worker.load_no_weights(part, while_unplaced=lambda: not self.is_placed)
        free_worker.make_no_shards(distributed_optimizer, while_unplaced=lambda: not self.is_placed)

    @property
    def _group(self) -> dist.ProcessGroup:
        return self.chunks[0].intra_dp_cp_group

    def adopt(self) -> None:
        """Take over what was loaded into the optimizer (collective over WORLD).

        A worker that owns no parameter learns from the others how many steps were applied.
        """
        applied = torch.tensor(self.shard.adopt())
        dist.all_reduce(applied, op=dist.ReduceOp.MAX)
        self._applied_steps = int(applied)
        self.shard.set_applied_steps(self._applied_steps)

    def take_loaded(self) -> None:
        """Take over what the script has loaded into model and optimizer (collective over WORLD).

        Raises ConfigurationError where the 16-bit weights are not those of their masters.
        """
        self.adopt()
        if self._worker.detached or not self.shard.masters_apart:
            return
        before = self.weights_digest()
        self._distributed._copy_main_params_to_model_params()
        if self.sync_weights() != before:
            raise ConfigurationError(
                "the model's weights are not those of the optimizer's float32 masters, by which "
                "the first step would replace them: load the optimizer's state as well, or call "
                "optimizer.reload_model_params() behind the lines that load the model"
            )

    # ---- announcements ------------------------------------------------------------------------

    def _watch_layers(self) -> None:
        """Announce the phases of a step from inside the layers and buckets that there are now."""
        modules = [module for chunk in self.chunks for module in chunk.modules()]
        self.modules = modules
        """Those of the chunks, as they are now."""
        layers = [module for module in modules if isinstance(module, TransformerLayer)]
        layers = layers or [chunk.module for chunk in self.chunks]
        self.middle_layer = middle = layers[len(layers) // 2]
        for hook in self._watched:
            hook.remove()
        # A pass over many layers takes long: each of them, in either direction, may be the last.
        check = self._worker.member.check
        self._watched = [
            hook
            for layer in layers
            for hook in (
                layer.register_forward_pre_hook(lambda module, inputs: check()),
                layer.register_forward_hook(_before_backward(check)),
            )
        ]
        self._watched += [
            middle.register_forward_pre_hook(
                lambda module, inputs: self._announce("forward") if module.training else None
            ),
            middle.register_forward_hook(_before_backward(lambda: self._announce("backward"))),
        ]
        self._watched += watch_passes(self.chunks, self._worker.stopwatch)
        for chunk in self.chunks:
            self._watched += watch_evaluation(chunk.module, self._worker.phases)
        for group in (group for chunk in self.chunks for group in chunk.bucket_groups):
            # Where gathers overlap, the forward's hooks start them, a bucket group at a time.
            if group.ddp_config.overlap_param_gather and "start_param_sync" not in vars(group):
                group.start_param_sync = around(self._gather)(group.start_param_sync)

    def _watch_step(self) -> None:
        """Announce the update, wait for the copies before it, and count it."""
        self.inner_optimizer.register_step_pre_hook(
            lambda optimizer, args, kwargs: self._announce("optimizer")
        )
        update = self._optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            self._worker.state.begin_update()
            self.reduction.kept.before_update()
            with set_within(self, "is_updating", True):
                result = update(*args, **kwargs) if self.is_placed else (True, 0.0, None)
            if self._free_workers_scale and not self._is_applied(result[0]):
                # As Megatron-Core says it: a step that is skipped has no norm.
                result = (False, None, None)
            self._expert_biases.gather(is_placed=self.is_placed)
            self._applied_steps += int(bool(result[0]))
            if not self.is_placed:
                # What all workers save alike, rank 0 saves: maybe this one.
                self.shard.set_applied_steps(self._applied_steps)
            return result

        self._optimizer.step = step

    @property
    def _free_workers_scale(self) -> bool:
        """True if there are workers without a place that have to follow a loss scaler."""
        placement, ranks = self._worker.placement, self._worker.ranks
        has_free = any(placement.shard_group_of(slot) is None for slot in ranks)
        return has_free and self._distributed.grad_scaler is not None

    def _is_applied(self, applied: bool) -> bool:
        """Return whether the others applied the step (collective over WORLD).

        The loss scaler of a worker without a place counts the step as theirs did: rank 0 saves it,
        and that may be this one.
        """
        skipped = torch.tensor(int(not applied), device=torch.cuda.current_device())
        dist.all_reduce(skipped, op=dist.ReduceOp.MAX)
        if not self.is_placed:
            self._distributed.grad_scaler.update(bool(skipped))
        return not skipped

    def _gather(self, native: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Gathers weights, announced; a free worker has none to gather."""
        if self.is_placed:
            self._announce("gather")
            native(*args, **kwargs)

    # ---- the verbs ----------------------------------------------------------------------------

    def why_layers_stay(self) -> str | None:
        """The reason why no layer can change stage; None where they can."""
        if not self.shard.layers_are_alike:
            return "the optimizer treats layers differently (config_overrides)"
        return frozen.why_layers_stay(self.chunks) or stage_layers.why_fixed(self.chunks)

    def why_workers_stay(self) -> str | None:
        """The reason why no worker can change stage; None where they can."""
        return self.why_layers_stay() or stage_parts.why_fixed(self.chunks)

    def pause(self) -> None:
        """Drop the interrupted step; what the script has offloaded has its storage again."""
        if buffers.bring_back(self.chunks):
            self._worker.state.leave_seal()
        self._passes.end()
        self.reduction.drop()
        self.reduction.kept.interrupted()
        for chunk in self.chunks:
            buffers.drop_step(chunk)
        for timer in self._timers():
            timer._started = timer._started and timer in self._timers_of_script

    def note_timers(self) -> None:
        """A call of the script's loop begins: what runs now is not begun again in its redo."""
        self._timers_of_script = {timer for timer in self._timers() if timer._started}

    def _timers(self) -> Iterator[Any]:
        for config in (self.chunks[0].config, self._distributed.config):
            yield from getattr(config.timers, "_timers", {}).values()

    @contextmanager
    def passes_repeated(self) -> Iterator[None]:
        """Inside, forward passes of this step give what they gave.

        They gather no weights, which are whole, since others may run no pass.
        """
        gathering = [chunk for chunk in self.chunks if chunk.remove_forward_pre_hook_handles]
        for chunk in gathering:
            chunk.disable_forward_pre_hook(param_sync=False)
        try:
            with self._expert_biases.kept(as_begun=True):
                yield
        finally:
            for chunk in gathering:
                chunk.enable_forward_pre_hook()

    @contextmanager
    def passes_dropped(self, flow: Flow, *, trains: bool) -> Iterator[None]:
        """Inside, passes reduce by ``flow``; what they leave in gradients and routers is dropped.

        A recovery does so where they are interrupted. Passes that train nothing leave gradients
        alone, which may be those of an earlier call.
        """
        with self._expert_biases.kept():
            self.take_place(flow)
            yield
            for chunk in self.chunks if trains else ():
                buffers.drop_step(chunk)
                chunk.zero_grad_buffer()

    def gradient_digests(self) -> dict[str, int]:
        """Digests of the own pieces of the gradients, by global parameter name."""
        return {
            name: digest_of(param.main_grad.view(-1)[span.start : span.end])  # type: ignore[attr-defined]
            for name, param, span in self._own_pieces()
        }

    def _own_pieces(self) -> Iterator[tuple[str, torch.nn.Parameter, Any]]:
        """Yield name and weight of which this worker has a piece, and the piece's range in it."""
        ranges = self._distributed.model_param_group_index_map if self.is_placed else ()
        for name, param in global_names(self.chunks):
            if param in ranges:
                yield name, param, self._distributed._get_model_param_range_map(param)["param"]

    def rebind(self, plan: RecoveryPlan, *, first: int) -> None:
        """Point what this model and its optimizer cached at the new layout.

        What they capture by value: sizes, ranks and shard views in the buffers and bucket groups;
        ranges and pieces in the distributed optimizer. ``first``: the plan's number of the first
        bucket of this model.
        """
        with frozen.as_at_launch(self.chunks, self.frozen_names):
            self._rebind(plan, first)

    def _rebind(self, plan: RecoveryPlan, first: int) -> None:
        ask_again(self._optimizer, self._distributed)
        self.reduction.kept.rebound(plan.dataflow)
        if self.take_place(plan.dataflow):
            if isinstance(plan.dataflow, PipelineFlow):
                self._take_stage(plan.dataflow)
            for chunk in self.chunks:
                stage_parts.move_to_tp_position(chunk)
                buffers.set_width(chunk, self._group.size(), self._group.rank())
            own = range(first, first + len(buffers.buckets(self.chunks)))
            state = plan.state_in_place(self._worker.slot)
            self.shard.recut({n - first: old - first for n, old in state.items() if n in own})
            shard_group = plan.shard_group_of(self._worker.slot)
            assert shard_group is not None
            weights = plan.weights_in_place(shard_group)
            self._weights_in_place = frozenset(n - first for n in weights if n in own)
        else:
            # They would be of the moment of the loss for ever, and a script could save them.
            for bucket in buffers.buckets(self.chunks):
                bucket.param_data.fill_(math.nan)

    def _take_stage(self, flow: PipelineFlow) -> None:
        """Have the parts of the model that the layout gives to this worker; weights follow."""
        shard_group = self._worker.placement.shard_group_of(self._worker.slot)
        assert shard_group is not None
        spans = flow.layout.layers(shard_group.stage)
        parts = range(shard_group.stage, len(flow.layout.cuts) - 1, len(flow.layout.stages))
        changed = [
            self._take_part(chunk, part, span, num_parts=len(flow.layout.cuts) - 1)
            for chunk, part, span in zip(self.chunks, parts, spans, strict=True)
        ]
        if any(changed):
            self.shard.regroup()
            self.reduction.watch(self.chunks)
            self._watch_layers()

    def _take_part(
        self, chunk: DistributedDataParallel, part: int, span: tuple[int, int], *, num_parts: int
    ) -> bool:
        """Make a chunk that of virtual stage ``part`` with layers ``span``; whether it was not."""
        if chunk.config.pipeline_model_parallel_size == 1:
            return False  # one stage has all of the model, whatever its parts are
        gathers_in_forward = bool(chunk.remove_forward_pre_hook_handles)
        if gathers_in_forward:
            chunk.disable_forward_pre_hook(param_sync=False)
        rebuilt = stage_parts.take_stage(chunk, first=part == 0, last=part == num_parts - 1)
        built = stage_layers.take_layers(chunk, range(span[0] + 1, span[1] + 1))
        if rebuilt or built is not None:
            frozen.freeze(chunk, self.frozen_names)
        if gathers_in_forward:
            chunk.enable_forward_pre_hook()
        for module in (chunk,) if rebuilt else built or ():
            add_in_one_sum(module)
            self._prepare(module)
        if rebuilt or built is not None:
            buffers.lay_out(chunk, list(units_of(chunk).values()), self._largest_width)
        return rebuilt or built is not None

    def take_place(self, flow: Flow) -> bool:
        """Reduce as ``flow`` says from now on; false for a worker that has no place in it."""
        shard_group = self._worker.placement.shard_group_of(self._worker.slot)
        self.is_placed = shard_group is not None
        free_worker.answer_for(self.chunks[0].config, placed=self.is_placed)
        if shard_group is not None:
            assert not isinstance(flow, Shares)
            mine: Dataflow | None
            if isinstance(flow, PipelineFlow):
                mine = None if flow.is_resized else flow.shard_group(*shard_group.key)
            else:
                mine = flow
            self.reduction.set_dataflow(mine, shard_group.ranks, native=flow.is_healthy)
        return self.is_placed

    def read_capsule(self) -> bytes:
        """Scheduler, loss scaler, applied steps, biases of experts, what is set in the groups."""
        scaler = self._distributed.grad_scaler
        return encode(
            {
                "applied_steps": self._applied_steps,
                "expert_biases": self._expert_biases.values,
                "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
                "grad_scaler": None if scaler is None else scaler.state_dict(),
                "param_groups": [
                    {key: group[key] for key in _SCHEDULED if key in group}
                    for group in self.inner_optimizer.param_groups
                ],
            },
            "the capsule",
        )

    def write_capsule(self, capsule: bytes) -> None:
        """Install what ``read_capsule`` returned."""
        state = decode(capsule, "the capsule")
        self._applied_steps = state["applied_steps"]
        self.shard.set_applied_steps(self._applied_steps)
        self._expert_biases.write(state["expert_biases"])
        if self._scheduler is not None:
            # load_state_dict() of Megatron's scheduler advances from its present count.
            if hasattr(self._scheduler, "num_steps"):
                self._scheduler.num_steps = 0
            self._scheduler.load_state_dict(state["scheduler"])
        if self._distributed.grad_scaler is not None:
            self._distributed.grad_scaler.load_state_dict(state["grad_scaler"])
        groups = self.inner_optimizer.param_groups
        for group, scheduled in zip(groups, state["param_groups"], strict=True):
            group.update(scheduled)

    def named_pieces(self) -> Iterator[NamedPiece]:
        """This worker's pieces of the state, by global parameter name."""
        for name, param, span in self._own_pieces():
            main = self.shard.main_of(param)
            state = self.inner_optimizer.state[main]
            parts = {"master": main, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
            for part, data in parts.items():
                yield NamedPiece(
                    name=name, part=part, start=span.start, numel=param.numel(), data=data.view(-1)
                )
        for router in routers(self.chunks) if self.is_placed else ():
            yield NamedPiece(
                name=f"decoder.layers.{router.layer_number - 1}.mlp.router.expert_bias",
                part="buffer",
                start=0,
                numel=router.expert_bias.numel(),
                data=router.expert_bias,
            )

    @torch.no_grad()
    def sync_weights(self) -> int:
        """Gather the weights over the data-parallel group; returns their digest.

        0 for a worker that has no place.
        """
        if not self.is_placed:
            return 0
        self._announce("gather")
        for number, bucket in enumerate(buffers.buckets(self.chunks)):
            if number not in self._weights_in_place:
                buffers.gather_weights(bucket, self._group)
        for group in (group for chunk in self.chunks for group in chunk.bucket_groups):
            # Forward passes find them whole: who runs none in a redo would not take part.
            group.param_gather_dispatched = True
        return self.weights_digest()

    def weights_digest(self) -> int:
        """The digest of the weights as they are here; 0 for a worker that has no place."""
        digest = xxhash.xxh3_64()
        for bucket in buffers.buckets(self.chunks) if self.is_placed else ():
            digest.update(bytes_of(bucket.param_data[: bucket.numel_unpadded].cpu()))
        return digest.intdigest() >> 1 if self.is_placed else 0


def _before_backward(act: Callable[[], None]) -> Callable[..., None]:
    """A forward hook that has ``act()`` called where the module's backward pass begins."""

    def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: act())

    return hook
