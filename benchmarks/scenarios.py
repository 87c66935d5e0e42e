"""The losses after which throughput is compared, by name, and what each ratio has to reach."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from statistics import median
from typing import Any

from elaswave_plugin.core.layout.layout import ParallelLayout, launch_layout
from elaswave_plugin.core.planner.joint import concentration
from elaswave_plugin.core.planner.prediction import StepWork
from elaswave_plugin.errors import ConfigurationError

ONE, SPREAD = "one", "spread"
REROUTING, DROPPING, SHARE = "over_rerouting", "over_dropping", "of_live_share"
SHARE_CLOCKS = "of_live_share_clocks_1.1"


def most_gain(layout: ParallelLayout, *, microbatches_each: float) -> float:
    """Gmax = (m D0 / min n + P - 1) / (m / live + P - 1): what level stages gain over rerouting.

    Early stages that have more to do than late ones save some of the P - 1, and so gain more.
    """
    live, _ = concentration(layout)
    fill = len(layout.stages) - 1
    slowest = microbatches_each * layout.dp / min(layout.widths)
    return (slowest + fill) / (microbatches_each / live + fill)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Losses in one stage, or each in another stage and replica.

    ``slots``: micro-batches of a replica in a step.
    """

    pp: int
    dp: int
    layers: int
    slots: int
    place: str
    losses: int

    @property
    def name(self) -> str:
        """The name that `--scenario` takes."""
        return f"pp{self.pp}dp{self.dp}-m{self.slots}-{self.place}-{self.losses}"

    @property
    def is_small(self) -> bool:
        """True if it can be run in processes of one machine."""
        return self.pp * self.dp <= 16

    @property
    def whole_replicas(self) -> int:
        """Count pipelines of the launch without a loss: the n-th loss is in replica n."""
        return self.dp - self.losses

    @property
    def work(self) -> StepWork:
        """A step of it, of micro-batches of one sample."""
        return StepWork(
            num_microbatches=self.dp * self.slots, microbatch_size=1, launch_width=self.dp
        )

    @property
    def stages(self) -> tuple[int | None, ...]:
        """The stages in which the losses may be; None: spread."""
        return tuple(range(self.pp)) if self.place == ONE else (None,)

    @property
    def usual_stage(self) -> int | None:
        """The stage whose losses are measured."""
        return (self.pp - 1) // 2 if self.place == ONE else None

    def layout(self) -> ParallelLayout:
        """The layout at launch."""
        return launch_layout(tp=1, pp=self.pp, dp=self.dp, num_layers=self.layers)

    def dead(self, stage: int | None) -> tuple[int, ...]:
        """The slots that are lost, for one of ``stages``."""
        stages = self.layout().stages
        return tuple(
            stages[number % self.pp if stage is None else stage][number].slots[0]
            for number in range(self.losses)
        )

    def facts(self, stage: int | None) -> dict[str, Any]:
        """Return names, sizes and ceilings of a row; no ceilings where a stage is empty."""
        after = self.layout().without(self.dead(stage))
        ceilings: dict[str, Any] = {"live_share": sum(after.widths) / (self.pp * self.dp)}
        if all(after.widths):
            _, rho = concentration(after)
            ceilings |= {"rho": rho, "gmax": most_gain(after, microbatches_each=self.slots)}
        return {
            "scenario": self.name,
            "shape": f"PP{self.pp}xDP{self.dp} L{self.layers} m{self.slots}",
            "losses": self.losses,
            "place": self.place,
            "stage": stage,
            "lost": list(self.dead(stage)),
            "rho": None,
            "gmax": None,
            **ceilings,
        }


@dataclass(frozen=True, slots=True)
class Bar:
    """The least that a ratio of the rows of one scenario has to reach."""

    scenario: str
    ratio: str
    least: float


def scenarios() -> dict[str, Scenario]:
    """All by name: PP2 x DP2 and PP4 x DP4 with 1 to 4 losses, and 96 workers with 1, 6 and 8."""
    shapes: list[tuple[int, int, int, int, tuple[int, ...], tuple[int, ...]]] = []
    shapes += [(2, 2, 24, slots, (1, 2), (2,)) for slots in (8, 16)]
    shapes += [(4, 4, 24, slots, (1, 2, 3, 4), (2, 3, 4)) for slots in (8, 16)]
    shapes += [(8, 12, 48, 16, (1, 6, 8), (6, 8))]
    found = [
        Scenario(pp=pp, dp=dp, layers=layers, slots=slots, place=place, losses=losses)
        for pp, dp, layers, slots, in_one, spread in shapes
        for place, counts in ((ONE, in_one), (SPREAD, spread))
        for losses in counts
    ]
    return {one.name: one for one in found}


def chosen(names: list[str]) -> list[Scenario]:
    """The scenarios of these names; raises ConfigurationError for one that there is not."""
    known = scenarios()
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=3, cutoff=0.0)
            raise ConfigurationError(
                f"--scenario is {name!r}, wanted one of {len(known)} such as {', '.join(near)}"
            )
    return [known[name] for name in dict.fromkeys(names)]


def bars() -> Iterator[Bar]:
    """Those for coupled backwards; spread losses of one are those of the first stage."""
    for slots in (8, 16):
        yield Bar(f"pp2dp2-m{slots}-one-1", REROUTING, 1.35)
    yield Bar("pp4dp4-m16-one-1", REROUTING, 1.03)
    yield Bar("pp4dp4-m16-one-2", REROUTING, 1.42)
    for name in ("pp4dp4-m16-one-1", "pp4dp4-m16-one-2", "pp4dp4-m16-spread-2"):
        yield Bar(name, SHARE, 0.90)
    big = "pp8dp12-m16"
    for place, losses, least in ((ONE, 6, 1.45), (ONE, 8, 2.0), (SPREAD, 6, 1.05)):
        yield Bar(f"{big}-{place}-{losses}", REROUTING, least)
    for place in (ONE, SPREAD):
        yield Bar(f"{big}-{place}-6", DROPPING, 1.55)
        yield Bar(f"{big}-{place}-8", DROPPING, 2.1)
    for rest in ("one-1", "one-6", "one-8", "spread-6", "spread-8"):
        yield Bar(f"{big}-{rest}", SHARE, 0.92)
        yield Bar(f"{big}-{rest}", SHARE_CLOCKS, 0.96)


def judged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every bar that rows of its scenario have a value for; it holds where all of them do."""
    found = []
    for bar in bars():
        here = [row for row in rows if row["scenario"] == bar.scenario]
        values = [row[bar.ratio] for row in here if row.get(bar.ratio) is not None]
        if values:
            found.append(
                {
                    "scenario": bar.scenario,
                    "ratio": bar.ratio,
                    "wanted": bar.least,
                    "worst": min(values),
                    "median": median(values),
                    "best": max(values),
                    "holds": min(values) >= bar.least,
                }
            )
    return found
