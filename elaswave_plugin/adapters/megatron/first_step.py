"""The job's first step, rehearsed: each call of it runs once more, dealt otherwise, and before.

Where a worker is lost another one runs its micro-batches, and the bits are the same only where they
follow from the micro-batch. Whatever else they follow from, as a variable of the script or kernels
that do not repeat their bits, shows before anything is updated: what the first run leaves is put
back, and what both have computed is compared by digests. On a GPU one layer is run twice alike
then, which tells kernels from the rest.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from elaswave_plugin.adapters import repeated_layer
from elaswave_plugin.adapters.megatron.bound_models import BoundModels
from elaswave_plugin.adapters.megatron.compat import rng
from elaswave_plugin.adapters.megatron.framework import MegatronFramework
from elaswave_plugin.adapters.megatron.state.model_buffers import model_buffers
from elaswave_plugin.adapters.megatron.step.entry_proof import digest_of_reports
from elaswave_plugin.core.planner.pipeline_flow import PipelineFlow
from elaswave_plugin.core.step.dataflow import Dataflow
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.console import say
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.values.plain import gathered
from elaswave_plugin.values.set_within import set_within

# The losses that this worker reports, by their number in the step.
Losses = Mapping[int, Any]
Flow = Dataflow | PipelineFlow


class Computed(NamedTuple):
    """Digests of what one worker has computed: losses by number, own gradients by name."""

    losses: dict[int, int]
    gradients: dict[str, int]


class FirstStepReport(NamedTuple):
    """One worker's results: both losses of what it ran, and the first gradient that differs."""

    first: dict[int, int]
    second: dict[int, int]
    gradient: str | None


class FirstStep:
    """Runs the calls of a job's first step twice, if the job is exact and no worker is lost yet."""

    def __init__(
        self,
        worker: Worker,
        models: BoundModels,
        *,
        seed: int,
        passes_undone: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """``seed``: of the draws.

        ``passes_undone()``: inside, passes run whose changes of the step's state are undone.
        """
        self._seed = seed
        self._worker = worker
        self._models = models
        self._passes_undone = passes_undone
        # Who comes later finds another view: the job has this one until somebody comes or goes.
        self._begins = worker.view.epoch, worker.completed
        self._is_wanted = (
            worker.promises_bits
            and not worker.detached
            and worker.config.rehearse_first_step != "off"
        )
        self._calls = 0
        self._began_s = 0.0
        self.is_running = False
        """Whether passes run now that are undone."""

    def call(
        self,
        model: MegatronFramework,
        flow: Flow,
        run: Callable[[Flow], list[Any]],
        losses_of: Callable[[list[Any]], Losses],
        *,
        trains: bool,
    ) -> list[Any]:
        """Run a model's call of the first step by ``flow``, twice; returns the second's reports.

        ``losses_of(reports)`` of the flow that was run last. Raises ConfigurationError, alike on
        all workers, where both differ and that ends the job.
        """
        self._began_s = time.monotonic()
        other = self._dealt_otherwise(flow)
        before = self._computed_before(model, other, flow, run, losses_of, trains=trains)
        seconds = time.monotonic() - self._began_s
        reports = run(flow)
        if not self._is_wanted:
            return reports  # the job goes on in fast mode, as kernels do not repeat
        exchanged = self._exchanged(before, _computed(model, losses_of(reports), trains=trains))
        self._judge(exchanged, in_place=other is flow, seconds=seconds)
        return reports

    def is_due(self, flow: Flow) -> bool:
        """Return whether this call is of the first step; alike on all workers."""
        worker = self._worker
        now = worker.view.epoch, worker.completed
        return self._is_wanted and now == self._begins and flow.is_healthy

    def _dealt_otherwise(self, flow: Flow) -> Flow:
        """The flow with each micro-batch at another replica; itself where there is no other."""
        has_buffers = any(True for _ in model_buffers(self._models.chunks))
        width = flow.num_replicas if isinstance(flow, Dataflow) else flow.layout.dp
        self._calls += 1
        # What a first call has left in buffers only the replica itself has.
        if width == 1 or (has_buffers and self._calls > 1):
            return flow
        return flow.rotated(spread=not has_buffers)

    def _computed_before(
        self,
        model: MegatronFramework,
        other: Flow,
        flow: Flow,
        run: Callable[[Flow], list[Any]],
        losses_of: Callable[[list[Any]], Losses],
        *,
        trains: bool,
    ) -> Computed:
        """Compute ``other`` and undo its traces, so that ``flow`` comes next."""
        on_gpu = trains and repeated_layer.may_differ(model.chunks[0])
        try:
            with ExitStack() as inside:
                inside.enter_context(self._undone(model, other, trains=trains))
                layer = repeated_layer.first_call(model.middle_layer)
                calls = inside.enter_context(layer) if on_gpu else []
                losses = losses_of(run(other))
                if trains and not _is_reduced(model):
                    # Neither schedule nor loop has done so yet.
                    for chunk in model.chunks:
                        chunk.finish_grad_sync()
                found = _computed(model, losses, trains=trains)
                if on_gpu:
                    self._compare_kernels(calls)
        except torch.OutOfMemoryError as error:
            raise ConfigurationError(
                "the first step, dealt otherwise as after a loss, does not fit into the device's "
                f"memory ({str(error).splitlines()[0]}), and a loss would end the job: make room, "
                "set consistency to fast, or set rehearse_first_step to off"
            ) from None
        model.take_place(flow)
        stopwatch = self._worker.stopwatch
        stopwatch.drop_step()
        stopwatch.operations.begin_step()
        return found

    @contextmanager
    def _undone(self, model: MegatronFramework, other: Flow, *, trains: bool) -> Iterator[None]:
        with (
            set_within(self, "is_running", True),
            rng.other_draws(self._seed, self._worker.completed),
            self._passes_undone(),
            model.passes_dropped(other, trains=trains),
        ):
            yield

    def _compare_kernels(self, calls: Sequence[repeated_layer.LayerCall]) -> None:
        """Run the first of these calls twice alike (collective over WORLD and in the layer).

        Raises ConfigurationError, alike on all workers, where bits differ and that ends the job.
        """
        worker, call = self._worker, next(iter(calls), None)
        began_s = time.monotonic()
        found = None if call is None else call.difference(rng.undone_draws)
        mine = None if call is None or found is None else f"{_name(call.layer)}, and {found}"
        different = {slot: one for slot, one in self._of_all(mine).items() if one is not None}
        helps: list[str] = []
        if different:
            # All try, as layers of a TP group compute together; what helps has to help everywhere.
            tried = self._of_all(None if call is None else call.repeating(rng.undone_draws))
            lists = [one for one in tried.values() if one is not None]
            helps = [switch for switch in lists[0] if all(switch in one for one in lists)]
        worker.events.emit(
            "layer_repeated",
            slot=worker.slot,
            step=worker.completed,
            equal=not different,
            difference=mine,
            helps=helps,
            seconds=time.monotonic() - began_s,
        )
        if different:
            slot, what = min(different.items())
            advice = repeated_layer.advice(None if call is None else call.layer, helps)
            self._end_or_go_on(
                f"before step {worker.completed}, the first of this job, worker {slot} ran twice, "
                f"on the same input, {what} differs: its kernels do not repeat their bits, so a "
                f"loss would change results: {advice}"
            )

    def _of_all(self, mine: Any) -> dict[int, Any]:
        """Gather what every worker has found, by slot (collective over WORLD)."""
        return dict(zip(self._worker.ranks, gathered(mine), strict=True))

    def _exchanged(self, first: Computed, second: Computed) -> dict[int, FirstStepReport]:
        """Gather every worker's results, by slot (collective over WORLD)."""
        differing = (name for name, one in second.gradients.items() if one != first.gradients[name])
        everyone = self._of_all((first.losses, second.losses, next(differing, None)))
        return {slot: FirstStepReport(*one) for slot, one in everyone.items()}

    def _judge(
        self, exchanged: Mapping[int, FirstStepReport], *, in_place: bool, seconds: float
    ) -> None:
        worker = self._worker
        difference = first_difference(exchanged)
        worker.events.emit(
            "first_step_rehearsed",
            slot=worker.slot,
            step=worker.completed,
            dealt="as before" if in_place else "otherwise",
            equal=difference is None,
            difference=difference,
            seconds=seconds,
        )
        if difference is None:
            return
        self._end_or_go_on(
            f"{_sentence(difference, worker.completed, in_place=in_place)}; `elaswave rehearse "
            "COMMAND` compares all of it"
        )

    def _end_or_go_on(self, sentence: str) -> None:
        """End the job with the sentence, or go on in fast mode: as the setting says."""
        worker = self._worker
        if worker.config.rehearse_first_step == "stop":
            raise ConfigurationError(
                f"{sentence}, or set rehearse_first_step to continue, with which the job goes on "
                "in fast mode"
            )
        worker.remember(inexact=True)
        for model in self._models.models:
            model.reduction.go_on_fast()
        self._is_wanted = False
        if worker.owns_rank_0:
            say(f"{sentence}; the job goes on in fast mode: bits are not promised")


def _name(layer: torch.nn.Module) -> str:
    number = getattr(layer, "layer_number", None)
    return "the model" if number is None else f"layer {number}"


def _computed(model: MegatronFramework, losses: Losses, *, trains: bool) -> Computed:
    digests = {number: digest_of_reports([one]) for number, one in losses.items()}
    return Computed(digests, model.gradient_digests() if trains and _is_reduced(model) else {})


def _is_reduced(model: MegatronFramework) -> bool:
    """Return whether a call reduces the gradients itself, rather than the loop after it."""
    return model.chunks[0].config.finalize_model_grads_func is not None


def first_difference(exchanged: Mapping[int, FirstStepReport]) -> str | None:
    """Name the first loss that differs, or else the first gradient; None where all is equal.

    >>> one = FirstStepReport({1: 5}, {0: 7}, None)
    >>> first_difference({0: one, 1: FirstStepReport({0: 7}, {1: 6}, None)})
    'the loss of micro-batch 1, which worker 0 ran first, and then worker 1,'
    >>> first_difference({0: FirstStepReport({0: 7}, {0: 7}, "decoder.final_layernorm.weight")})
    'the reduced gradient of decoder.final_layernorm.weight'
    """
    first = {
        number: (slot, one) for slot, mine in exchanged.items() for number, one in mine[0].items()
    }
    second = {
        number: (slot, one) for slot, mine in exchanged.items() for number, one in mine[1].items()
    }
    for number, (slot, digest) in sorted(second.items()):
        before, wanted = first[number]
        if digest != wanted:
            who = f"worker {before} ran first, and then worker {slot},"
            return f"the loss of micro-batch {number}, which {who}"
    gradients = (
        mine.gradient for _, mine in sorted(exchanged.items()) if mine.gradient is not None
    )
    return next((f"the reduced gradient of {name}" for name in gradients), None)


def _sentence(difference: str, step: int, *, in_place: bool) -> str:
    """Say what differs, in which step, where that comes from, and what to do."""
    again = "run twice" if in_place else "run by other workers than usual as well"
    if difference.startswith("the loss"):
        cause = (
            "a forward pass follows from something beside its micro-batch (a variable of the "
            "script, a generator of its own, what the last pass has left), or from kernels that do "
            "not repeat their bits: draw by torch, NumPy or random, give what counts calls to "
            "elaswave_plugin.keep(name, object), or make it follow from job.iteration"
        )
    else:
        cause = (
            "all losses are equal, so that a backward pass follows from something beside its "
            "micro-batch, or its kernels do not repeat their bits: call "
            "torch.use_deterministic_algorithms(True), and set CUBLAS_WORKSPACE_CONFIG=:4096:8 and "
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0"
        )
    return f"step {step}, the first of this job, was {again}, and {difference} differs: {cause}"
