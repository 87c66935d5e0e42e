"""A script's own loop, guarded in the calls that every loop on Megatron-Core makes.

    optimizer.zero_grad()                   # its own
    losses = forward_backward(...)          # a part of the step
    optimizer.step()                        # makes the step
    scheduler.step()                        # its own

What these calls are given says all that ``ElasticJob`` is told by its verbs: the first one that
trains binds the model.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from torch.utils import _pytree

from elaswave_plugin.adapters.megatron.arguments import Sizes
from elaswave_plugin.adapters.megatron.compat import rng
from elaswave_plugin.adapters.megatron.compat.whole_saves import WholeSaves
from elaswave_plugin.adapters.megatron.contract import Result
from elaswave_plugin.adapters.megatron.input_seal import InputSeal, SealedCall, drawn
from elaswave_plugin.adapters.megatron.job import ElasticJob
from elaswave_plugin.adapters.megatron.lost_shares import OWN_NUMBERS_ADVICE, LostShares
from elaswave_plugin.adapters.megatron.schedule_calls import without_known
from elaswave_plugin.adapters.megatron.script_run import ScriptRun
from elaswave_plugin.adapters.megatron.state.optimizer_of import chunks_of, optimizer_of
from elaswave_plugin.adapters.megatron.state.states_to_save import StatesToSave
from elaswave_plugin.adapters.megatron.step.late_sums import LateSums
from elaswave_plugin.adapters.megatron.step.made_again import InMemory, Original
from elaswave_plugin.adapters.megatron.step.positions import Count
from elaswave_plugin.adapters.megatron.step.replica_sampler import ADVICE
from elaswave_plugin.adapters.megatron.step.replica_stream import ReplicaStream, Streams
from elaswave_plugin.adapters.megatron.step.reported_losses import first_loss
from elaswave_plugin.adapters.patching import PatchSet
from elaswave_plugin.around import around
from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.core.step.dataflow import Dataflow, Samples
from elaswave_plugin.core.step.sum_order import replica_microbatches
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.framework import StepReport
from elaswave_plugin.ipc.console import say
from elaswave_plugin.loops.call_log import CallLog
from elaswave_plugin.loops.call_record import CallRecord
from elaswave_plugin.loops.guarded_steps import GuardedSteps
from elaswave_plugin.loops.loop_body import LoopBody
from elaswave_plugin.loops.record_told import RecordTold, check_loaded
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.trainer.fatal import ends_in_a_sentence

# The rank that the first worker is told while its script is behind the others.
_SHOWN_FIRST = 1
# A loop of a script's own does not say how many steps it makes.
_ENDLESS = 1 << 40


class OwnLoop(ElasticJob):
    """One worker's part of a script whose loop is its own."""

    _why_whole = "the script's iterator gives whole micro-batches"
    # Of the numbers that the script makes by itself, for the sentence that names their lines.
    _advice = OWN_NUMBERS_ADVICE
    # Of batches in memory, once there are any.
    _seal: InputSeal | None = None

    def __init__(
        self,
        config: ElasticConfig,
        *,
        worker: Worker,
        patches: PatchSet,
        saves: WholeSaves,
        call: dict[str, Any],
        knows_all: bool,
    ) -> None:
        """``call``: what the first call of forward_backward that trains is given.

        ``knows_all``: whether a worker that comes later knows what others returned before it.
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
        super().__init__(config, sizes, patches=patches, saves=saves, worker=worker)
        # Of the launch: its script stays that of this replica, also where others run its passes.
        self.replica = parallel_state.get_data_parallel_rank()
        self.model_parallel = sizes.model_parallel
        self.place = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
        )
        # What the script's draws follow from; the record has the size of the world beside it.
        self._drawn: list[int] = []
        self._calls: CallRecord = CallRecord(
            lags=lambda: self._loop.is_lagging,
            draws=lambda: (self._drawn, len(self._worker.view.ranks)),
            follow_draws=lambda told: self._settle(*told[0]),
        )
        check_loaded(worker, saves.loaded)
        self._streams = Streams()
        self.shares = LostShares(worker)
        """Of lost replicas, in what is reported here."""
        self._knows_all, self._reports = knows_all, list[Any]()
        self._has_left_out = self._has_told_first = False
        self._late = LateSums(
            self._worker.links, width=self.width, members=self._worker.groups.made_of
        )
        self._states = StatesToSave()
        # Samples of all training calls so far, by which the ledger numbers them.
        self._read = Count()
        self._positions.follow(self._read)
        # Of gradients and weights, as the last call of the step has left them; None before one.
        self._versions: tuple[int, list[int]] | None = None
        # Whether the script was told at its start that it is rank 0.
        self._began_first = self._worker.owns_rank_0 and not self._worker.detached
        self.model = call["model"]
        optimizer = optimizer_of(self.model)
        self.bind(self.model, optimizer, train_iters=_ENDLESS)
        self._check_bound("train")
        optimizer.step = partial(self._update, optimizer.step)
        for chunk in chunks_of(self.model):
            for name in ("finish_grad_sync", "scale_gradients"):
                setattr(chunk, name, around(self._part_of_step)(getattr(chunk, name)))
        saves.between_steps = self._save
        for one in (*_wrapped(self.model), optimizer):
            one.sharded_state_dict = around(self._state_to_save)(one.sharded_state_dict)
        self._start()
        self._leave_at_exit()

    def _made_loop(self, steps: GuardedSteps) -> tuple[CallLog, LoopBody]:
        source = self.place[1], self.replica
        self._told = RecordTold(self._worker, self._calls, place=self.place, source=source)
        loop = CallLog(steps, knowledge=self._told, passes=True)
        loop.after_recovery += [ScriptRun(self._worker).follow, self._tell_first]
        body = LoopBody(loop, self._calls, scale=self.shares.scale, on_sum=self.shares.note_sum)
        return loop, body

    def _tell_first(self) -> None:
        """Say, once, what nobody does while the first worker of the launch is gone."""
        first = self._worker.launch_slots[0]
        if self._has_told_first or first in self._worker.ranks:
            return
        self._has_told_first = True
        if self._worker.owns_rank_0:
            say(
                f"worker {first} is gone, which was rank 0: what the script does by a rank that it"
                " has in a variable, as writing files, is left out from here on; where it asks for"
                f" torch.distributed.get_rank() again, worker {self._worker.slot} does it"
            )

    def _is_as_begun(self, step: int) -> bool:
        # With tensor parallelism, batches in memory are where a call's deal has them.
        is_sealed = self._seal is not None and not isinstance(self._microbatches.flow, Dataflow)
        return super()._is_as_begun(step) and not self._late.are_any and not is_sealed

    def _is_concerned(self) -> bool:
        return not self.shares.are_right

    @property
    def is_behind(self) -> bool:
        """True while the script is at what the others have behind them."""
        return self._worker.detached or self._loop.is_lagging

    @property
    def is_inside(self) -> bool:
        """True within a call, where passes run."""
        return self._loop.is_inside

    @property
    def has_place(self) -> bool:
        """True while this worker has a part of the model."""
        return self._microbatches.coordinate is not None

    @property
    def stands_for_first(self) -> bool:
        """True in the first worker that is left of those that had its part of the model."""
        _, there = self.shares.data_parallel()
        return self._worker.slot in [*filter(self._microbatches.is_placed, there)][:1]

    def leave_out(self, what: str) -> None:
        """Say, once, that the script saves a part of the model that this worker has not."""
        if not self._has_left_out:
            self._has_left_out = True
            say(
                f"worker {self._worker.slot} has no part of the model since a loss, and {what} of"
                " its script is left out until it has: save by dist_checkpointing.save, for which"
                " it does not matter who has which part"
            )

    @property
    def world_size_behind(self) -> int | None:
        """The size of the world where the script is behind the others; None where it is not."""
        coming = self._calls.draws_coming
        return None if coming is None else int(coming[1])

    @ends_in_a_sentence
    def gathered_behind(self) -> list[tuple[torch.Tensor, int]] | None:
        """Pass over ``all_gather_object``; returns bytes of objects and how many count, or None.

        It makes two calls, with as many tensors as there are workers, which were others then.
        """
        if not self._calls.is_behind:
            return None
        sizes, data = (self._calls.pass_over("allgather") for _ in range(2))
        return [(one, int(size)) for one, size in zip(data, sizes, strict=True)]

    def _abandon(self) -> None:
        """Leave, as the script fails; say what is likely where rank 0 has come to it."""
        if self._worker.owns_rank_0 and not self._began_first:
            say(
                f"worker {self._worker.slot} is rank 0 because another was lost, and what its"
                " script makes on rank 0 before the first step, as a log, is not there: ask for the"
                " rank once, rank = torch.distributed.get_rank() behind init_process_group; the"
                " losses go on in steps.jsonl of the run directory"
            )
        super()._abandon()

    def _settle(self, *key: int) -> None:
        """Have the script's draws follow from these numbers, in whatever worker it runs."""
        if key:
            rng.settle(self._seed, *key)
        self._drawn = [*key]

    # ---- the calls ------------------------------------------------------------------------------

    @ends_in_a_sentence
    def call(self, native: Callable[..., Any], *, forward_only: bool, **given: Any) -> Any:
        """``forward_backward``: completed through any number of losses."""
        self._framework.note_timers()
        count = given["num_microbatches"]
        given = without_known(given)
        iterator = given.pop("data_iterator")
        if isinstance(iterator, list) and len(iterator) == 1:
            (iterator,) = iterator
        stream: ReplicaStream | SealedCall | None = self._stream_of(iterator)
        if stream is None:
            stream = self._sealed_call(iterator, count, trains=not forward_only, **given)
        passes = partial(
            self._passes,
            native,
            stream,
            count,
            forward_only=forward_only,
            called_in=self._worker.view.epoch,
            is_fresh=not self._gradients.are_reduced(given["model"]),
            seen={},
            **given,
        )
        work = _in_its_precision(passes)
        if not forward_only and chunks_of(given["model"]) != chunks_of(self.model):
            raise ConfigurationError(
                "forward_backward trains a second model, and a loop without a line of ours has one:"
                " call job.bind for both, with the lines of docs/megatron_core.md"
            )
        with self._body.closed():
            if forward_only:
                if isinstance(stream, SealedCall):
                    self._tell_alike()
                evaluate = partial(self._loop.run, work, phase="evaluation")
                returned = self._calls.of("an evaluation", evaluate)
            else:
                returned = self._part("forward_backward", work)
                self._versions = self._present_versions()
        self.shares.note_told()
        return returned

    @ends_in_a_sentence
    def _gather(self, gather: Callable[[], object]) -> None:
        with self._body.closed():
            self._calls.of("start_param_sync", partial(self._loop.run, gather))

    def _part(self, call: str, work: Callable[[], Any]) -> Any:
        """Make a call inside of the step, or pass over it where the others have made the step."""
        self._loop.arrive()
        part = partial(self._loop.part, work, keep=self._keep)
        return self._calls.of(call, part, is_made=not self._loop.is_lagging)

    @ends_in_a_sentence
    def _save(self, write: Callable[[], None], state: Any) -> None:
        """``dist_checkpointing.save`` of a state, which starts again after a loss."""

        def save() -> None:
            self._states.renew(self._worker.view.epoch, state)
            write()

        with self._body.closed():
            self._calls.of("dist_checkpointing.save", partial(self._loop.run, save, phase="save"))

    def _state_to_save(self, native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``sharded_state_dict``, whose result follows from who is there."""
        work = partial(native, *args, **kwargs)
        if self._calls.is_behind:
            return work()
        with self._body.closed():
            return self._loop.run(lambda: self._states.build(work, self._worker.view.epoch))

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

    def _present_versions(self) -> tuple[int, list[int]]:
        """Count how often gradients and weights have been written; the view is in front."""
        buffers = [one for chunk in self._framework.chunks for one in chunk.buffers]
        counts = [one._version for b in buffers for one in (b.grad_data, b.param_data)]
        return self._worker.view.epoch, counts

    @ends_in_a_sentence
    def _part_of_step(self, native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._loop.is_inside:
            return native(*args, **kwargs)
        with self._body.closed():
            result = self._part(native.__name__, partial(native, *args, **kwargs))
        self._versions = self._present_versions()
        return result

    def _passes(
        self,
        native: Callable[..., Any],
        stream: ReplicaStream | SealedCall,
        count: int,
        *,
        forward_only: bool,
        called_in: int,
        is_fresh: bool,
        seen: dict[int, Any],
        **given: Any,
    ) -> list[Any]:
        """Run what this worker has of a call; returns the reports of its replica of the launch."""
        step, width = self._worker.completed, self.width
        model = given["model"]
        if not forward_only:
            self._own_numbers.begin()
            self._state.enter_passes()
            if self._worker.view.epoch != called_in and is_fresh:
                # The script does not zero them again.
                self._gradients.begin()
            self._gradients.zero(model)
        else:
            self._settle(rng.WORK, self._loop.works_done)
        first, read = stream.take(count), self._read.position
        is_known = self._microbatches.flow.is_healthy or isinstance(stream, SealedCall)
        if not (is_known or stream.has(first, self.replica, count - 1)):
            # All replicas' data end alike, and a worker may run none of what is missing.
            raise StopIteration

        def begin(batches: Any, chunk: Any, samples: Samples) -> None:
            size = self._micro_batch_size
            number, replica = divmod(samples.start // size, width)
            stream.deliver(first, replica, number)
            self._late.start(samples.start // size)
            if not forward_only and stream.has(first, replica, number):
                ids = range(read + samples.start, read + samples.stop)
                self._microbatches.consume(step, samples.start // size, tuple(ids))
            self._buffers.enter(replica)

        read_by = stream.read_by(given["forward_step_func"])
        given["forward_step_func"] = partial(self._late.leave_out, read_by)
        self._late.begin(parallel_state.get_data_parallel_group())
        with self._buffers.passes(forward_only=forward_only):
            reports = self._microbatches.forward_backward(
                native,
                begin,
                moment=first if forward_only else step,
                forward_only=forward_only,
                num_microbatches=count * width,
                left_out=stream.left_out,
                data_iterator=stream,
                **given,
            )
            numbers = self._microbatches.reports
            whole = self._late.settle(numbers, reports)
        if not forward_only:
            self._state.check(step)
            self._read.position += count * width * self._micro_batch_size
            self._gradients.trained(model)
            self._reports = reports
            self._check_again(seen, dict(zip(numbers, reports, strict=False)))
        self._settle(rng.PASSES, step, self._loop.works_done)
        return self._own_reports(numbers, whole, count)

    def _check_again(self, seen: dict[int, Any], reports: dict[int, Any]) -> None:
        """Raise ConfigurationError where a micro-batch that is made again has another loss.

        ``seen``: a copy of each report of the times before.
        """
        for number, one in reports.items() if self._worker.promises_bits else ():
            if number not in seen:
                # A script may change what it is given.
                seen[number] = _pytree.tree_map_only(torch.Tensor, torch.clone, one)
            elif repr(first_loss(seen[number])) != repr(first_loss(one)):
                raise ConfigurationError(
                    f"step {self._worker.completed} is made again after a loss, and micro-batch"
                    f" {number} has another loss than before: forward_step or its loss function"
                    " follows from a variable of the script's loop, which is further on by now;"
                    " have it follow from the batch, or use the lines of docs/megatron_core.md,"
                    " with job.iteration"
                )

    def _own_reports(self, numbers: Sequence[int], reports: list[Any], count: int) -> list[Any]:
        """Those of this worker's micro-batches at the launch, which others may have run."""
        width = self.width
        if self._microbatches.flow.is_healthy:
            return reports
        of = partial(replica_microbatches, num_replicas=width, num_microbatches=count * width)
        told = dict(zip(numbers, reports, strict=True))
        if not self.shares.are_missing and self._run_their_own(of, count * width):
            own = [told[number] for number in of(self.replica)]
        else:
            sums = {"are_sums": self._late.are_any}
            own = self.shares.reported(told, replica=self.replica, of=of, **sums)
        # At the launch, stages before the last one have none.
        is_last = self.place[1] == self.model_parallel[1] - 1
        return own if is_last else []

    def _run_their_own(self, of: Callable[[int], Sequence[int]], count: int) -> bool:
        """Return whether each worker runs its own micro-batches of a batch, beside others."""
        flow, slots = self._worker.flow_of(count), self._worker.launch_slots
        return isinstance(flow, Dataflow) and all(
            {*of(slots.index(slot))} <= {*flow.microbatches(slot)} for slot in self._worker.ranks
        )

    @ends_in_a_sentence
    def _update(self, native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step``, which makes the step."""
        now = self._present_versions()
        if self._versions is None:
            raise ConfigurationError(
                "optimizer.step() is called, and forward_backward has trained nothing since the"
                " last time: call each once a step, or use the lines of docs/megatron_core.md"
            )
        # A loss that met the script between the two calls has written both as well.
        if now[0] == self._versions[0] and now != self._versions:
            raise ConfigurationError(
                "the script changes gradients or weights between forward_backward and"
                " optimizer.step(), which a step that is made again would leave out: do it in a"
                " function of yours as config.finalize_model_grads_func, or by"
                " model.scale_gradients(factor)"
            )
        self._framework.note_timers()
        results: list[Any] = []
        put_back, life = self._keep(), self._worker.view.epoch

        def attempt(step: int) -> StepReport:
            if self._worker.view.epoch != life:
                put_back()
            made, norm, *others = native(*args, **kwargs)
            self._gradients.begin()
            self._states.forget()
            report = self._report([*map(first_loss, self._reports)], float(norm or 0.0))
            # Without a part of the model a worker has none of its own.
            results.append((made, norm if self.has_place else report.grad_norm, *others))
            return report

        def update() -> Any:
            self._loop.step(attempt)
            self._settle(rng.BODY, self._worker.completed)
            return results[-1]

        self._versions = None
        with self._body.closed():
            returned = self._calls.of("optimizer.step", update)
            if self._loop.is_lagging:
                self._loop.step(attempt)
        return returned

    def _tell_alike(self) -> None:
        """An evaluation tells this script of its own samples: others of its replica know it."""
        self._told.why_alike = (
            "its script evaluates batches that it has in memory, and what that has told it cannot"
            " be had again; set respawn to 0, and the others go on without it"
        )
        if self.model_parallel[0] == 1 or not self._knows_all:
            self._calls.end(self._told.why_alike)

    # ---- the data -------------------------------------------------------------------------------

    def _stream_of(self, iterator: Any) -> ReplicaStream | None:
        """The stream of an iterator that the script gives; None for batches in memory."""
        if not hasattr(iterator, "__next__") or self._streams.knows(iterator):
            return self._streams.of(iterator)
        mine, stream = {self.replica, self.replica or _SHOWN_FIRST}, None
        with suppress(InMemory):
            original = Original(iterator, mine=mine, num_replicas=self.width)
            stream = ReplicaStream(
                original,
                digests=original.digests(iterator),
                number=self._positions.made,
                seed=self._seed,
                life=lambda: self._worker.view.epoch,
                passed=partial(self._worker.phases.enter, "data"),
            )
            self._positions.follow(stream)
        self._streams.add(iterator, stream)
        return stream

    def _sealed_call(
        self,
        iterator: Any,
        count: int,
        *,
        trains: bool,
        forward_step_func: Callable[..., Any],
        model: Any,
        **_: Any,
    ) -> SealedCall:
        """Draw a call's batches, which the script has in memory."""
        kind = type(iterator).__name__
        if iterator is None or (
            isinstance(iterator, Iterable) and not hasattr(iterator, "__next__")
        ):
            raise ConfigurationError(
                f"data_iterator is a {kind}, which is no iterator: {ADVICE}, on every worker"
            )
        if self._seal is None:
            self._seal = InputSeal(
                self._worker,
                replica=self.replica,
                num_replicas=self.width,
                stage=self.place[1],
                num_stages=self.model_parallel[1],
            )
            self._positions.follow(self._seal)
            if not self._worker.config.respawn:
                self._calls.end("no worker comes later")
            if not self._knows_all:
                self._tell_alike()
            # Its weights may leave the device for the next rollout.
            self._worker.state.seals_beside = False
        return SealedCall(
            self._seal,
            drawn(
                iterator,
                count,
                forward_step=forward_step_func,
                chunk=chunks_of(model)[0],
                values=self._seal.values,
            ),
            trains=trains,
            flow=partial(self._microbatches.dealt, count * self.width),
            is_rehearsed=lambda: self._microbatches.is_rehearsed(count * self.width),
        )


def _in_its_precision(work: Callable[[], Result]) -> Callable[[], Result]:
    """Have ``work`` done under the torch.autocast that the script is in now, whenever it is."""
    kinds = ("cpu", "cuda")
    found = [(one, torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in kinds]

    def call() -> Result:
        with ExitStack() as stack:
            for kind, enabled, dtype in found:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, enabled))
            return work()

    return call


def _wrapped(model: Any) -> Iterator[Any]:
    """Yield the chunks of a model, and what each wraps, to the innermost."""
    for one in chunks_of(model):
        while one is not None:
            yield one
            one = getattr(one, "module", None)
