"""The settings of one plan: what the planner may do."""

from dataclasses import dataclass

from elaswave_plugin.core.planner.dvfs import ClockTable
from elaswave_plugin.core.planner.microbatch_split import POLICIES
from elaswave_plugin.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRules:
    """The choices that the planner may make.

    ``policies``: dataflows allowed (one: it is forced). ``horizon_s``: how long a plan is expected
    to last; ``least_gain``: share of the step below which no move is worth the trouble.
    ``split_backward``: weight gradients fill bubbles. ``clocks``: None leaves them alone.
    """

    policies: tuple[str, ...] = POLICIES
    move_layers: bool = True
    move_workers: bool = True
    split_backward: bool = False
    horizon_s: float = 600.0
    least_gain: float = 0.005
    clocks: ClockTable | None = None
    power_cap_w: float = float("inf")

    def __post_init__(self) -> None:
        unknown = [policy for policy in self.policies if policy not in POLICIES]
        if unknown or not self.policies:
            raise ConfigurationError(
                f"dataflow is {', '.join(unknown) or 'empty'!r}, wanted {', '.join(POLICIES)}"
            )
        if not self.horizon_s >= 0:
            raise ConfigurationError(f"horizon_s is {self.horizon_s}, wanted a number from 0")
