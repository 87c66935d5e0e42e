"""The relief of a worker that runs out of memory while it does more than at the launch.

It does not die: the same members get another view, in which it has less to do. Where no other deal
of the work makes it hold less, the job ends once, with the reason, instead of losing one survivor
after the other.
"""

import re
from collections.abc import Callable, Collection, Mapping
from typing import NoReturn, TypeVar

import torch

from elaswave_plugin.core.agreement.hang import OUTSIDE
from elaswave_plugin.core.layout.worker_facts import OutOfMemory, WorkerFacts
from elaswave_plugin.core.planner.less_work import less_work
from elaswave_plugin.core.planner.pipeline_flow import Flow
from elaswave_plugin.core.recovery_plan.placement import GridPlacement
from elaswave_plugin.errors import ConfigurationError, TooLittleMemoryError
from elaswave_plugin.recovery.place import Place
from elaswave_plugin.snapshot.free_memory import available_bytes

Result = TypeVar("Result")
# Of torch's allocator for the CPU, which raises no class of its own.
_OF_CPU = "DefaultCPUAllocator: "
_WANTED = re.compile(r"allocate ([\d.]+ \w+)")
_FREE = re.compile(r"of which ([\d.]+ \w+) is free")


class Relief:
    """The limits that workers have told, and the one that this worker tells."""

    def __init__(self, worker: Place) -> None:
        self._worker = worker
        self.told: OutOfMemory | None = None
        """It is told in each view from the first time on, also once there are more workers."""
        self._counting: dict[int, OutOfMemory] = {}

    def learn(self, facts: Mapping[int, WorkerFacts], ranks: Collection[int]) -> dict[int, float]:
        """Return the limits that count in a view of these ``ranks``, alike on all workers."""
        told = {slot: one.out_of_memory for slot, one in sorted(facts.items())}
        self._counting = {
            slot: one
            for slot, one in told.items()
            if slot in ranks and one is not None and len(ranks) <= one.width
        }
        return {slot: one.most for slot, one in self._counting.items()}

    def deal(self) -> Flow:
        """Deal the work of a view; raises TooLittleMemoryError where it fits nowhere any more."""
        worker = self._worker
        try:
            return worker.deal(**worker.placement.dealt_over)
        except ConfigurationError as error:
            if not self._counting:
                raise
            ran_out = "; ".join(f"worker {n}: {one.words}" for n, one in self._counting.items())
            raise TooLittleMemoryError(f"{error} ({ran_out}); {self._advice()}") from error

    def step(self, work: Callable[[], Result]) -> Result:
        """Run a step, or a part of one.

        Raises EpochChanged where this worker runs out of memory and is to have less; what it
        raises at the launch's share is the script's own. Raises TooLittleMemoryError.
        """
        try:
            return work()
        except (MemoryError, RuntimeError) as error:
            words = words_of(error)
            # One that has not entered yet is its own loss.
            if words is None or self._worker.detached:
                raise
            most = self._less()
            if most is None and not self._is_narrow:
                raise
            self._ask(most, words)

    def recovery(self, work: Callable[[], Result]) -> Result:
        """Run a part of a recovery, in which state is taken over; raises TooLittleMemoryError."""
        try:
            return work()
        except (MemoryError, RuntimeError) as error:
            words = words_of(error)
            if words is None:
                raise
            self._end(words)

    @property
    def _is_narrow(self) -> bool:
        return len(self._worker.view.ranks) < len(self._worker.launch_slots)

    def _less(self) -> float | None:
        """The most that this worker is to have from now on; None where less would not help."""
        worker = self._worker
        placement, stage = worker.placement, 0
        if isinstance(placement, GridPlacement):
            stage = placement.launch_slots[worker.slot].stage
        return less_work(worker.dataflow, worker.slot, width=len(worker.launch_slots), stage=stage)

    def _ask(self, most: float | None, words: str) -> NoReturn:
        """Have the same members deal the work again; raises EpochChanged."""
        worker, before = self._worker, self.told
        if most is None:
            self._end(words)
        width = len(worker.view.ranks)
        if before is not None:
            most, width = min(most, before.most), max(width, before.width)
        self.told = OutOfMemory(most=most, width=width, words=words)
        evidence = f"worker {worker.slot} ran out of memory ({words}) and gets less to do"
        worker.events.emit(
            "out_of_memory",
            slot=worker.slot,
            step=worker.completed,
            epoch=worker.view.epoch,
            most=most,
            evidence=evidence,
        )
        # The others are in the same step, and wait for this worker.
        worker.member.severed(worker.view.epoch, evidence)
        with worker.member.progress_page.waiting(OUTSIDE):
            worker.member.await_proposal(worker.config.transfer_timeout_s)

    def _end(self, words: str) -> NoReturn:
        worker, live = self._worker, len(self._worker.view.ranks)
        raise TooLittleMemoryError(
            f"out of memory in step {worker.completed}, in a job of {live} workers ({words}): it"
            f" has no more samples in flight than at the launch, with {len(worker.launch_slots)},"
            f" and no other deal of the work makes the rest less; {self._advice()}"
        ) from None

    def _advice(self) -> str:
        count = len(self._worker.launch_slots)
        return (
            f"restart from the last checkpoint with {count} workers, with smaller micro-batches, or"
            " with recomputed activations"
        )


def words_of(error: BaseException) -> str | None:
    """Say what an allocator was asked for, and what there is; None for any other error.

    >>> error = torch.OutOfMemoryError("Tried to allocate 2.00 GiB, of which 1.25 GiB is free.")
    >>> words_of(error)
    '2.00 GiB wanted, 1.25 GiB free on its device'
    >>> words_of(RuntimeError("sizes do not match"))
    """
    text = str(error)
    on_device = isinstance(error, torch.OutOfMemoryError)
    if not on_device and not isinstance(error, MemoryError) and _OF_CPU not in text:
        return None
    wanted, free = _WANTED.search(text), _FREE.search(text)
    left = free[1] if free else f"{available_bytes() / 2**30:.3g} GiB"
    where = "its device" if on_device else "its node"
    return f"{wanted[1] if wanted else 'more'} wanted, {left} free on {where}"
