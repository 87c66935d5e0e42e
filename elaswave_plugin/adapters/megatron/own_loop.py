"""A script's own loop, guarded in the calls that every loop on Megatron-Core makes.

    optimizer.zero_grad()                   # its own
    losses = forward_backward(...)          # a part of the step
    optimizer.step()                        # makes the step
    scheduler.step()                        # its own

What these calls are given says all that ``ElasticJob`` is told by its verbs: the first one that
trains binds the model.
"""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from megatron.core import parallel_state

from elaswave_plugin.adapters.megatron.arguments import Sizes
from elaswave_plugin.adapters.megatron.compat import rng
from elaswave_plugin.adapters.megatron.compat.whole_saves import WholeSaves
from elaswave_plugin.adapters.megatron.job import ElasticJob
from elaswave_plugin.adapters.megatron.state.binds import chunks_of
from elaswave_plugin.adapters.megatron.state.optimizer_of import optimizer_of
from elaswave_plugin.adapters.megatron.state.states_to_save import StatesToSave
from elaswave_plugin.adapters.megatron.step.lonely_calls import without_collectives
from elaswave_plugin.adapters.megatron.step.replica_stream import ReplicaStream, check_iterator
from elaswave_plugin.adapters.megatron.step.reported_losses import first_loss
from elaswave_plugin.adapters.patching import PatchSet
from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.core.planner.pipeline_flow import PipelineFlow
from elaswave_plugin.core.step.dataflow import Samples
from elaswave_plugin.core.step.sum_order import replica_microbatches
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.framework import StepReport
from elaswave_plugin.ipc.console import say
from elaswave_plugin.loops.call_log import CallLog
from elaswave_plugin.loops.guarded_steps import GuardedSteps
from elaswave_plugin.loops.script_end import leave_at_exit
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.trainer.fatal import ends_in_a_sentence
from elaswave_plugin.values.gathered import gathered
from elaswave_plugin.values.plain import encode

# A loop of a script's own does not say how many steps it makes.
_ENDLESS = 1 << 40
_TRAINING, _EVALUATION, _UPDATE = "training", "evaluation", "update"


class OwnLoop(ElasticJob):
    """One worker's part of a script whose loop is its own."""

    def __init__(
        self,
        config: ElasticConfig,
        *,
        worker: Worker,
        patches: PatchSet,
        saves: WholeSaves,
        call: dict[str, Any],
    ) -> None:
        """``call``: what the first call of forward_backward that trains is given.

        Collective over WORLD. Raises ConfigurationError for what is not carried.
        """
        width = parallel_state.get_data_parallel_world_size()
        sizes = Sizes(
            global_batch_size=call["num_microbatches"] * call["micro_batch_size"] * width,
            micro_batch_size=call["micro_batch_size"],
            model_parallel=(
                parallel_state.get_tensor_model_parallel_world_size(),
                parallel_state.get_pipeline_model_parallel_world_size(),
            ),
            seed=0,
        )
        if worker.reserve and sizes.model_parallel != (1, 1):
            raise ConfigurationError(
                f"--reserve is {worker.reserve} and the tensor and pipeline parallel sizes are"
                f" {sizes.model_parallel}, which a loop without lines of ours tells too late: leave"
                " --reserve out, or use the lines of docs/megatron_core.md"
            )
        super().__init__(config, sizes, patches=patches, saves=saves, worker=worker)
        # Of the launch: its script stays that of this replica, also where others run its passes.
        self.replica = parallel_state.get_data_parallel_rank()
        self._streams = WeakKeyDictionary[Any, ReplicaStream]()
        # What calls have returned last, for the script of a worker that comes later.
        self._returned: dict[str, Any] = {}
        self._reports: list[Any] = []
        self._states = StatesToSave()
        # Of gradients and weights, as the last call of the step has left them.
        self._versions: list[int] = []
        # The view in which the script zeroes gradients that count.
        self._zeroed_in = worker.view.epoch
        self.model = call["model"]
        optimizer = optimizer_of(self.model)
        self.bind(self.model, optimizer, train_iters=_ENDLESS)
        self._check_bound("train")
        optimizer.step = partial(self._update, optimizer.step)
        for chunk in chunks_of(self.model):
            for name in ("finish_grad_sync", "scale_gradients"):
                setattr(chunk, name, self._part_of_step(getattr(chunk, name)))
        saves.between_steps = self._save
        for one in (*chunks_of(self.model), *(c.module for c in chunks_of(self.model)), optimizer):
            one.sharded_state_dict = self._state_to_save(one.sharded_state_dict)
        self._start()
        self._body.begin()
        self._worker.groups.before_the_end = self.finish
        leave_at_exit(self.finish, abandon=self._abandon)

    # Of the numbers that the script makes by itself, for the sentence that names their lines.
    _advice = "the mean over the whole batch is in steps.jsonl of the run directory, and in W&B"

    def _made_loop(self, steps: GuardedSteps) -> CallLog:
        return CallLog(steps, knowledge=self, passes=True)

    # ---- the calls ------------------------------------------------------------------------------

    @ends_in_a_sentence
    def call(self, native: Callable[..., Any], *, forward_only: bool, **given: Any) -> Any:
        """``forward_backward``: completed through any number of losses."""
        count = given.pop("num_microbatches")
        stream = self._stream_of(given.pop("data_iterator"))
        work = partial(self._passes, native, stream, count, forward_only=forward_only, **given)
        if not forward_only and chunks_of(given["model"]) != chunks_of(self.model):
            raise ConfigurationError(
                "forward_backward trains a second model, and a loop without a line of ours has one:"
                " call job.bind for both, with the lines of docs/megatron_core.md"
            )
        with self._body.closed():
            if forward_only:
                returned = self._loop.run(work, phase="evaluation")
            else:
                returned = self._loop.part(work, keep=self._keep)
                self._versions = self._present_versions()
        return self._told(_EVALUATION if forward_only else _TRAINING, returned)

    def _save(self, write: Callable[[], None]) -> None:
        """``dist_checkpointing.save``, which starts again after a loss."""

        def save() -> None:
            self._states.renew(self._worker.view.epoch)
            write()

        with self._body.closed():
            self._loop.run(save, phase="save")

    def _state_to_save(self, native: Callable[..., Any]) -> Callable[..., Any]:
        """``sharded_state_dict``, whose result follows from who is there."""

        @wraps(native)
        def build(*args: Any, **kwargs: Any) -> Any:
            work = partial(native, *args, **kwargs)
            if self._loop.is_lagging:
                return work()
            with self._body.closed():
                state: dict[str, Any] | None = self._loop.run(work)
            assert state is not None  # as only a save's can be
            self._states.add(state, work, self._worker.view.epoch)
            return state

        return build

    def _told(self, what: str, returned: Any) -> Any:
        """Remember what a call returns; of one that is passed over, what the others had."""
        if self._loop.is_lagging:
            return self._returned.get(what)
        self._returned[what] = returned
        return returned

    def _keep(self) -> Callable[[], None]:
        """Return what puts back the modes of modules, and the settings of groups."""
        framework = self._framework
        modes = [(part, part.training) for chunk in framework.chunks for part in chunk.modules()]
        settings = [dict(one) for one in framework.settings]

        def put_back() -> None:
            for group, kept in zip(framework.groups, settings, strict=False):
                group.update(kept)
            for part, training in modes:
                part.training = training

        return put_back

    def _present_versions(self) -> list[int]:
        """Count how often gradients and weights have been written."""
        buffers = [one for chunk in self._framework.chunks for one in chunk.buffers]
        return [tensor._version for one in buffers for tensor in (one.grad_data, one.param_data)]

    def _part_of_step(self, native: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(native)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._body.closed():
                result = self._loop.part(partial(native, *args, **kwargs), keep=self._keep)
            self._versions = self._present_versions()
            return result

        return call

    def _passes(
        self,
        native: Callable[..., Any],
        stream: ReplicaStream,
        count: int,
        *,
        forward_only: bool,
        **given: Any,
    ) -> list[Any]:
        """Run what this worker has of a call; returns the reports of its replica of the launch."""
        step, width = self._worker.completed, self._width
        model = given["model"]
        if not forward_only:
            self._own_numbers.begin()
            self._state.enter_passes()
            if self._worker.view.epoch != self._zeroed_in:
                self._zeroed_in = self._worker.view.epoch
                self._gradients.begin()
            self._gradients.zero(model)
        else:
            rng.settle(self._seed, rng.WORK, self._loop.works_done)
        first = stream.take(count)
        moment = first if forward_only else step

        def begin(batches: Any, chunk: Any, samples: Samples) -> None:
            size = self._micro_batch_size
            number, replica = divmod(samples.start // size, width)
            stream.deliver(first, replica, number)
            if not forward_only:
                microbatch, start = samples.start // size, first * width * size
                ids = range(start + samples.start, start + samples.stop)
                self._microbatches.consume(step, microbatch, tuple(ids))
            self._buffers.enter(replica)
            rng.set_key(self._seed, moment, samples, size=size, forward_only=forward_only)

        given["forward_step_func"] = without_collectives(
            given["forward_step_func"], self._worker.links
        )
        with self._buffers.passes(forward_only=forward_only):
            reports = self._microbatches.forward_backward(
                native,
                begin,
                forward_only=forward_only,
                num_microbatches=count * width,
                data_iterator=stream,
                **given,
            )
        numbers = self._microbatches.reports
        if not forward_only:
            self._state.check(step)
            self._gradients.trained(model)
            self._reports = reports
        rng.settle(self._seed, rng.PASSES, step, self._loop.works_done)
        return self._own_reports(numbers, reports, count)

    def _own_reports(self, numbers: Sequence[int], reports: list[Any], count: int) -> list[Any]:
        """Those of this worker's micro-batches at the launch, which others may have run."""
        flow = self._microbatches.flow
        if flow.is_healthy:
            return reports
        told = dict(zip(numbers, reports, strict=True))
        if isinstance(flow, PipelineFlow):
            # With data parallelism alone a worker runs its own as well as others.
            told = {number: one for mine in gathered([*told.items()]) for number, one in mine}
        own = replica_microbatches(
            self.replica, num_replicas=self._width, num_microbatches=count * self._width
        )
        return [told[number] for number in own]

    @ends_in_a_sentence
    def _update(self, native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step``, which makes the step."""
        if not self._loop.is_lagging and self._present_versions() != self._versions:
            raise ConfigurationError(
                "the script changes gradients or weights between forward_backward and"
                " optimizer.step(), which a step that is made again would leave out: do it in a"
                " function of yours as config.finalize_model_grads_func, or by"
                " model.scale_gradients(factor)"
            )
        results: list[Any] = []
        put_back, life = self._keep(), self._worker.view.epoch

        def attempt(step: int) -> StepReport:
            if self._worker.view.epoch != life:
                put_back()
            results.append(native(*args, **kwargs))
            self._gradients.begin()
            self._states.forget()
            norm = results[-1][1]
            self._agree_on_buffers()
            pace = self._worker.stopwatch.times.told_pace()
            losses = [first_loss(one) for one in self._reports]
            loss, tokens, norm = self._agree(losses, float(norm or 0.0), pace=pace)
            lr = self._framework.learning_rate()
            return StepReport(loss=loss, grad_norm=norm, lr=lr, tokens=tokens)

        with self._body.closed():
            self._loop.step(attempt)
        rng.settle(self._seed, rng.BODY, self._worker.completed)
        return self._told(_UPDATE, results[-1] if results else None)

    # ---- the data -------------------------------------------------------------------------------

    def _stream_of(self, iterator: Any) -> ReplicaStream:
        """The stream of an iterator that the script gives."""
        check_iterator(iterator)
        known = self._streams.get(iterator)
        if known is None:
            known = ReplicaStream(
                iterator,
                number=self._positions.made,
                replica=self.replica,
                num_replicas=self._width,
                seed=self._seed,
            )
            self._positions.follow(known)
            self._streams[iterator] = known
        return known

    # ---- those who come later -------------------------------------------------------------------

    def tell(self) -> Any:
        """Tell what calls have returned last, as far as it is plain."""
        return {name: one for name, one in self._returned.items() if _is_plain(one)}

    def follow(self, step: int, told: Sequence[Any]) -> None:
        """Have the script pass over the steps before ``step``, with what the others' calls gave."""
        if told[dist.get_rank()] is None:
            self._returned = next(one for one in told if one is not None)
            say(
                f"worker {self._worker.slot}, started again: its script passes over {step} steps"
                " that the others have behind them; what it prints or writes there is none of the"
                " job's"
            )


def _is_plain(value: Any) -> bool:
    try:
        encode(value)
    except ConfigurationError:
        return False
    return True
