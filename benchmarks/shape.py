"""The shape of a pipeline job that a benchmark of throughput is about."""

from dataclasses import dataclass

from elaswave_plugin.core.layout import ParallelLayout, launch_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """``slots``: micro-batches of a replica in a step."""

    pp: int
    dp: int
    layers: int
    slots: int

    def __str__(self) -> str:
        return f"PP{self.pp}xDP{self.dp} L{self.layers} m{self.slots}"

    def layout(self) -> ParallelLayout:
        """The layout at launch."""
        return launch_layout(tp=1, pp=self.pp, dp=self.dp, num_layers=self.layers)
