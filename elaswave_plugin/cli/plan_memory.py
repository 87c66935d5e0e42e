"""The bytes that a worker of each stage keeps before and after a loss, for `elaswave plan`.

Activations are not counted: the planner keeps them below `--memory-gib` by its windows.
"""

from dataclasses import dataclass

from elaswave_plugin.core.layout.layout import ParallelLayout
from elaswave_plugin.core.planner.costs import CostModel

_GIB = 2**30
# The buffers that a worker's snapshots alternate between.
_BUFFERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerBytes:
    """A worker's weights, gradients and optimizer state, and its snapshots in host memory."""

    state: float
    snapshots: float

    def __str__(self) -> str:
        return f"{self.state / _GIB:.2f} GiB and {self.snapshots / _GIB:.2f} GiB of snapshots"


def bytes_of_stages(layout: ParallelLayout, costs: CostModel) -> tuple[WorkerBytes, ...]:
    """Count a worker of each stage; the optimizer state of a stage is shared out by its width."""
    found = []
    for stage, replicas in enumerate(layout.stages):
        spans = layout.layers(stage)
        kept, shared = (
            sum(float(totals[stop] - totals[start]) for start, stop in spans)
            for totals in (costs.totals("resident_bytes"), costs.totals("optimizer_bytes"))
        )
        share = shared / len(replicas)
        found.append(WorkerBytes(state=kept + share, snapshots=_BUFFERS * share))
    return tuple(found)


def change_text(before: ParallelLayout, after: ParallelLayout, costs: CostModel) -> str:
    """Return a line a stage: the bytes of a worker before and after."""
    pairs = zip(bytes_of_stages(before, costs), bytes_of_stages(after, costs), strict=True)
    return "\n".join(f"stage {stage}: {old} -> {new}" for stage, (old, new) in enumerate(pairs))
