"""The replacements of Megatron-LM's functions: each takes the native one and what that is given.

Every place that contains a collective outside of a training step is a piece of the loop, which
starts again after a recovery; see ``loops/call_log.py``.
"""

import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.utils import extract_sharded_base

from elaswave_plugin.adapters.megatron.compat.whole_saves import WholeSaves, forget_strategies
from elaswave_plugin.adapters.megatron_lm.job import LmJob
from elaswave_plugin.adapters.megatron_lm.legacy_saves import LegacySaves
from elaswave_plugin.adapters.megatron_lm.losses import told_everyone
from elaswave_plugin.adapters.megatron_lm.nominal import Answering
from elaswave_plugin.adapters.megatron_lm.script_arguments import (
    ScriptArguments,
    adjust,
    check_arguments,
    settings_for,
)
from elaswave_plugin.around import around
from elaswave_plugin.checkpoints.directory import MEGATRON_TRACKER, check_everywhere, check_loadable
from elaswave_plugin.command_line import from_namespace
from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.ipc.environment import read_reserve
from elaswave_plugin.values.set_within import set_within

Native = Callable[..., Any]


def config_of(args: Any) -> ElasticConfig:
    """Our settings among their arguments; raises ConfigurationError."""
    config = from_namespace(args)
    assert config is not None
    return settings_for(args, config, reserve=read_reserve(os.environ))


class Hooks:
    """The replacements of one run; the job exists once their arguments are read."""

    def __init__(self, on_join: Callable[[ElasticConfig], None]) -> None:
        """``on_join(config)`` is called before the job is joined."""
        self._on_join = on_join
        self.job: LmJob | None = None
        self.saves = WholeSaves(tracker=MEGATRON_TRACKER)
        self.script = ScriptArguments({}, ())
        self.legacy = LegacySaves()
        # What the patch records of the run have set.
        self.places: list[str] = []
        self._openers: dict[str, Native] = {}

    @property
    def _joined(self) -> LmJob:
        assert self.job is not None
        return self.job

    # ---- start ----------------------------------------------------------------------------------

    def initialize_distributed(self, native: Native, *args: Any, **kwargs: Any) -> Any:
        """Join the job and make WORLD ours; Megatron-LM then finds it made."""
        # megatron.training is in the repository only, this file's users need not be.
        arguments = import_module("megatron.training").get_args()
        check_arguments(arguments)
        self.script = adjust(arguments)
        config = config_of(arguments)
        self._on_join(config)
        self.job = LmJob(config, arguments, self.saves, self.script)
        self.job.make_world()
        self.job.say(self.script.said)
        self.job.take_writers(self._openers)
        return native(*args, **kwargs)

    def open_writer(self, native: Native, args: Any, *, name: str) -> None:
        """Later, when the job is joined: its run id is known then, and who is in its last place."""
        self._openers[name] = native

    def signal_device(self, native: Native, local_rank: Any = None) -> torch.device:
        """Return the device on which workers tell each other, at each step, of a signal to one."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def make_optimizer(
        self,
        native: Native,
        config: Any,
        model_chunks: Any,
        config_overrides: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Room for every width, before a checkpoint is loaded."""
        kwargs["use_gloo_process_groups"] = False
        optimizer = native(config, model_chunks, config_overrides=config_overrides, **kwargs)
        self._joined.take_optimizer(model_chunks, optimizer, config_overrides)
        return optimizer

    def build_datasets(
        self,
        native: Native,
        builder: Any,
        cls: Any,
        sizes: Any,
        is_built_on_rank: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Every worker builds them: it may come to a place where they are read."""
        native(builder, cls, sizes, lambda: True, *args, **kwargs)

    def make_loader(self, native: Native, dataset: Any, consumed_samples: int) -> Any:
        """A loader that reads any micro-batch, by their samplers."""
        data_samplers: Any = import_module("megatron.training.datasets.data_samplers")
        job, mpu = self._joined, data_samplers.mpu
        if job.reads_external:
            return job.make_external_loader(dataset, consumed_samples)
        if dataset is None:
            return None

        def make(replica: int, position: int) -> Any:
            answers = {
                "get_data_parallel_rank": _returning(replica),
                "get_data_parallel_world_size": _returning(job.width),
            }
            with set_within(data_samplers, "mpu", Answering(mpu, answers)):
                return native(dataset, position)

        return job.make_loader(dataset, consumed_samples, make)

    def build_loaders(self, native: Native, *args: Any, **kwargs: Any) -> Any:
        """Every worker has a loader of the script's: it may come to a place where it is read."""
        if self._joined.reads_external:
            parallel_state.set_tensor_model_parallel_rank(0)
        try:
            return native(*args, **kwargs)
        finally:
            parallel_state.set_tensor_model_parallel_rank(None)

    def cycle(self, native: Native, loader: Any) -> Any:
        """Our loader goes on with the next epoch by itself."""
        return loader

    # ---- the loop -------------------------------------------------------------------------------

    def train(
        self,
        native: Native,
        forward_step_func: Any,
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        train_data_iterator: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Training begins: what was built is taken into care."""
        built = (model, optimizer, opt_param_scheduler, train_data_iterator)
        self._joined.bind(*built, patched=self.places)
        return native(forward_step_func, *built, *args, **kwargs)

    def train_step(self, native: Native, *args: Any, iteration: int, **kwargs: Any) -> Any:
        """A step is recovered and run again."""
        step = partial(native, *args, **kwargs)
        return self._joined.step(lambda iteration: step(iteration=iteration))

    def pass_over(self, native: Native, data_iterator: Any) -> None:
        """An iteration that the script skips is a step without an update."""
        self._joined.pass_over()

    def forward_backward(self, native: Native) -> Native:
        """Replace the schedule by one that runs this worker's micro-batches."""
        return partial(self._joined.forward_backward, native())

    def count_samples(self, module: Any) -> Answering:
        """The batch is that of the launch, however many replicas are left to run it.

        ``module``: parallel_state as training.py counts samples with it.
        """
        width = around(self._width)(module.get_data_parallel_world_size)
        return Answering(module, {"get_data_parallel_world_size": width})

    def _width(self, native: Native, *args: Any, **kwargs: Any) -> Any:
        return native(*args, **kwargs) if self.job is None else self.job.width

    def over_everyone(self, native: Native, value: Any) -> Any:
        """Over WORLD: free workers learn it, and replicas of unequally wide stages agree."""
        everyone = _returning(dist.group.WORLD)
        with set_within(parallel_state, "get_model_parallel_group", everyone):
            return native(value)

    def evaluate(self, native: Native, *args: Any, **kwargs: Any) -> Any:
        """Its losses on every rank: the last one shows them, and need not be in the last stage."""
        losses, *others = native(*args, **kwargs)
        # None where its time was over, on all alike.
        return (losses if losses is None else told_everyone(losses), *others)

    def _again(self, work: Callable[[], Any], phase: str | None = None) -> Any:
        return work() if self.job is None else self.job.run(work, phase=phase)

    def piece(self, native: Native, *args: Any, **kwargs: Any) -> Any:
        """A piece of the loop that starts again after a recovery."""
        return self._again(partial(native, *args, **kwargs))

    def evaluation(self, native: Native, *args: Any, **kwargs: Any) -> Any:
        """A piece that takes long."""
        return self._again(partial(native, *args, **kwargs), "evaluation")

    def training_log(self, native: Native, *args: Any, **kwargs: Any) -> Any:
        """Logging adds the step's losses to the interval's: not twice."""
        call, variables = signature(native).bind(*args, **kwargs), self._joined.variables
        variables.before_logging(call.arguments)
        interval = call.arguments["total_loss_dict"]
        before = dict(interval)
        router_losses = self._joined.router_losses

        def work() -> Any:
            interval.clear()
            interval.update(before)
            if router_losses.are_any:
                call.arguments["pg_collection"] = router_losses.fill_table()
            return native(*call.args, **call.kwargs)

        reports_memory = self._joined.run(work)
        variables.logged(interval, bool(reports_memory))
        return reports_memory

    def params_norm(self, native: Native, model: Any, force_create_fp32_copy: bool = False) -> Any:
        """From shards: replicas of unequally wide stages have no group of their own."""
        return self._joined.run(self._joined.params_norm)

    def decide_exit(self, native: Native, *args: Any, **kwargs: Any) -> Any:
        """A piece of the loop, which learns here what has been counted.

        With every worker told to leave it saves and ends, as Megatron-LM does by itself at a
        signal with --exit-signal-handler.
        """
        given = signature(native).bind(*args, **kwargs).arguments
        self._joined.variables.counted(given["num_floating_point_operations_so_far"])

        def decide() -> Any:
            if self._joined.stops_here:
                return True
            if not self._joined.last_call:
                return native(*args, **kwargs)
            # megatron.training is in the repository only, this file's users need not be.
            import_module("megatron.training.training").save_checkpoint_and_time(**given)
            return True

        return self._joined.run(decide)

    def timer(self, native: Native, timer: Any, barrier: bool = False) -> None:
        """A timer's barrier is a piece of the loop."""
        if barrier:
            self.piece(dist.barrier, timer._barrier_group)
        native(timer)

    def leave_detector(self, native: Native, detector: Any, *raised: Any) -> Any:
        """Show no stack: a step may be made again, and an error is shown where it ends."""
        return native(detector, *[None] * len(raised))

    # ---- checkpoints ----------------------------------------------------------------------------

    def load(self, native: Native, *args: Any, **kwargs: Any) -> Any:
        """A worker that comes later gets the state of the others, and reads no checkpoint."""
        if self.job is not None and self.job.worker.detached:
            return 0, 0
        with self.script.as_given(import_module("megatron.training").get_args()):
            return native(*args, **kwargs)

    def load_base(self, native: Native, load_dir: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
        """Refuse a checkpoint that cannot be read, by name, before anything is read from it."""
        step = getattr(args, "ckpt_step", None)
        check_everywhere(partial(check_loadable, load_dir, step=step))
        return native(load_dir, args, *rest, **kwargs)

    def open_tracker(
        self, native: Native, path: Any, mode: str = "r", *args: Any, **kwargs: Any
    ) -> Any:
        """The tracker is never seen half written, nor set by a worker that was given up."""
        drafts = self.saves.drafts
        if mode != "w" or "://" in str(path) or drafts is None:
            return native(path, mode, *args, **kwargs)
        if self.legacy.is_open:
            return self.legacy.hold(Path(path))
        return drafts.pointing_to(Path(path))

    def save(self, native: Native, *args: Any, **kwargs: Any) -> Any:
        """Forget the save strategies that cache the job's layout, before each save."""
        for one in (*args, *kwargs.values()):
            if isinstance(one, dict):
                forget_strategies(one)

        def work() -> Any:
            arguments = import_module("megatron.training").get_args()
            with self.script.as_given(arguments):
                write = partial(native, *args, **kwargs)
                if arguments.use_dist_ckpt or kwargs.get("non_persistent_ckpt"):
                    return write()
                iteration = signature(native).bind(*args, **kwargs).arguments["iteration"]
                place = Path(arguments.save) / f"iter_{iteration:07d}"
                return self._joined.save_legacy(self.legacy, place, write)

        return self._again(work, "save")

    def name_files(self, native: Native, *args: Any, **kwargs: Any) -> str:
        """The files of a save of the format torch are written beside its place."""
        return self.legacy.name(native(*args, **kwargs))

    def who_saves(self, module: Any) -> Answering:
        """A worker without a place writes no file of the format torch.

        ``module``: parallel_state as checkpointing.py asks it who writes.
        """
        rank = around(self._rank_to_write)(module.get_expert_data_parallel_rank)
        return Answering(module, {"get_expert_data_parallel_rank": rank})

    def _rank_to_write(self, native: Native, *args: Any, **kwargs: Any) -> Any:
        is_placed = self.job is None or self.job.has_place
        return native(*args, **kwargs) if is_placed else -1

    def state_to_save(self, native: Native, *args: Any, **kwargs: Any) -> Any:
        """A free worker saves nothing of its own but how its rerun machine stands."""
        state = native(*args, **kwargs)
        if self._joined.has_place:
            return state
        # Of a rerun each rank has a shard, where there is one.
        reruns = {name: one for name, one in state.items() if name == "rerun_state_machine"}
        return extract_sharded_base(state)[1] | reruns

    def rng_state(self, native: Native, *args: Any, **kwargs: Any) -> Any:
        """The generators' states at a save are those of the step, not of what ran last here."""
        self._joined.settle_generators()
        return native(*args, **kwargs)

    def compile_index_builder(self, native: Native) -> None:
        """Nothing where they are built already: the wheel brings no Makefile."""
        if not has_index_builder():
            native()


def _returning(value: Any) -> Native:
    return lambda *args, **kwargs: value


def has_index_builder() -> bool:
    """Return whether the compiled index builder of the datasets (helpers_cpp) is there."""
    try:
        import megatron.core.datasets.helpers_cpp  # noqa: F401
    except ImportError:
        return False
    return True
