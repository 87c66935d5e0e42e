"""DeepSpeed behind the verbs of ``framework.py``: one engine, its optimizer, scheduler."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import xxhash

from elaswave_plugin.adapters.deepspeed.engine.first_pass import (
    Structure,
    buffers_like,
    fit,
    structure_of,
)
from elaswave_plugin.adapters.deepspeed.engine.loader import ElasticLoader, Position
from elaswave_plugin.adapters.deepspeed.zero import zero_state
from elaswave_plugin.adapters.deepspeed.zero.zero0 import ReplicatedState
from elaswave_plugin.adapters.deepspeed.zero.zero3 import PartitionedWeightsState
from elaswave_plugin.adapters.deepspeed.zero.zero12 import PartitionedState
from elaswave_plugin.adapters.deepspeed.zero.zero_state import ZeroState
from elaswave_plugin.adapters.pass_hooks import After, PassHooks
from elaswave_plugin.core.recovery_plan.plan import RecoveryPlan
from elaswave_plugin.tracking.state_dump import NamedPiece
from elaswave_plugin.values.plain import decode, encode

# Counters of the engine that belong to a step (deepspeed/runtime/engine.py).
COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
# Of an optimizer: what `override_loss_scale` sets.
_SCALE_OF_SCRIPT = ("custom_loss_scaler", "external_loss_scale")


def _loss_scaler_of(optimizer: Any) -> Any:
    """Return the object that keeps a 16-bit optimizer's loss scale; None for an fp32 one.

    ZeRO's optimizers have an object of its own for it, those of stage 0 a data class.
    """
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)


def state_of(engine: Any) -> ZeroState:
    """The state of the engine's optimizer, by ZeRO stage."""
    stage = int(engine.zero_optimization_stage())
    if stage == 0:
        return ReplicatedState(engine)
    return PartitionedWeightsState(engine) if stage == 3 else PartitionedState(engine)


class DeepSpeedFramework:
    """The engine of one worker."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._state = state_of(engine)
        self._inner = engine.basic_optimizer
        # Where the loop is in its data is part of every snapshot.
        self.loader: ElasticLoader | None = None
        # Called before an interrupted step is dropped.
        self.on_pause: Callable[[], None] = lambda: None
        # Models that no step changes, whole on each worker.
        self.beside: Sequence[torch.nn.Module] = ()

    # ---- the verbs ----------------------------------------------------------------------------

    def bucket_lengths(self) -> tuple[int, ...]:
        """Unpadded lengths of the buckets, in elements."""
        return self._state.lengths()

    @property
    def shard_alignment(self) -> int:
        """DeepSpeed's own alignment of partitions, by stage."""
        return self._state.alignment

    def pause(self) -> None:
        """Drop the interrupted step. Modes are left alone: the script goes on, and sets its own."""
        engine = self._engine
        self.on_pause()
        self._state.drop()
        self.drop_activations()
        engine._running_engine_step = False
        engine.inside_no_sync_ctxt = False
        for timer in engine.timers.timers.values():
            timer.started_ = False
        engine.tput_timer.started = False

    def drop_activations(self) -> None:
        """Forget the layers' inputs that DeepSpeed's checkpointing keeps for a backward pass."""
        deepspeed.checkpointing.reset()

    def rebind(self, plan: RecoveryPlan) -> None:
        """Point everything DeepSpeed cached at the new layout.

        What it captures by value: sizes and ranks in the engine; the writers of checkpoints;
        partitions, sizes and ranks in the ZeRO optimizer, in every parameter of stage 3 and in the
        modules' hooks. Group handles need nothing: the groups were edited in place.
        """
        engine = self._engine
        rank = dist.get_rank()
        engine.world_size = dist.get_world_size()
        width = dist.get_world_size(engine.data_parallel_group)
        engine.dp_world_size = width
        engine.seq_dp_world_size = dist.get_world_size(engine.seq_data_parallel_group)
        engine.global_rank = rank
        engine._config.world_size, engine._config.global_rank = width, rank
        self._state.recut()
        engine.save_zero_checkpoint = engine.save_non_zero_checkpoint = False
        engine._configure_checkpointing()

    def read_shard(self) -> list[torch.Tensor]:
        """The flat state."""
        return self._state.parts()

    @property
    def keeps_state(self) -> bool:
        """False: partitions are made again for every width."""
        return False

    @property
    def moments_may_follow(self) -> bool:
        """False if every worker keeps all of them."""
        return self._state.moments_may_follow

    def write_weights(self, masters: torch.Tensor) -> None:
        """Install masters of shape [shard_numel]."""
        self._state.write_weights(masters)

    def write_moments(self, moments: torch.Tensor) -> None:
        """Install moments of shape [2, shard_numel]."""
        self._state.write_moments(moments)

    def read_capsule(self) -> bytes:
        """Counters, scheduler, loss scaler, what schedules set in the groups, place in the data."""
        engine = self._engine
        scheduler, scaler = engine.lr_scheduler, _loss_scaler_of(engine.optimizer)
        return encode(
            {
                "applied_steps": zero_state.applied_steps(self._inner),
                "counters": {name: getattr(engine, name) for name in COUNTERS},
                "scheduler": None if scheduler is None else scheduler.state_dict(),
                "loss_scaler": None if scaler is None else dict(vars(scaler)),
                "scale_of_script": {
                    name: vars(engine.optimizer)[name]
                    for name in _SCALE_OF_SCRIPT
                    if name in vars(engine.optimizer)
                },
                "param_groups": [
                    {key: value for key, value in group.items() if key != "params"}
                    for group in self._inner.param_groups
                ],
                "data": None if self.loader is None else asdict(self.loader.position),
            },
            "the capsule",
        )

    def write_capsule(self, capsule: bytes) -> None:
        """Install what ``read_capsule`` returned."""
        engine, state = self._engine, decode(capsule, "the capsule")
        self._write_progress(state)
        scaler = _loss_scaler_of(engine.optimizer)
        if scaler is not None:
            vars(scaler).update(state["loss_scaler"])
        vars(engine.optimizer).update(state["scale_of_script"])
        for group, values in zip(self._inner.param_groups, state["param_groups"], strict=True):
            group.update(values)
        zero_state.set_applied_steps(self._inner, state["applied_steps"])

    def _write_progress(self, state: dict[str, Any]) -> None:
        """Counters, scheduler and the place in the data, which are alike on every worker."""
        engine = self._engine
        for name, value in state["counters"].items():
            setattr(engine, name, value)
        if engine.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(state["scheduler"])
        if self.loader is not None:
            self.loader.position = Position(**(state["data"] or {}))

    @torch.no_grad()
    def sync_weights(self) -> int:
        """Gather the weights; returns the digest of all that every worker holds."""
        digest = xxhash.xxh3_64()
        for weights in self._state.sync_weights():
            flat: Any = weights.cpu().contiguous().view(torch.uint8).numpy()
            digest.update(flat)
        return digest.intdigest() >> 1

    @torch.no_grad()
    def install(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Have these trained weights and buffers, by name (collective over WORLD)."""
        for piece in self._state.named_pieces():
            if piece.part == "master":
                flat = weights[piece.name].flatten()
                piece.data.copy_(flat[piece.start : piece.start + piece.data.numel()])
        count = zero_state.applied_steps(self._inner)
        # The 16-bit weights follow the masters as after a recovery.
        shard = torch.cat([part.reshape(-1).float() for part in self._state.parts()]).view(3, -1)
        self._state.write_weights(shard[0])
        self._state.write_moments(shard[1:])
        zero_state.set_applied_steps(self._inner, count)
        self.sync_weights()
        for name, buffer in self._engine.module.named_buffers():
            if name in weights:
                buffer.copy_(weights[name])

    def resume(self) -> None:
        """Take up what was learnt in the passes before the change (collective over WORLD)."""
        self._state.resume()

    # ---- what the loop asks -------------------------------------------------------------------

    def watch(
        self,
        announce: Callable[[str], None],
        check: Callable[[torch.nn.Module], None],
        *,
        hooks: PassHooks,
    ) -> None:
        """Announce the phases of a step from inside the framework; ``check`` before each layer."""
        engine = self._engine
        modules = [m for m in engine.module.modules() if [*m.parameters(recurse=False)]]
        for module in modules:
            hooks.add(module, check)
        # Nothing flows back through what is not trained, as a teacher.
        trained = [m for m in modules if any(p.requires_grad for p in m.parameters(recurse=False))]
        middle = trained[len(trained) // 2]
        hooks.add(
            middle,
            lambda module: announce("forward") if module.training else None,
            _announce_backward(announce),
        )
        self._inner.register_step_pre_hook(lambda *_: announce("optimizer"))
        self._inner.register_step_post_hook(lambda *_: announce("gather"))
        reduce = engine.allreduce_gradients

        def allreduce_gradients(*args: Any, **kwargs: Any) -> None:
            announce("reduce")
            reduce(*args, **kwargs)

        engine.allreduce_gradients = allreduce_gradients

    def begin(self) -> None:
        """The state is final, loaded or fresh: have a place for each of its parts."""
        self._state.prepare()

    def share(self) -> None:
        """Have what no snapshot will hold (collective over WORLD); before the first seal."""
        self._state.share()

    def save(self, native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the engine's ``save_checkpoint``, with the state as DeepSpeed would have it."""
        with self._state.saving():
            return native(*args, **kwargs)

    def learning_rate(self) -> float:
        """The learning rate of the first group."""
        return float(self._inner.param_groups[0]["lr"])

    def grad_norm(self) -> float:
        """The norm that DeepSpeed computed in the last step; NaN where it computes none."""
        norm = self._engine.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)

    def unsealed(self, told: Structure | None = None) -> Iterator[torch.Tensor]:
        """Yield what every worker holds alike and no step changes: frozen parameters, buffers.

        So are models beside the engine's own.

        ``told``: the structure that has the buffers; without it, it is this worker's.
        """
        module = self._engine.module
        sealed = {id(param) for param in self._state.params}
        # Those that ZeRO-3 has cut lie in the memory of each node.
        yield from (
            param.data
            for param in module.parameters()
            if id(param) not in sealed and not hasattr(param, "ds_tensor")
        )
        yield from module.buffers() if told is None else buffers_like(module, told)
        for model in self.beside:
            yield from (one.data for one in (*model.parameters(), *model.buffers()))

    @property
    def structure(self) -> Structure:
        """The modules, parameters and buffers of the model."""
        return structure_of(self._engine.module)

    def fit(self, told: Structure) -> None:
        """Have the buffers of the others' model; raises ConfigurationError for another model."""
        fit(self._engine.module, told)

    def named_pieces(self) -> Iterator[NamedPiece]:
        """This worker's pieces of the state, by global parameter name."""
        return self._state.named_pieces()


def _announce_backward(announce: Callable[[str], None]) -> After:
    def hook(output: Any) -> None:
        tensor = _first_with_gradient(output)
        if tensor is not None:
            tensor.register_hook(lambda gradient: announce("backward"))

    return hook


def _first_with_gradient(output: Any) -> torch.Tensor | None:
    """Modules return tensors, tuples, mappings, or anything at all."""
    if isinstance(output, torch.Tensor):
        return output if output.requires_grad else None
    parts: Any = output
    if isinstance(output, Mapping):
        parts = tuple(output.values())
    elif is_dataclass(output):
        parts = tuple(vars(output).values())
    elif not isinstance(output, tuple | list):
        return None
    return next((one for one in map(_first_with_gradient, parts) if one is not None), None)
