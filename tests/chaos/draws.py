"""The scenario that a seed draws for a kind of job: its faults, their steps, phases and order."""

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from elaswave_plugin.config import RECOVERY_PHASES, STEP_PHASES
from tests.deepspeed.harness import EngineSpec
from tests.deepspeed.test_pipeline import PP2_DP2 as ENGINE_PIPELINE
from tests.faults.harness import PRELOAD, JobSpec
from tests.faults.hybrid_matrix import PP2_DP2, PP2_VPP2_DP2, TP2_PP2_DP2

STEPS = 48
EVALUATES_EVERY, SAVES_EVERY = 4, 9
OPTIONS = (
    f"--eval-interval={EVALUATES_EVERY}",
    "--eval-iters=1",
    "--save=checkpoints",
    f"--save-interval={SAVES_EVERY}",
    # So long may a recovery stand still before the one that hangs in it is found, and what no
    # three steps have measured.
    "--elaswave-transfer-timeout-s=10",
    "--elaswave-hang-start-timeout-s=10",
)
# In a save a loop looks like work, for half an hour.
SAVE_PHASES = ("save", "finalize")
ENTRY_PHASES = ("startup", "agree", "edit", "move", "rebind", "verify")
HANGS = ("stop", "loop", "gil")
# Divisible by any number of workers that a job here has, so that every one is as likely.
PICKS = 840


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One fault, or what else happens to a job; by whom it strikes is found in the running job.

    Before step ``step`` it does not happen; in it, it strikes worker number ``pick`` modulo their
    count, and after it whoever comes first to ``phase``. ``after``: the number of the event which
    has to have happened before; ``on_entry``: it strikes who is on its way into the job.
    """

    number: int
    kind: str
    step: int
    phase: str = ""
    pick: int = 0
    after: int | None = None
    on_entry: bool = False

    def __str__(self) -> str:
        words = f"{self.number}: {self.kind} in step {self.step}"
        words += f" {self.phase}" if self.phase else ""
        words += " on the way in" if self.on_entry else ""
        return words + (f" after {self.after}" if self.after is not None else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of job: its launch, and how few workers it goes on with."""

    spec: JobSpec
    floor: int
    evaluates: bool = False
    nodes: tuple[int, ...] = (1,)
    # So many workers come in at once where it grows; 0: it does not.
    grows_by: int = 0
    # Its node has a zygote of its own, which may be killed too.
    has_zygote: bool = False
    # A byte flips in a snapshot of which its node has no other copy, and the step before is read:
    # not where another stage may have sealed the next step over that, as the job stops then.
    flips: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A job and what happens to it."""

    seed: int
    spec: JobSpec
    events: tuple[Event, ...]
    standby: bool = False
    grows_by: int = 0

    def __str__(self) -> str:
        spec = self.spec
        options = " ".join((*spec.launcher, *spec.options))
        head = f"{spec.nproc} workers on {spec.nodes} nodes, {spec.steps} steps {options}"
        return "\n".join([head.strip(), *(f"  {event}" for event in self.events)])

    def for_workers(self) -> list[dict[str, Any]]:
        """The events as the workers read them."""
        return [asdict(event) for event in self.events]


def _exact(spec: JobSpec, **more: object) -> JobSpec:
    common = {"steps": STEPS, "dump": "last", "respawn": 10, "slow_workers": "act"}
    return replace(spec, options=(*spec.options, *OPTIONS), **common, **more)  # type: ignore[arg-type]


def _engine(stage: int) -> Kind:
    spec = EngineSpec(stage=stage, steps=STEPS, dump="last", respawn=10)
    return Kind(spec=spec, floor=1, nodes=(1, 4))


def kinds() -> dict[str, tuple[Kind, ...]]:
    """The kinds of jobs by name; of several of one name a seed takes one."""
    pipelines = replace(
        ENGINE_PIPELINE, nproc=6, stage=1, global_batch=24, steps=STEPS, dump="last", respawn=0
    )
    return {
        "dp": (Kind(spec=_exact(JobSpec()), floor=1, evaluates=True, nodes=(1, 4), grows_by=1),),
        "hybrid": (
            Kind(spec=_exact(PP2_DP2), floor=2, evaluates=True, nodes=(1, 4), grows_by=2),
            # Interleaved stages take nobody from each other.
            Kind(spec=_exact(PP2_VPP2_DP2), floor=3, evaluates=True),
            Kind(spec=_exact(TP2_PP2_DP2), floor=5, evaluates=True, nodes=(1, 4)),
        ),
        "zygote": (Kind(spec=_exact(JobSpec()), floor=1, evaluates=True, has_zygote=True),),
        **{f"zero{stage}": (_engine(stage),) for stage in (1, 2, 3)},
        # Of three pipelines one is left whole, whichever two workers are lost.
        "deepspeed-pipeline": (Kind(spec=pipelines, floor=4, flips=False),),
    }


def undisturbed(spec: JobSpec) -> JobSpec:
    """The same job on one node, which nothing happens to and nobody joins."""
    return replace(spec, nodes=1, launcher=(), sabotage="", slow_workers="name")


def draw(name: str, seed: int) -> Scenario:
    """The scenario of a seed: three to eight events, the same ones every time."""
    dice = random.Random(f"{name} {seed}")
    return _Draw(dice, dice.choice(kinds()[name]), seed).scenario()


class _Draw:
    """Draws events, and counts what they may cost: a job is to live, if it is not to be ruined."""

    def __init__(self, dice: random.Random, kind: Kind, seed: int) -> None:
        self._dice, self._kind, self._seed = dice, kind, seed
        self._nodes = dice.choice(kind.nodes)
        self._returns = kind.spec.respawn > 0
        self._has_standbys = self._returns and dice.random() < 0.25
        self._standbys = self._nodes * self._has_standbys
        self._reserve = kind.grows_by if dice.random() < 0.35 else 0
        # So many may be away at once, and so many are away for good.
        self._away = self._gone = 0
        self._step = dice.randint(1, 4)
        self._events: list[Event] = []

    def scenario(self) -> Scenario:
        wanted = self._dice.randint(3, 8)
        ruined = self._dice.random() < 0.15
        while len(self._events) < wanted and self._step < STEPS - 12:
            self._add(self._dice.choice([*self._possible()]))
            self._step += self._dice.randint(2, 5)
        if ruined and self._nodes > 1 and self._width() - self._away >= 3:
            self._event("ruin", phase=self._phase())
        elif self._returns:
            self._event("whole")
        launcher = ("--standby=1",) if self._has_standbys else ()
        reserve = (f"--reserve={self._kind.grows_by}",) if self._grows() else ()
        preload = (f"--preload={','.join(PRELOAD)}",) if self._kind.has_zygote else ()
        launcher = (*launcher, *reserve, *preload)
        spec = replace(self._kind.spec, nodes=self._nodes, launcher=launcher)
        return Scenario(
            seed=self._seed,
            spec=spec,
            events=tuple(self._events),
            standby=self._has_standbys,
            grows_by=self._kind.grows_by,
        )

    def _grows(self) -> bool:
        return any(event.kind == "grow" for event in self._events)

    def _width(self) -> int:
        return self._kind.spec.nproc

    def _possible(self) -> Iterator[str]:
        """Kinds of what may come next; which of them come often is in how often they are named."""
        left = self._width() - self._away - self._kind.floor
        per_node = self._width() // self._nodes
        yield from ("sever", "slow", "agent", "agent")
        if self._kind.has_zygote:
            yield from ("zygote", "zygote", "zygote")
        if self._returns:
            yield "whole"
        if left >= 1:
            yield from ("kill", "kill", "kill", "hang")
            if self._kind.flips:
                yield "flip and kill"
            if self._may_lose_for_good(per_node):
                yield "drain"
        if left >= per_node and self._nodes > 1 and self._may_lose_for_good(per_node):
            yield from ("node", "node")
        if left >= 1 and self._returns:
            yield from ("kill and kill on entry", "kill and kill on entry")
        if left >= 2:
            yield from ("kill and kill in recovery", "kill and kill in recovery")
        if self._reserve and not self._grows():
            yield from ("grow", "grow")
        if self._gone and self._returns:
            yield from ("join", "join")

    def _may_lose_for_good(self, per_node: int) -> bool:
        """A majority of the nodes has to be left, and somebody who has a copy."""
        if self._nodes > 1 and per_node == 1:
            # Of the nodes of the view, which those who are away do not belong to.
            return self._gone < 2 and self._width() - self._away >= 3
        return self._gone < self._width() - self._kind.floor

    def _phase(self) -> str:
        """In a step, or as often in what is between two steps."""
        if self._kind.evaluates and self._dice.random() < 0.5:
            return self._dice.choice(("evaluation", *SAVE_PHASES))
        return self._dice.choice(STEP_PHASES)

    def _event(self, kind: str, **fields: object) -> int:
        """Add one; what comes next, comes after the step in which this one's phase is."""
        every = {"evaluation": EVALUATES_EVERY, **dict.fromkeys(SAVE_PHASES, SAVES_EVERY)}
        phase = str(fields.get("phase", ""))
        self._step += -self._step % every.get(phase, 1)
        number = len(self._events)
        pick = self._dice.randrange(PICKS)
        self._events.append(
            Event(number=number, kind=kind, step=self._step, pick=pick, **fields)  # type: ignore[arg-type]
        )
        return number

    def _add(self, what: str) -> None:
        match what:
            case "whole":
                self._event("whole")
                self._away = self._gone
            case "sever" | "slow" | "kill" | "agent" | "node" | "zygote":
                self._event(what, phase=self._phase())
            case "hang":
                phase = self._phase()
                how = "stop" if phase in SAVE_PHASES else self._dice.choice(HANGS)
                self._event(how, phase=phase)
            case "drain" | "grow":
                self._event(what)
            case "join":
                self._event("join")
                self._gone -= 1
            case "flip and kill":
                flip = self._event("flip")
                phase = self._dice.choice(("optimizer", "gather"))
                self._event("kill", phase=phase, after=flip)
            case "kill and kill in recovery":
                first = self._event("kill", phase=self._phase())
                is_engine = isinstance(self._kind.spec, EngineSpec)
                how = self._dice.choice(("kill", "kill", "kill" if is_engine else "stop"))
                self._event(how, phase=self._dice.choice(RECOVERY_PHASES), after=first)
                self._away += 1
            case "kill and kill on entry":
                first = self._event("kill", phase=self._phase())
                is_engine = isinstance(self._kind.spec, EngineSpec)
                phase = self._dice.choice(ENTRY_PHASES)
                how = "kill" if is_engine else self._dice.choice(("kill", "stop"))
                self._event(how, phase=phase, after=first, on_entry=True)
                self._step += 1
                self._event("whole")
        per_node = self._width() // self._nodes
        if what == "node":
            self._standbys -= self._standbys > 0
            back = min(per_node, self._standbys)
            self._standbys -= back
            self._gone += per_node - back
            self._away += per_node
        elif what == "drain":
            self._gone += 1
            self._away += 1
        elif "kill" in what or what == "hang":
            self._away += 1
