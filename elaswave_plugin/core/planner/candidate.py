"""One simulated plan: dataflow, width moves and cuts, with what they cost and give."""

from dataclasses import dataclass

from elaswave_plugin.core.planner.prediction import DataflowChoice
from elaswave_plugin.core.planner.width_moves import WidthMove


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One simulated plan; ``benefit_s`` over the horizon, against the best plan without moves.

    ``extra``: slots in flight beyond 1F1B's, None for the greedy order. ``pause_s``: until weights
    have moved; ``follow_s``: until optimizer state has, behind the compute.
    """

    choice: DataflowChoice
    moves: tuple[WidthMove, ...]
    cuts: tuple[int, ...]
    extra: int | None
    windows: tuple[int, ...]
    seconds: float
    moved_bytes: float
    pause_s: float
    follow_s: float
    benefit_s: float = 0.0

    @property
    def is_greedy(self) -> bool:
        """True if operations go in greedy order; ``windows`` decide where there is a choice."""
        return self.extra is None

    @property
    def order(self) -> str:
        """The order of operations as text."""
        return "greedy" if self.is_greedy else f"window +{self.extra}"

    def __str__(self) -> str:
        cuts = " ".join(map(str, self.cuts))
        return (
            f"{self.seconds:10.4g} s  {self.choice!s:12} {self.order:9}"
            f"  {len(self.moves)} width moves  cuts {cuts}"
            f"  {self.moved_bytes / 2**20:.4g} MiB  pause {self.pause_s:.3g} s"
        )
