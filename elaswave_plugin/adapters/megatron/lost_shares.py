"""The share of lost replicas in what a script sums over its workers: one of these reports it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from torch.utils import _pytree

from elaswave_plugin.ipc.console import say
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.values.plain import gathered

OWN_NUMBERS_ADVICE = (
    "the mean over the whole batch is in steps.jsonl of the run directory, and in W&B"
)


class LostShares:
    """The reports of replicas that have no worker left, on one of their data-parallel group.

    So a sum over that group is the launch's, except for its rounding: of losses, or of losses and
    tokens each by itself. Not where the script's loop asks how many workers there are, and
    not how many replicas: what it divides by that is a mean over those who are left.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        # Whether the script of this worker has asked how many there are, and how many replicas.
        self._is_width_asked = self._are_replicas_asked = False
        # Whether it sums over workers in its loop; otherwise it shows what is its own.
        self._are_summed = False
        # The workers whose share is in what the script was told last, and since it summed last.
        self._told_of = worker.ranks
        self._told_since: set[int] = set()
        self.are_reported = False
        """Whether the last call's were losses, so that whatever is summed of them is right."""

    def note_told(self) -> None:
        """Note that the script is told losses, in which the share of each worker is."""
        self._told_of = self._worker.ranks
        self._told_since.update(self._told_of)

    def note_sum(self, members: Sequence[int]) -> None:
        """Note that the script sums over workers in its loop; say where one lacks a share."""
        self._are_summed = True
        launched, there = self.data_parallel()
        if not {*there} <= {*members}:
            return
        lost = {*launched} - {*there}
        behind, earlier = sorted(lost & {*self._told_of}), sorted(lost & self._told_since)
        self._told_of = self._worker.ranks
        self._told_since.clear()
        if not earlier or self._worker.slot != there[0]:
            return
        when, what = "behind forward_backward", "what the script sums of its losses lacks"
        if not behind:
            when = "since the script has summed over its replicas"
            what = "a sum of losses that it has added up over several steps lacks"
        say(
            f"worker {', '.join(map(str, behind or earlier))} was lost {when}, and {what} that"
            f" share, once: {OWN_NUMBERS_ADVICE}"
        )

    def ask_width(self) -> None:
        """Note that the script asks in its loop how many workers there are."""
        self._is_width_asked = True

    def ask_replicas(self) -> None:
        """Note that it asks how many replicas there are, which are those of the launch."""
        self._are_replicas_asked = True

    @property
    def are_right(self) -> bool:
        """True where no number of the script's can show the loss."""
        return self.are_reported and not self._is_width_asked

    @property
    def are_missing(self) -> bool:
        """True while a worker of the launch is not there; alike on all."""
        return len(self._worker.view.ranks) < len(self._worker.launch_slots)

    def reported(
        self,
        mine: Mapping[int, Any],
        *,
        replica: int,
        of: Callable[[int], Sequence[int]],
        are_sums: bool,
    ) -> list[Any]:
        """Return a replica's reports, with those of lost ones on the worker that has them.

        ``mine``: this worker's, by micro-batch; ``of(replica)``: the micro-batches of one;
        ``are_sums``: whether they are over all replicas already. Those of another replica where
        this one is not run. Collective over WORLD.
        """
        divides_by_workers = self._is_width_asked and not self._are_replicas_asked
        told = gathered([self._are_summed, divides_by_workers or are_sums, *mine.items()])
        every = {number: one for _, _, *items in told for number, one in items}
        launched, _ = self.data_parallel()
        # One of which batches are lost at another stage is run by nobody.
        ran = (one for one in (replica, *range(len(launched))) if {*of(one)} <= {*every})
        own = [every[number] for number in of(next(ran))]
        sizes = {size for report in every.values() for size in _sizes(report)}
        are_summed, are_others = (any(one[place] for one in told) for place in (0, 1))
        are_wanted = self.are_missing and are_summed and not are_others
        self.are_reported = are_wanted and sizes <= {1}
        for lost in self._mine() if are_wanted and sizes <= {1, 2} else ():
            # None are left of batches that only their worker had.
            shares = [every[number] for number in of(lost) if number in every]
            own = [
                _pytree.tree_map(_added, *pair) for pair in zip(own, shares, strict=False)
            ] or own
        return own

    def _mine(self) -> Sequence[int]:
        """The replicas whose share is this worker's: not the first one's, which shows its own."""
        launched, there = self.data_parallel()
        if there[min(1, len(there) - 1)] != self._worker.slot:
            return ()
        return [number for number, slot in enumerate(launched) if slot not in there]

    def data_parallel(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return of which workers this one's data-parallel group was made, and who is there."""
        launched = self._worker.groups.made_of(parallel_state.get_data_parallel_group())
        return launched, [slot for slot in launched if slot in self._worker.view.ranks]

    def scale(self, members: Sequence[int]) -> float:
        """Return what makes the mean of these workers that of the launch."""
        launched, there = self.data_parallel()
        is_data_parallel = self.are_reported and {*members} == {*there}
        return len(members) / len(launched) if is_data_parallel else 1.0


def _sizes(report: Any) -> Iterator[int]:
    """Yield how many numbers each loss of a micro-batch's report has; 0 for what is none."""
    for loss in report.values() if isinstance(report, Mapping) else (report,):
        parts = loss if isinstance(loss, tuple | list) else (loss,)
        yield sum(one.numel() if isinstance(one, torch.Tensor) else 1 for one in parts) * all(
            isinstance(one, torch.Tensor | float | int) for one in parts
        )


def _added(one: Any, other: Any) -> Any:
    return one + (other.to(one.device) if isinstance(one, torch.Tensor) else other)
