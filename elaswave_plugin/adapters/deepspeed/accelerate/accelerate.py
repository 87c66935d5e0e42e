"""An engine that HF Accelerate drives: its loaders, boundaries, schedulers and collectives.

Accelerate reads batches ahead and counts micro-batches, processes and scheduler steps itself. Here
they follow the job: a loader that is iterated while the model is in training mode is the training
loader, its samples are those that Accelerate's own loader would deal out, and
``accelerator.sync_gradients`` is true after a step that was completed, and after no other.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    IterableDatasetShard,
)
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DeepSpeedSchedulerWrapper, recursively_apply, send_to_device

from elaswave_plugin.adapters.deepspeed.accelerate.lost_trackers import LostTrackers
from elaswave_plugin.adapters.deepspeed.accelerate.order import (
    SamplerOrder,
    agree_on,
    sampler_of,
    unskipped,
)
from elaswave_plugin.adapters.deepspeed.accelerate.script_record import ScriptRecord
from elaswave_plugin.adapters.deepspeed.accelerate.stream import (
    StreamOrder,
    Told,
    is_stream,
    stream_of,
)
from elaswave_plugin.adapters.deepspeed.compat.patches import accelerate_patches, width_patches
from elaswave_plugin.adapters.deepspeed.engine.job import EngineJob
from elaswave_plugin.adapters.deepspeed.engine.loader import ElasticLoader, Position
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.console import say
from elaswave_plugin.trainer.fatal import ends_in_a_sentence

# A worker that comes later reads on alone up to a place that is at most so old.
_TELL_PLACE_S = 10.0


class _EngineStepped:
    """A scheduler of Accelerate behind the engine, which steps it within the step."""

    def __init__(self, scheduler: Any, times: int) -> None:
        self._scheduler = scheduler
        self._times = times

    def step(self) -> None:
        """One optimizer step: a scheduler counts the batches of all workers of the launch."""
        for _ in range(self._times):
            total = getattr(self._scheduler, "total_steps", None)
            if total is None or self._scheduler._step_count <= total:
                self._scheduler.step()

    def state_dict(self) -> Any:
        """The scheduler's own."""
        return self._scheduler.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """The scheduler's own."""
        self._scheduler.load_state_dict(state)

    def get_last_lr(self) -> Any:
        """The scheduler's own."""
        return self._scheduler.get_last_lr()


class AcceleratedJob:
    """Accelerate's work around the engine of an elastic job."""

    def __init__(self, job: EngineJob, engine: Any) -> None:
        self._job = job
        job.boundaries_follow = True
        self._loop = job.loop
        self._engine = engine
        self._width, self._micro_batch_size = job.batch_shape
        self._loader: ElasticLoader | None = None
        # The batches of the training loader, or its stream, also of one that skips the first.
        self._source: Any = None
        # The stream of an iterable dataset, and when the agent was told the place in it.
        self._stream: StreamOrder | None = None
        self._told_s = 0.0
        self._unset = False
        # Whether evaluations keep the batches of the launch, and the order of the present one.
        self.keeps_batches = False
        self._evaluated: tuple[Any, SamplerOrder] | None = None
        self.record = ScriptRecord(job, on_caught_up=self._rebind)
        local = PartialState().local_process_index
        # The place on its node, where that is not its rank.
        self._local_rank = None if local == self._loop.worker.slot else local
        self.log = LostTrackers(was_main=PartialState().is_main_process).log
        job.reactions.append(self._rebind)

    # ---- the data -------------------------------------------------------------------------------

    def prepare(self, native: Callable[..., Any], accelerator: Any, *args: Any, **how: Any) -> Any:
        """Prepare a loader as one of several processes does, also where one is left."""
        loader = native(accelerator, *args, **how)
        is_alone = dist.get_world_size() == 1 < self._width and not accelerator.split_batches
        if is_alone and isinstance(loader, DataLoaderShard) and not is_stream(loader):
            shard = BatchSamplerShard(
                loader.batch_sampler, 1, 0, even_batches=accelerator.even_batches
            )
            # A loader takes no other one by its own name.
            object.__setattr__(loader.base_dataloader, "batch_sampler", shard)
        return loader

    def iterate(self, native: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
        """``iter(loader)``: the job's batches in training mode, Accelerate's own otherwise."""
        if self._engine.module.training:
            return self._train(loader)
        if self.keeps_batches:
            return self._evaluate(loader, self._deal(loader))
        for shard in (unskipped(loader.batch_sampler)[0], loader.dataset):
            if isinstance(shard, BatchSamplerShard | IterableDatasetShard):
                # Those who are left evaluate everything.
                shard.num_processes, shard.process_index = dist.get_world_size(), dist.get_rank()
        return self._evaluate(loader, native(loader))

    def length(self, native: Callable[[Any], int], shard: Any) -> int:
        """A worker's number of batches; the line that asks is told where it follows the workers."""
        if shard.num_processes != self._width:
            self._job.own_loops.asks("__len__")
        return native(shard)

    def _evaluate(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """Serve the batches of an evaluation, which keeps the shards that it began with."""
        before = self._loop.worker.view
        for batch in self.record.evaluated(loader, batches):
            yield batch
            if self._loop.worker.view is not before:
                self._job.own_loops.evaluates()

    def _deal(self, loader: Any) -> Iterator[Any]:
        """Serve this worker's shares of the batches that all workers of the launch would have."""
        if self._evaluated is None or self._evaluated[0] is not loader:
            sampler, batch_size, drop_last = sampler_of(loader, self._width)
            num_samples = batch_size * self._width
            order = SamplerOrder(sampler, num_samples=num_samples, drop_last=drop_last)
            self._evaluated = loader, order
        order = self._evaluated[1]
        # By which it counts what its last batch has beyond the dataset.
        loader.batch_sampler.num_processes = self._width
        loader.begin()
        try:
            count = order.iterations_of(0)
            for number in range(count):
                items = order.items(0, number)
                mine = items[slice(*self._job.portions.interval(len(items)))]
                loader.end_of_dataloader = number + 1 == count
                batch = loader.collate_fn([loader.dataset[item] for item in mine])
                yield send_to_device(batch, self._engine.device)
        finally:
            loader.end()

    def dispatch(self, native: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
        """``iter(loader)`` where one process reads for all: in an evaluation, the first one."""
        training = self._engine.module.training
        return self._train(loader) if training else self._evaluate(loader, native(loader))

    @ends_in_a_sentence
    def elastic(
        self,
        loader: Any,
        *,
        whole_updates: bool = False,
        pieces: int = 1,
        fewest: int | None = None,
    ) -> ElasticLoader:
        """The job's loader for the training loader that Accelerate has prepared.

        ``whole_updates``: whether the last step of an epoch of a stream is as long as the others;
        ``pieces``: micro-batches that a batch of it is cut into; ``fewest``: as in `SamplerOrder`.
        """
        if getattr(loader, "next_iter_state", None) is not None:
            self._refuse_state("was given a state")
        source, _ = _source_of(loader)
        if self._loader is None or self._source is not source:
            self._loader = (
                self._streamed(loader, whole_updates)
                if is_stream(loader)
                else self._sampled(loader, pieces, fewest)
            )
            self._source = source
        return self._loader

    def state(self, native: Callable[[Any], Any], loader: Any) -> Any:
        """``state_dict()`` of a stateful loader; the training loader is read by the job instead."""
        if self._source is not None and _source_of(loader)[0] is self._source:
            self._refuse_state("was asked for its state")
        return native(loader)

    @ends_in_a_sentence
    def _refuse_state(self, what: str) -> NoReturn:
        raise ConfigurationError(
            f"the training loader {what}, as accelerator.save_state and load_state have it with"
            " use_stateful_dataloader=True, and the place in its data is the job's, which"
            " torchdata does not know; set that to False, and keep the steps that were made"
        )

    def _sampled(self, loader: Any, pieces: int, fewest: int | None) -> ElasticLoader:
        """The job's loader for one whose samples have places."""
        if isinstance(loader, DataLoaderDispatcher):
            raise ConfigurationError(
                "dispatch_batches is True in Accelerate, so that one process reads for all, and its"
                " loss would lose the place in the data; set it to False"
            )
        sampler, batch_size, drop_last = sampler_of(loader, self._width)
        self._check_batch_size(batch_size, pieces)

        def order() -> SamplerOrder:
            worker = self._loop.worker
            told = worker.job_constants["sampler"] if worker.detached else None
            worker.remember(sampler=agree_on(sampler, told))
            num_samples = batch_size * self._width
            return SamplerOrder(
                sampler, num_samples=num_samples, drop_last=drop_last, fewest=fewest
            )

        return self._job.take_order(loader.dataset, order, collate=loader.collate_fn, like=loader)

    def _streamed(self, loader: Any, whole_updates: bool) -> ElasticLoader:
        """The job's loader for one of an iterable dataset."""
        worker = self._loop.worker
        stream, batch_size, fills_up, drop_last = stream_of(loader, self._width)
        self._check_batch_size(batch_size)
        order = self._stream = StreamOrder(
            stream,
            num_samples=batch_size * self._width,
            width=self._width,
            fills_up=fills_up,
            drop_last=drop_last,
            per_update=int(self._engine.gradient_accumulation_steps()),
            whole_updates=whole_updates,
            keeps_states=bool(worker.config.respawn or worker.reserve),
        )
        if worker.detached and "stream" in worker.job_constants:
            # What there is to read until the others' place, they need not wait for.
            order.take_up(Told(*worker.job_constants["stream"]))
        self._told_s = time.monotonic()
        return self._job.take_order(order, lambda: order, collate=loader.collate_fn)

    @ends_in_a_sentence
    def _check_stream(self, stream: StreamOrder, place: Position) -> None:
        """Check that all workers have read the same for a step up to a place (collective)."""
        epoch, first = place.epoch, max(0, place.iteration - self._job.micro_batch)
        own = stream.digest(first, place.iteration - first)
        most = torch.tensor([own, -own], device=self._engine.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        if most[0] != -most[1]:
            worker = self._loop.worker
            if worker.untried and str(worker.member.worker) not in worker.untried:
                # One that came later is the odd one out, and leaves now, which interrupts this.
                dist.barrier()
            raise ConfigurationError(
                f"the training stream gave the workers different samples in iteration {first} of"
                f" its pass {epoch}, wanted the same, of which each takes its share: have its order"
                " drawn by a seed of its own, not by the process's generators or its rank"
            )
        if time.monotonic() > self._told_s + _TELL_PLACE_S:
            self._told_s = time.monotonic()
            self._loop.worker.remember(stream=stream.tell(epoch, first))

    @property
    def streams(self) -> bool:
        """True if the training data is a stream."""
        return self._stream is not None

    def go_to(self, epoch: int) -> None:
        """Have a stream be where it begins an epoch; for a job that is resumed there."""
        assert self._stream is not None
        self._stream.go_to(epoch)

    def ends_before(self, epoch: int, iteration: int) -> bool:
        """Return whether a stream, whose length nobody knows, has ended before an iteration."""
        return self._stream is not None and self._stream.ends_before(epoch, iteration)

    def _check_batch_size(self, batch_size: int, pieces: int = 1) -> None:
        if batch_size != pieces * self._micro_batch_size:
            raise ConfigurationError(
                f"the training loader's batch_size is {batch_size} and "
                f"train_micro_batch_size_per_gpu is {self._micro_batch_size}; make them equal "
                '("auto" does); a loader of another kind is iterated after model.eval()'
            )

    def _train(self, loader: Any) -> Iterator[Any]:
        elastic = self.elastic(loader)
        loader.begin()
        self.record.begin(elastic)
        is_behind, skipped = self.record.is_behind, _source_of(loader)[1]
        epoch = self.record.of("iter(loader)", lambda: elastic.epoch + 1)
        elastic.prepare_epoch(epoch, number=loader.iteration, skipped=skipped)
        if not is_behind:
            iter(elastic)
        for at_end, batch in self.record.batches(elastic):
            loader.end_of_dataloader = at_end
            if self._unset:
                self._set_sync(True)
            yield send_to_device(batch, self._engine.device)
        loader.iteration += 1
        loader.end()

    # ---- boundaries -----------------------------------------------------------------------------

    def _set_sync(self, value: bool) -> None:
        self._unset = not value
        GradientState()._set_sync_gradients(value)

    def count(self, native: Callable[[Any], None], accelerator: Any) -> None:
        """``accelerator.accumulate()``: a redone step counts its micro-batches from the first."""

        def count() -> bool:
            accelerator.step = max(0, self._job.micro_batch - 1)
            native(accelerator)
            if self._loop.dead:
                self._set_sync(False)
            return bool(GradientState().sync_gradients)

        GradientState()._set_sync_gradients(self.record.of("accelerator.accumulate", count))

    def backward(
        self, native: Callable[..., None], wrapper: Any, loss: Any, *args: Any, **kwargs: Any
    ) -> None:
        """``accelerator.backward()``, which also makes the step.

        One that was lost is none, and one that a loss has rolled back after the script had seen it
        complete is none again.
        """
        stream, loader = self._stream, self._loader

        def step() -> bool:
            if stream is not None and loader is not None and GradientState().sync_gradients:
                check = partial(self._check_stream, stream, loader.position)
                self._loop.call(check, instead=lambda: None)
            native(wrapper, loss, *args, **kwargs)
            completed = self._loop.worker.completed
            if self._loop.dead or completed <= self.record.seen:
                self._set_sync(False)
            self.record.seen = max(self.record.seen, completed)
            return bool(GradientState().sync_gradients)

        GradientState()._set_sync_gradients(self.record.of("accelerator.backward", step))

    # ---- schedulers -----------------------------------------------------------------------------

    @ends_in_a_sentence
    def adopt(
        self, native: Callable[..., None], wrapper: Any, scheduler: Any, *args: Any, **kwargs: Any
    ) -> None:
        """A scheduler that Accelerate steps in the loop becomes the engine's, in its snapshots."""
        native(wrapper, scheduler, *args, **kwargs)
        if isinstance(wrapper, DeepSpeedSchedulerWrapper):
            return
        if not wrapper.step_with_optimizer or self._engine.lr_scheduler is not None:
            raise ConfigurationError(
                f"the {type(scheduler).__name__} is stepped by the script, where a loss cannot "
                "roll it back; pass one scheduler to accelerator.prepare() and leave "
                "step_scheduler_with_optimizer=True"
            )
        times = 1 if wrapper.split_batches else self._width
        self._engine.lr_scheduler = _EngineStepped(scheduler, times)

    def skip_step(self, native: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """``scheduler.step()``: the engine has made it."""

    # ---- what the script itself asks the others ------------------------------------------------

    def collective(self, native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a script's collective; in a dead iteration it gives what all workers would have."""
        value, name = [*args[1:], *kwargs.values()][0], native.__name__
        self._job.own_loops.asks(name)

        def work() -> Any:
            # After a loss the workers have shares of different size.
            if name == "gather" and not self._job.portions.has_launch_shares:
                return recursively_apply(_gathered, value)
            return native(*args, **kwargs)

        call = partial(
            self._job.call, work, instead=lambda: self._detached(name, value), counts=True
        )
        return self.record.of(f"accelerator.{name}", call)

    def _detached(self, name: str, value: Any) -> Any:
        """Return what the collective gives if every worker passes this value."""
        if not name.startswith("gather"):
            return value
        times = dist.get_world_size()
        return recursively_apply(
            lambda one: one.reshape(-1, *one.shape[1:]).repeat(times, *(1 for _ in one.shape[1:])),
            value,
        )

    def wait(self, native: Callable[[Any], None], accelerator: Any) -> None:
        """``accelerator.wait_for_everyone()``."""
        call = partial(
            self._job.call, lambda: native(accelerator), instead=lambda: None, counts=True
        )
        self.record.of("accelerator.wait_for_everyone", call)

    def given(self, native: Callable[..., Any], accelerator: Any, *args: Any, **how: Any) -> Any:
        """Return what a call gives the script, by which it may decide."""
        call = partial(native, accelerator, *args, **how)
        return self.record.of(f"accelerator.{native.__name__}", call)

    def save(self, native: Callable[..., Any], accelerator: Any, *args: Any, **how: Any) -> Path:
        """``accelerator.save_state()``, as one work between two steps; it counts its folders."""
        naming = accelerator.project_configuration
        number, names_it = naming.iteration, naming.automatic_checkpoint_naming
        folder = Path(accelerator.project_dir or "") / "checkpoints" / f"checkpoint_{number}"
        begun: list[Path] = []

        def write() -> str:
            if not begun:
                begun.append(folder)
                return str(native(accelerator, *args, **how))
            # Made again: it would refuse the folder that it has made itself.
            naming.iteration, naming.automatic_checkpoint_naming = number, False
            named = {"output_dir": folder} if names_it else {}
            try:
                return str(native(accelerator, *args[len(named) :], **{**how, **named}))
            finally:
                naming.automatic_checkpoint_naming = names_it

        def save() -> tuple[str | None, int]:
            return self._job.run(write, phase="save"), naming.iteration

        location, naming.iteration = self.record.of("accelerator.save_state", save)
        if location is None:
            say(
                f"accelerator.save_state was called behind step {self._loop.worker.completed},"
                " which a loss has taken back just then: nothing is saved, and the script goes on"
            )
        return Path(location or folder)

    def load(self, native: Callable[..., Any], accelerator: Any, *args: Any, **how: Any) -> Any:
        """``accelerator.load_state()``: from which step a script counts follows from it."""
        self.record.loads += map(str, [*args, *how.values()][:1])
        return native(accelerator, *args, **how)

    def whole(self, native: Callable[..., Any], accelerator: Any, *args: Any, **how: Any) -> Any:
        """``accelerator.get_state_dict()``; nothing where others have it behind them."""
        made: list[Any] = []

        def make() -> None:
            made.append(native(accelerator, *args, **how))

        self.record.of("accelerator.get_state_dict", make)
        return made[0] if made else {}

    # ---- after a loss ---------------------------------------------------------------------------

    def _rebind(self) -> None:
        """Point what Accelerate cached at the new layout: number of processes, first one."""
        rank, width = dist.get_rank(), dist.get_world_size()
        local = rank if self._local_rank is None or rank == 0 else self._local_rank
        # A script that is behind is the first one neither of all nor of its node.
        lowest = int(self.record.is_late)
        for shared in (PartialState._shared_state, AcceleratorState._shared_state):
            shared["local_process_index"] = max(local, lowest)
            shared["num_processes"], shared["process_index"] = width, max(rank, lowest)


def _source_of(loader: Any) -> tuple[Any, int]:
    """Return the stream of a prepared loader, or its batches, and how many it skips at first."""
    if is_stream(loader):
        return loader.dataset, loader.skip_batches
    return unskipped(loader.batch_sampler)


def _gathered(own: torch.Tensor) -> torch.Tensor:
    return torch.cat(gathered_pieces(own))


def gathered_pieces(own: torch.Tensor) -> list[torch.Tensor]:
    """Gather tensors of any length along their first dimension, by rank (collective)."""
    own = own.reshape(-1, *own.shape[1:]).contiguous()
    world = dist.get_world_size()
    lengths = torch.zeros(world, dtype=torch.long, device=own.device)
    lengths[dist.get_rank()] = len(own)
    dist.all_reduce(lengths)
    longest = int(lengths.max())
    padded = own.new_zeros(longest, *own.shape[1:])
    padded[: len(own)] = own
    everyone = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(everyone, padded)
    return [one[:length] for one, length in zip(everyone, lengths.tolist(), strict=True)]


def drives_trainer() -> bool:
    """Return whether transformers.Trainer has made the configuration of the engine."""
    return any(
        type(getattr(plugin, "hf_ds_config", None)).__name__ == "HfTrainerDeepSpeedConfig"
        for plugin in _plugins()
    )


def prepares_with(config: Any) -> bool:
    """Return whether a configuration is the one with which Accelerate itself prepares a model."""
    return any(getattr(plugin, "deepspeed_config", None) is config for plugin in _plugins())


def _plugins() -> Iterable[Any]:
    plugins = AcceleratorState._shared_state.get("deepspeed_plugins")
    return plugins.values() if isinstance(plugins, dict) else [plugins]


def _drives() -> bool:
    return bool(AcceleratorState._shared_state.get("deepspeed_plugins"))


def attach(job: EngineJob, engine: Any) -> AcceleratedJob | None:
    """Carry Accelerate too, where it drives the engine."""
    if not _drives():
        return None
    accelerated = AcceleratedJob(job, engine)
    if not drives_trainer():
        accelerated.record.keep(engine)
    for patches in (
        accelerate_patches(accelerated),
        width_patches("accelerate", job.own_loops.asks),
    ):
        patches.apply()
        job.at_leave.append(patches.undo)
    return accelerated
