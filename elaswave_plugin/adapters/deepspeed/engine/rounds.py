"""Portions of exact mode: in each round of a step the micro-batches of one replica of the launch.

A worker that has replicas of lost ones makes a step in several rounds, its own replica in the last
one. All workers make as many; one with fewer replicas computes nothing in the first ones. So
batches, draws and sums are those of the launch. To a script a round that another one follows is
what a step is that a loss has taken: it is not complete, and begins again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from elaswave_plugin.adapters.deepspeed.engine.kept_passes import KeptPasses
from elaswave_plugin.adapters.deepspeed.engine.portions import Portions
from elaswave_plugin.adapters.deepspeed.zero.replica_sums import ReplicaSums
from elaswave_plugin.core.step.dataflow import Dataflow, deal
from elaswave_plugin.core.step.loss_parts import Interval
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.recovery.place import Deal
from elaswave_plugin.recovery.worker import Worker


class Rounds(Portions):
    """The present round of one worker, and what the replicas before it have come to."""

    keeps_micro_batches = True
    why_buffers_stay = 'exact mode would need one of each replica; "consistency": "fast" does not'

    def __init__(
        self,
        worker: Worker,
        engine: Any,
        *,
        width: int,
        num_samples: int,
        announce: Callable[[str], None],
    ) -> None:
        """``announce(phase)`` is told that gradients are about to be summed."""
        super().__init__(worker, width=width, num_samples=num_samples)
        self._engine = engine
        self._announce = announce
        self._sums = ReplicaSums(engine, width=width)
        # Where the step begins, in the engine's count.
        self._micro_steps = 0
        # By replica: the loss of each micro-batch. By number of the call, and replica: values.
        self._losses: dict[int, torch.Tensor] = {}
        # The micro-batch of the round, and by replica the losses of those whose sums are here; the
        # replica to whose sums a pass adds now.
        self._part = 0
        self._done: dict[int, list[torch.Tensor]] = {}
        self._open: int | None = None
        self._kept = KeptPasses(worker)
        self._values: list[dict[int, torch.Tensor]] = []
        self._asked = 0

    @property
    def deal(self) -> Deal:
        """Return the function that deals the replicas of the launch, as wholes."""
        return partial(deal, num_microbatches=self._width)

    # ---- whose micro-batches --------------------------------------------------------------------

    @property
    def _flow(self) -> Dataflow:
        flow = self._worker.dataflow
        assert isinstance(flow, Dataflow)
        return flow

    @property
    def _replica(self) -> int | None:
        """The replica of this round; None where this worker has none."""
        own, *hosted = self._flow.microbatches(self._worker.slot)
        turns = [*hosted, own]
        first = len(self.each()) - len(turns)
        return turns[self.number - first] if self.number >= first else None

    @property
    def is_void(self) -> bool:
        """True if this worker has nothing to compute in the present round."""
        return self._replica is None

    @property
    def is_last(self) -> bool:
        """True if this round completes the step."""
        return self.number == self.each()[-1]

    @property
    def _hosts(self) -> list[int]:
        """The rank that runs each replica."""
        slots = {one: slot for slot, replicas in self._flow.placement for one in replicas}
        return [self._worker.ranks.index(slots[one]) for one in range(self._width)]

    def interval(self, num_samples: int) -> Interval:
        """Return the place of the round's micro-batch among samples of all."""
        own, *_ = self._flow.microbatches(self._worker.slot)
        replica = self._replica
        return self.launch_intervals(num_samples)[own if replica is None else replica]

    @property
    def has_launch_shares(self) -> bool:
        """True: those that are left have several micro-batches one after the other."""
        return True

    def weight(self, num_samples: int) -> float:
        """Return that of any micro-batch."""
        return 1.0

    # ---- a step ---------------------------------------------------------------------------------

    def each(self) -> range:
        """The numbers of the rounds of a step: as many as a worker has replicas at most."""
        return range(max(len(replicas) for _, replicas in self._flow.placement))

    def begin(self, iteration: int) -> int:
        """A batch is served, behind others of the step; returns its number in the round."""
        if iteration == 0:
            self.number = self.before = self._asked = 0
            self._micro_steps = int(self._engine.micro_steps)
            self._losses, self._values = {}, []
            self._done = self._kept.taken_up(self._flow)
            self._sums.begin({one: self._kept.sums[one] for one in self._done})
            self._kept.begin()
        return iteration - self.before

    def go(self, number: int, *, batches: int, losses: Sequence[torch.Tensor]) -> None:
        """Be in a round, behind ``batches`` of the step; ``losses`` of the one before."""
        self._note(losses)
        self.number, self.before, self._asked = number, batches, 0
        self._engine.micro_steps = self._micro_steps

    def _note(self, losses: Sequence[torch.Tensor]) -> None:
        if self._replica is not None and losses:
            self._losses[self._replica] = torch.stack([*losses])

    def select(self, part: int) -> None:
        """Passes of a micro-batch of this round follow."""
        self._part = part
        if self._replica is not None and not self._is_native:
            self._sums.select(self._replica, part)

    @property
    def known(self) -> Sequence[torch.Tensor] | None:
        """The losses of a micro-batch that is not computed here; None of one that is."""
        if self._replica is None:
            return ()
        done = self._done.get(self._replica, [])
        return done[self._part :][:1] or None

    @contextmanager
    def passing(self, loss: torch.Tensor) -> Iterator[None]:
        """A backward pass in this block, which is completed before a view is heard."""
        replica = self._replica
        if self._is_native or replica is None:
            yield
            return
        keeps = not self._sums.folds_passes
        self._open = replica
        self._worker.member.go_on(keeps)
        try:
            with self._sums.apart():
                yield
        finally:
            self._worker.member.go_on(False)
        self._open = None
        if keeps:
            self._done.setdefault(replica, []).append(loss)

    def reduce(self) -> None:
        """Have gradients averaged where they are due behind a micro-batch."""
        due = self._sums.folds_passes or self._engine.is_gradient_accumulation_boundary()
        if self.is_last and due and not self._is_native:
            self._announce("reduce")
            self._sums.reduce(self._hosts)
            self._done = {}

    @property
    def _is_native(self) -> bool:
        """True where DeepSpeed reduces within backward passes, in the order of the launch."""
        within = self._sums.folds_passes or bool(self._engine.zero_overlap_comm())
        return self._flow.is_healthy and within

    def interrupted(self) -> None:
        """A recovery begins: keep the sums of passes that are complete."""
        self.number = self.before = 0
        if self._open is not None:
            self._done.pop(self._open, None)
        self._kept.keep(self._sums, self._done)
        self._open, self._done = None, {}

    # ---- numbers of all replicas ----------------------------------------------------------------

    @property
    def num_averaged(self) -> int:
        """The replicas of the launch."""
        return self._width

    def losses(self, last: Sequence[torch.Tensor]) -> list[float]:
        """Return the loss of each micro-batch, the mean over replicas (collective over WORLD)."""
        self._note(last)
        return (self._of_all(self._losses) / self._width).tolist()

    def mean(self, value: torch.Tensor, *, weight: float, is_behind: bool) -> torch.Tensor:
        """The mean over all replicas, once they all have theirs (collective over WORLD then).

        Raises ConfigurationError for one that may be a part of the loss, which other rounds have
        had already.
        """
        if not (is_behind or self.is_void):
            raise ConfigurationError(
                "elaswave_plugin.deepspeed.mean is called before engine.backward, and in exact mode"
                " the workers that are left run the micro-batches of lost ones before their own:"
                ' call it behind, or set "consistency" to "fast"'
            )
        if self._asked == len(self._values):
            self._values.append({})
        known = self._values[self._asked]
        self._asked += 1
        if self._replica is not None:
            known[self._replica] = value
        return self._of_all(known) / self._width if self.is_last else value

    def _of_all(self, known: dict[int, torch.Tensor]) -> torch.Tensor:
        """Return the sum over all replicas, in their order, of what workers know of theirs."""
        like = next(iter(known.values()))
        table = like.new_zeros(self._width, *like.shape)
        for replica, value in known.items():
            table[replica] = value
        dist.all_reduce(table)
        total = table[0]
        for value in table[1:]:
            total = total + value
        return total


def portions_of(
    worker: Worker, engine: Any, *, width: int, announce: Callable[[str], None]
) -> Portions:
    """Return the portions of a worker, by the consistency that the job has."""
    num_samples = width * int(engine.train_micro_batch_size_per_gpu())
    if worker.config.consistency == "exact":
        if worker.reserve:
            raise ConfigurationError(
                f"--reserve is {worker.reserve}, and a worker beyond the launch would have no"
                ' replica in exact mode: leave it out, or set "consistency" to "fast"'
            )
        return Rounds(worker, engine, width=width, num_samples=num_samples, announce=announce)
    return Portions(worker, width=width, num_samples=num_samples)
