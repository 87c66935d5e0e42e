"""The cases of parted nodes: job, pair, direction, and the phase in which the two are parted."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from elaswave_plugin.config import STEP_PHASES
from tests.deepspeed.harness import FP32_BOUND, EngineSpec
from tests.deepspeed.harness import PRELOAD as DEEPSPEED_PRELOAD
from tests.faults.harness import PRELOAD, JobSpec, Outcome, max_relative_difference
from tests.faults.hybrid_matrix import PP2_DP2, TP2_PP2_DP2
from tests.faults.parting import Cut, Parted, check_parted

Launched = Callable[[JobSpec], Outcome]
NODES, STEPS = 4, 8
JOBS: dict[str, JobSpec] = {
    "dp4": JobSpec(nodes=NODES, steps=STEPS),
    "pp2dp2": replace(PP2_DP2, nodes=NODES, steps=STEPS),
    "tp2pp2dp2": replace(TP2_PP2_DP2, nodes=NODES, steps=STEPS),
    **{f"zero{n}": EngineSpec(nodes=NODES, steps=STEPS, stage=n) for n in (1, 2, 3)},
}
PAIRS = {"leader and other": (0, 2), "two others": (2, 3)}
# Of the recovery from another loss, and of a planned departure.
RECOVERY_PHASES = ("agree", "move", "rebind", "replay")
DEPARTURE_PHASES = ("move",)
KILLED_NODE = 1
ALL_PRELOADED = tuple(dict.fromkeys([*PRELOAD, *DEEPSPEED_PRELOAD]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job by name, which two nodes are parted, and what else happens to it."""

    job: str
    pair: str
    one_way: bool
    # "step", "recovery", "departure" or "join", and the phase of it.
    within: str
    phase: str

    def __str__(self) -> str:
        way = "one way" if self.one_way else "both ways"
        named = f"{self.job} {self.pair} {way} {self.within} {self.phase}"
        return named.replace(" ", "-")

    @property
    def spec(self) -> JobSpec:
        """The launch."""
        spec = JOBS[self.job]
        other = KILLED_NODE * spec.nproc // spec.nodes
        match self.within:
            case "recovery":
                return replace(spec, kills=(f"{other}@3:backward",))
            case "departure":
                return replace(spec, changes=(f"{other}@3",))
            case "join":
                # It is lost, and its successor has come before step 5.
                return replace(spec, respawn=1, kills=(f"{other}@2:backward",), awaits=((5, 1),))
            case _:
                return spec

    @property
    def cut(self) -> Cut:
        """The moment."""
        if self.within == "join":
            # The newcomer and the leader, or another one.
            other = PAIRS[self.pair][0]
            return Cut(
                pair=(KILLED_NODE, other),
                phase=self.phase,
                step=0,
                one_way=self.one_way,
                incarnation=1,
            )
        return Cut(pair=PAIRS[self.pair], phase=self.phase, one_way=self.one_way)


def cases() -> Iterator[Case]:
    """All of them."""
    phases = [
        *(("step", phase) for phase in STEP_PHASES),
        *(("recovery", phase) for phase in RECOVERY_PHASES),
        *(("departure", phase) for phase in DEPARTURE_PHASES),
        ("join", "move"),
    ]
    for job, pair, one_way, (within, phase) in itertools.product(
        JOBS, PAIRS, (False, True), phases
    ):
        yield Case(job=job, pair=pair, one_way=one_way, within=within, phase=phase)


def check(case: Case, parted: Parted, *, launched: Launched) -> None:
    """Raise AssertionError where a run does not keep its promise; ``launched``: each job once."""
    spec = case.spec
    other = KILLED_NODE * spec.nproc // spec.nodes
    gone = () if case.within == "step" else (other,)
    check_parted(parted, case.cut, killed=gone)
    undisturbed = replace(JOBS[case.job], nodes=1)
    if not isinstance(spec, EngineSpec):
        assert parted.run.trace() == launched(undisturbed).trace()
        return
    changes = tuple(planned(parted))
    returns = int(any(change.startswith("+") for change in changes))
    twin = launched(replace(undisturbed, changes=changes, respawn=returns))
    assert parted.run.trace() == twin.trace()
    assert max_relative_difference(parted.run, launched(undisturbed)) <= FP32_BOUND


def planned(parted: Parted) -> Iterator[str]:
    """Yield the departures and arrivals that the views of a run make, before the steps they did."""
    restored = {event["epoch"]: event["restored_step"] for event in parted.run.events("recovered")}
    views = [(event["epoch"], event["ranks"]) for event in parted.run.events("view_committed")]
    # A view that another one superseded was recovered from together with that one.
    ended = [(epoch, ranks) for epoch, ranks in views if epoch == 1 or epoch in restored]
    for (_, before), (epoch, after) in itertools.pairwise(ended):
        step = restored[epoch]
        yield from (f"{slot}@{step}" for slot in before if slot not in after)
        yield from (f"+{slot}@{step}" for slot in after if slot not in before)
