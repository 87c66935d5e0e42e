"""The replacements of Megatron-LM's functions: each takes the native one, and calls it.

Every place that contains a collective outside of a training step is a piece of the loop, which
starts again after a recovery; see ``loops/call_log.py``.
"""

import os
from collections.abc import Callable
from functools import partial, wraps
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
from elaswave_plugin.adapters.megatron_lm.legacy_saves import LegacySaves, named_by
from elaswave_plugin.adapters.megatron_lm.losses import told_everyone
from elaswave_plugin.adapters.megatron_lm.nominal import Answering
from elaswave_plugin.adapters.megatron_lm.script_arguments import (
    ScriptArguments,
    adjust,
    check_arguments,
    settings_for,
)
from elaswave_plugin.checkpoints.directory import MEGATRON_TRACKER
from elaswave_plugin.checkpoints.loading import check_everywhere, check_loadable
from elaswave_plugin.command_line import from_namespace
from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.errors import EpochChanged
from elaswave_plugin.ipc.environment import read_reserve
from elaswave_plugin.recovery.relief import words_of

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

    def initialize_distributed(self, native: Native) -> Native:
        """Join the job and make WORLD ours; Megatron-LM then finds it made."""

        @wraps(native)
        def initialize(*args: Any, **kwargs: Any) -> Any:
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

        return initialize

    def open_writer(self, native: Native, *, name: str) -> Native:
        """Later, when the job is joined: its run id is known then, and who is in its last place."""

        def set_writer(args: Any) -> None:
            self._openers[name] = native

        return set_writer

    def signal_device(self, native: Native) -> Native:
        """Return the device on which workers tell each other, at each step, of a signal to one."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return wraps(native)(lambda local_rank=None: device)

    def make_optimizer(self, native: Native) -> Native:
        """Room for every width, before a checkpoint is loaded."""

        def get_megatron_optimizer(
            config: Any, model_chunks: Any, config_overrides: Any = None, **kwargs: Any
        ) -> Any:
            kwargs["use_gloo_process_groups"] = False
            optimizer = native(config, model_chunks, config_overrides=config_overrides, **kwargs)
            self._joined.take_optimizer(model_chunks, optimizer, config_overrides)
            return optimizer

        return get_megatron_optimizer

    def build_datasets(self, native: Native) -> Native:
        """Every worker builds them: it may come to a place where they are read."""

        @wraps(native)
        def init(
            builder: Any, cls: Any, sizes: Any, is_built_on_rank: Any, *args: Any, **kwargs: Any
        ) -> None:
            native(builder, cls, sizes, lambda: True, *args, **kwargs)

        return init

    def make_loader(self, native: Native) -> Native:
        """A loader that reads any micro-batch, by their samplers."""
        data_samplers: Any = import_module("megatron.training.datasets.data_samplers")

        def build_pretraining_data_loader(dataset: Any, consumed_samples: int) -> Any:
            job, mpu = self._joined, data_samplers.mpu
            if job.reads_external:
                return job.make_external_loader(dataset, consumed_samples)
            if dataset is None:
                return None

            def make(replica: int, position: int) -> Any:
                answers = {
                    "get_data_parallel_rank": replica,
                    "get_data_parallel_world_size": job.width,
                }
                data_samplers.mpu = Answering(mpu, answers)
                try:
                    return native(dataset, position)
                finally:
                    data_samplers.mpu = mpu

            return job.make_loader(dataset, consumed_samples, make)

        return build_pretraining_data_loader

    def build_loaders(self, native: Native) -> Native:
        """Every worker has a loader of the script's: it may come to a place where it is read."""

        @wraps(native)
        def build(*args: Any, **kwargs: Any) -> Any:
            if self._joined.reads_external:
                parallel_state.set_tensor_model_parallel_rank(0)
            try:
                return native(*args, **kwargs)
            finally:
                parallel_state.set_tensor_model_parallel_rank(None)

        return build

    def cycle(self, native: Native) -> Native:
        """Our loader goes on with the next epoch by itself."""
        return wraps(native)(lambda loader: loader)

    # ---- the loop -------------------------------------------------------------------------------

    def train(self, native: Native) -> Native:
        """Training begins: what was built is taken into care."""

        @wraps(native)
        def train(
            forward_step_func: Any,
            model: Any,
            optimizer: Any,
            opt_param_scheduler: Any,
            train_data_iterator: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            built = (model, optimizer, opt_param_scheduler, train_data_iterator)
            self._joined.bind(*built, patched=self.places)
            return native(forward_step_func, *built, *args, **kwargs)

        return train

    def train_step(self, native: Native) -> Native:
        """A step is recovered and run again."""

        @wraps(native)
        def train_step(*args: Any, iteration: int, **kwargs: Any) -> Any:
            step = partial(native, *args, **kwargs)
            return self._joined.step(lambda iteration: step(iteration=iteration))

        return train_step

    def pass_over(self, native: Native) -> Native:
        """An iteration that the script skips is a step without an update."""
        return lambda data_iterator: self._joined.pass_over()

    def forward_backward(self, native: Native) -> Native:
        """Replace the schedule by one that runs this worker's micro-batches."""
        return lambda: partial(self._joined.forward_backward, native())

    def count_samples(self, native: Any) -> Any:
        """The batch is that of the launch, however many replicas are left to run it."""
        return _Width(native, self)

    def over_everyone(self, native: Native) -> Native:
        """Over WORLD: free workers learn it, and replicas of unequally wide stages agree."""

        @wraps(native)
        def reduce(value: Any) -> Any:
            group = parallel_state.get_model_parallel_group
            parallel_state.get_model_parallel_group = lambda *args, **kwargs: dist.group.WORLD
            try:
                return native(value)
            finally:
                parallel_state.get_model_parallel_group = group

        return reduce

    def evaluate(self, native: Native) -> Native:
        """Its losses on every rank: the last one shows them, and need not be in the last stage."""

        @wraps(native)
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            losses, *others = native(*args, **kwargs)
            # None where its time was over, on all alike.
            return (losses if losses is None else told_everyone(losses), *others)

        return evaluate

    def piece(self, native: Native, *, phase: str | None = None) -> Native:
        """A piece of the loop that starts again after a recovery."""

        @wraps(native)
        def piece(*args: Any, **kwargs: Any) -> Any:
            work = partial(native, *args, **kwargs)
            return work() if self.job is None else self.job.run(work, phase=phase)

        return piece

    def training_log(self, native: Native) -> Native:
        """Logging adds the step's losses to the interval's: not twice."""

        @wraps(native)
        def training_log(*args: Any, **kwargs: Any) -> Any:
            call, variables = signature(native).bind(*args, **kwargs), self._joined.variables
            variables.before_logging(call.arguments)
            interval = call.arguments["total_loss_dict"]
            before = dict(interval)
            router_losses = self._joined.router_losses

            def work() -> Any:
                interval.clear()
                interval.update(before)
                if router_losses is not None:
                    call.arguments["pg_collection"] = router_losses.fill_table()
                return native(*call.args, **call.kwargs)

            reports_memory = self._joined.run(work)
            variables.logged(interval, bool(reports_memory))
            return reports_memory

        return training_log

    def params_norm(self, native: Native) -> Native:
        """From shards: replicas of unequally wide stages have no group of their own."""

        @wraps(native)
        def calc_params_l2_norm(model: Any, force_create_fp32_copy: bool = False) -> Any:
            return self._joined.run(self._joined.params_norm)

        return calc_params_l2_norm

    def decide_exit(self, native: Native) -> Native:
        """A piece of the loop, which learns here what has been counted.

        With every worker told to leave it saves and ends, as Megatron-LM does by itself at a
        signal with --exit-signal-handler.
        """

        def decide(*args: Any, **kwargs: Any) -> Any:
            if self.job is not None and self.job.stops_here:
                return True
            if not (self.job is not None and self.job.last_call):
                return native(*args, **kwargs)
            given = signature(native).bind(*args, **kwargs).arguments
            # megatron.training is in the repository only, this file's users need not be.
            import_module("megatron.training.training").save_checkpoint_and_time(**given)
            return True

        piece = self.piece(decide)

        @wraps(native)
        def checkpoint_and_decide_exit(*args: Any, **kwargs: Any) -> Any:
            call = signature(native).bind(*args, **kwargs)
            self._joined.variables.counted(call.arguments["num_floating_point_operations_so_far"])
            return piece(*args, **kwargs)

        return checkpoint_and_decide_exit

    def timer(self, native: Native) -> Native:
        """A timer's barrier is a piece of the loop."""

        @wraps(native)
        def start_or_stop(timer: Any, barrier: bool = False) -> None:
            if barrier:
                self.meet(timer._barrier_group)
            native(timer)

        return start_or_stop

    def meet(self, group: Any) -> None:
        """A timer's barrier is a piece of the loop; none where not everybody runs what is timed."""
        if self.job is None or self.job.all_have_place:
            self.piece(dist.barrier)(group=group)

    def leave_detector(self, native: Native) -> Native:
        """An interrupted step, and one that may be redone with less, is no error to be shown."""

        @wraps(native)
        def exit_detector(detector: Any, ex_type: Any, ex_val: Any, ex_tb: Any) -> Any:
            if ex_type is EpochChanged or (ex_val is not None and words_of(ex_val)):
                ex_type = ex_val = ex_tb = None
            return native(detector, ex_type, ex_val, ex_tb)

        return exit_detector

    # ---- checkpoints ----------------------------------------------------------------------------

    def load(self, native: Native) -> Native:
        """A worker that comes later gets the state of the others, and reads no checkpoint."""

        @wraps(native)
        def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
            if self.job is not None and self.job.comes_later:
                return 0, 0
            with self.script.as_given(import_module("megatron.training").get_args()):
                return native(*args, **kwargs)

        return load_checkpoint

    def load_base(self, native: Native) -> Native:
        """Refuse a checkpoint that cannot be read, by name, before anything is read from it."""

        @wraps(native)
        def load_base_checkpoint(load_dir: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
            step = getattr(args, "ckpt_step", None)
            check_everywhere(partial(check_loadable, load_dir, step=step))
            return native(load_dir, args, *rest, **kwargs)

        return load_base_checkpoint

    def open_tracker(self, native: Native) -> Native:
        """The tracker is never seen half written, nor set by a worker that was given up."""

        @wraps(native)
        def open_file(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            drafts = self.saves.drafts
            if mode != "w" or "://" in str(path) or drafts is None:
                return native(path, mode, *args, **kwargs)
            if self.legacy.is_open:
                return self.legacy.hold(Path(path))
            return drafts.pointing_to(Path(path))

        return open_file

    def save(self, native: Native) -> Native:
        """Forget the save strategies that cache the job's layout, before each save."""

        @wraps(native)
        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
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

            return work() if self.job is None else self.job.run(work, phase="save")

        return save_checkpoint

    def name_files(self, native: Native) -> Native:
        """The files of a save of the format torch are written beside its place."""
        return named_by(native, self.legacy)

    def who_saves(self, native: Any) -> Any:
        """A worker without a place writes no file of the format torch."""
        return _Saving(native, self)

    def state_to_save(self, native: Native) -> Native:
        """A free worker saves nothing of its own but how its rerun machine stands."""

        @wraps(native)
        def generate_state_dict(*args: Any, **kwargs: Any) -> Any:
            state = native(*args, **kwargs)
            if self._joined.has_place:
                return state
            # Of a rerun each rank has a shard, where there is one.
            reruns = {name: one for name, one in state.items() if name == "rerun_state_machine"}
            return extract_sharded_base(state)[1] | reruns

        return generate_state_dict

    def rng_state(self, native: Native) -> Native:
        """The generators' states at a save are those of the step, not of what ran last here."""

        @wraps(native)
        def get_rng_state(*args: Any, **kwargs: Any) -> Any:
            self._joined.settle_generators()
            return native(*args, **kwargs)

        return get_rng_state

    def compile_index_builder(self, native: Native) -> Native:
        """Nothing where they are built already: the wheel brings no Makefile."""

        @wraps(native)
        def compile_where_missing() -> None:
            if not has_index_builder():
                native()

        return compile_where_missing


def has_index_builder() -> bool:
    """Return whether the compiled index builder of the datasets (helpers_cpp) is there."""
    try:
        import megatron.core.datasets.helpers_cpp  # noqa: F401
    except ImportError:
        return False
    return True


class _Saving(Answering):
    """parallel_state as checkpointing.py asks it who writes."""

    def __init__(self, module: Any, hooks: Hooks) -> None:
        super().__init__(module, {})
        self._hooks = hooks

    def get_expert_data_parallel_rank(self, *args: Any, **kwargs: Any) -> int:
        """No rank of a worker without a place."""
        native: int = self._module.get_expert_data_parallel_rank(*args, **kwargs)
        return native if self._hooks.job is None or self._hooks.job.has_place else -1


class _Width(Answering):
    """parallel_state as training.py counts samples with it."""

    def __init__(self, module: Any, hooks: Hooks) -> None:
        super().__init__(module, {})
        self._hooks = hooks

    def get_data_parallel_world_size(self, *args: Any, **kwargs: Any) -> int:
        """Replicas at launch, once the job is joined."""
        native: int = self._module.get_data_parallel_world_size(*args, **kwargs)
        return native if self._hooks.job is None else self._hooks.job.width
