"""Which replica of each stage runs which micro-batches, and in what order, in a ragged pipeline.

Redeal: whole micro-batches are dealt anew over every stage's live replicas, in slots as wide as the
narrowest stage. Reroute: those of lost replicas are spread over their peers. Micro-batches stay
whole in both, so every stage and tp position has the exact order of sums of ``core/exact.py``.

>>> from elaswave_plugin.core.layout import launch_layout
>>> healthy = launch_layout(tp=1, pp=2, dp=2, num_layers=2)
>>> flow = flow_of(layout=healthy.without([1]), num_microbatches=4)
>>> print(flow)
stage 0: w0: 0 1 2 3; stage 1: w2: 0 2 | w3: 1 3
>>> from elaswave_plugin.core.schedule import show_ops
>>> print(show_ops(flow.ops(3)))
F1 B1 F3 B3
>>> flow_of(layout=healthy, num_microbatches=4).is_healthy, flow.is_healthy
(True, False)
"""

from dataclasses import dataclass
from typing import Literal

from elaswave_plugin.core.dataflow import Dataflow
from elaswave_plugin.core.exact import replica_microbatches
from elaswave_plugin.core.groups import Seat, seats_of
from elaswave_plugin.core.layout import ParallelLayout
from elaswave_plugin.core.planner.microbatch_split import MicrobatchSplit, redeal, reroute
from elaswave_plugin.core.schedule import Piece, WorkerOps, window_ops, window_sizes

Policy = Literal["redeal", "reroute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFlow:
    """The assignment of a step: ``pieces[stage][replica order]``, one micro-batch a piece.

    Micro-batch k belongs to replica k mod ``layout.dp`` of the launch for ever.
    """

    layout: ParallelLayout
    num_microbatches: int
    pieces: tuple[tuple[tuple[Piece, ...], ...], ...]

    def __str__(self) -> str:
        return "; ".join(
            f"stage {stage}: "
            + " | ".join(
                f"{'+'.join(f'w{slot}' for slot in group.slots)}:"
                f" {' '.join(str(piece.start) for piece in pieces)}"
                for group, pieces in zip(groups, of_stage, strict=True)
            )
            for stage, (groups, of_stage) in enumerate(
                zip(self.layout.stages, self.pieces, strict=True)
            )
        )

    def seat(self, slot: int) -> Seat | None:
        """The place of a worker; None for a free one."""
        return seats_of(self.layout).get(slot)

    def microbatches(self, slot: int) -> tuple[int, ...]:
        """Micro-batches of a worker in the order of their forwards; none for a free one."""
        seat = self.seat(slot)
        if seat is None:
            return ()
        return tuple(piece.start for piece in self.pieces[seat.stage][seat.order])

    def ops(self, slot: int) -> WorkerOps:
        """The ordered operations of a worker that has a place, by the window rule."""
        seat = seats_of(self.layout)[slot]
        window = window_sizes(len(self.layout.stages))[seat.stage]
        return window_ops(self.pieces[seat.stage][seat.order], window=window)

    def peer(self, stage: int, microbatch: int, tp: int) -> int:
        """The slot that runs a micro-batch at a stage, at one tp position."""
        for group, pieces in zip(self.layout.stages[stage], self.pieces[stage], strict=True):
            if any(piece.start == microbatch for piece in pieces):
                return group.slots[tp]
        raise ValueError(f"micro-batch {microbatch} is not dealt at stage {stage}")

    def cell(self, stage: int, tp: int) -> Dataflow:
        """The micro-batches of the workers that share one state, for the exact order of sums."""
        return Dataflow(
            num_microbatches=self.num_microbatches,
            num_replicas=self.layout.dp,
            placement=tuple(
                sorted(
                    (group.slots[tp], tuple(piece.start for piece in pieces))
                    for group, pieces in zip(
                        self.layout.stages[stage], self.pieces[stage], strict=True
                    )
                )
            ),
        )

    @property
    def is_healthy(self) -> bool:
        """Whether every stage has its launch width: then the framework's own schedule runs."""
        return self.layout.is_rectangular


def flow_of(
    *, layout: ParallelLayout, num_microbatches: int, policy: Policy = "redeal"
) -> PipelineFlow:
    """Deal a step's micro-batches over the live replicas of every stage.

    Raises ConfigurationError for a stage without a replica.
    """
    if layout.is_rectangular:
        replicas = tuple(_own(order, layout.dp, num_microbatches) for order in range(layout.dp))
        return PipelineFlow(
            layout=layout,
            num_microbatches=num_microbatches,
            pieces=tuple(replicas for _ in layout.stages),
        )
    split = _split(layout, num_microbatches, policy)
    pieces = split.assignment()
    return PipelineFlow(layout=layout, num_microbatches=num_microbatches, pieces=pieces)


def _own(replica: int, num_replicas: int, num_microbatches: int) -> tuple[Piece, ...]:
    own = replica_microbatches(
        replica, num_replicas=num_replicas, num_microbatches=num_microbatches
    )
    return tuple(Piece(slot, k, k + 1) for slot, k in enumerate(own))


def _split(layout: ParallelLayout, num_microbatches: int, policy: Policy) -> MicrobatchSplit:
    if policy == "reroute":
        return reroute(
            replicas=[[group.replica for group in groups] for groups in layout.stages],
            launch_width=layout.dp,
            num_microbatches=num_microbatches,
            microbatch_size=1,
        )
    return redeal(
        widths=layout.widths,
        num_microbatches=num_microbatches,
        microbatch_size=1,
        slot_width=min(layout.widths),
    )
