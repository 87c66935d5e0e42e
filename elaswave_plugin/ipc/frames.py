"""The messages between trainer and agent, and those of the links between agents."""

from dataclasses import dataclass, field
from typing import Any, TypedDict

from elaswave_plugin.core.agreement.hang import Sample, Waiting
from elaswave_plugin.core.agreement.messages import (
    AllSealed,
    Begun,
    Deliver,
    Detached,
    Facts,
    Message,
    Notice,
    Raised,
    Replan,
    Ring,
    Settled,
    Severed,
    Stop,
)
from elaswave_plugin.core.agreement.view import MembershipView
from elaswave_plugin.core.codec import WireMessage
from elaswave_plugin.core.layout.worker_facts import SealedShard

TRAINER, SAY = "trainer", "say"
"""Requests to an agent: a trainer's control link, and what is said beside it."""

# ---- a trainer to its agent ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Join(WireMessage):
    """It is there; `respawn`: times that its slot is started again."""

    facts: Facts
    respawn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(WireMessage):
    """It comes later, has built all, and waits to be let in."""

    facts: Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class SavesLast(WireMessage):
    """It writes a checkpoint with all others where every worker has to leave."""


class JobConstants(TypedDict, total=False):
    """The facts that a job fixed at its start, for a newcomer that builds alone; the same on all.

    Trainers tell it piece by piece, and agents keep it as JSON.

    ``started_s``: when the job began, by the wall clock; ``run_id``: its name in every tracker;
    ``launch_id``: of no other launch; ``given``: version and settings;
    ``devices``: slot and device of each worker of the launch; ``seed``: of the random draws;
    ``stages``: the fields of each pipeline stage; ``loads``: what the script's loads of checkpoints
    gave, as values/plain.py writes it; ``data_epoch``: of the last completed step; ``begins``: the
    first step, and the global batch that it reads; ``inexact``: the first step, run twice, gave
    other bits, and the job goes on in fast mode; ``sampler``: seed and generator of HF Accelerate's
    training loader; ``stream``: where the workers lately were in an iterable one, as `Told` of
    adapters/deepspeed/accelerate/stream.py has it; ``trackers``: the runs of a Trainer's trackers,
    as adapters/deepspeed/hf_trainer/trackers.py names them, or that of a script's own loop;
    ``loaded``: the checkpoints that it had loaded when its loop began;
    ``called``: what the script's own collectives gave before it trained, as loops/calls_before.py
    writes it; ``evaluated``: what its evaluations did then, as loops/evaluations_before.py has it.
    """

    started_s: float
    run_id: str
    launch_id: str
    given: dict[str, Any]
    devices: list[tuple[int, str]]
    seed: int
    stages: list[list[Any]]
    loads: list[str]
    data_epoch: int
    begins: list[int]
    inexact: bool
    sampler: str
    stream: tuple[int, int, int, str]
    trackers: dict[str, Any]
    loaded: list[str]
    called: str
    evaluated: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetConstants(WireMessage):
    """It has its agent keep this for trainers that come later."""

    what: JobConstants


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiesced(WireMessage):
    """It has stopped for the proposal of view `epoch`."""

    epoch: int
    facts: Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed(WireMessage):
    """It has sealed a snapshot, which the slots `copy_to` are to hold as well."""

    record: SealedShard
    copy_to: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(WireMessage):
    """Progress in an announced phase: the deadline of its answer starts again."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish(WireMessage):
    """Its work is done, with the number of completed steps."""

    completed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave(WireMessage):
    """It goes, as planned; `returns`: another is to be started in its place."""

    reason: str
    returns: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout(WireMessage):
    """A description of the places of all workers."""

    layout: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowSeen(WireMessage):
    """The slots of slow workers, with the evidence."""

    slow: tuple[tuple[int, str], ...]


FromTrainer = (
    Join
    | Ready
    | Begun
    | SavesLast
    | SetConstants
    | Quiesced
    | Sealed
    | Settled
    | Progress
    | Severed
    | Replan
    | Raised
    | Detached
    | Finish
    | Leave
    | Stop
    | Layout
    | SlowSeen
)

# ---- an agent to its trainer --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CutsWanted(WireMessage):
    """A request for these layers of each stage."""

    cuts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied(WireMessage):
    """The agent of `slot` holds the snapshot of this step that was sealed in view `epoch`."""

    step: int
    epoch: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Copying(WireMessage):
    """Bytes of a copy are on the way to the agent of `slot`."""

    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartDetached(WireMessage):
    """It comes later, and builds by itself, beside the training.

    `view` is that of the launch; `job_constants` is what the first trainers had their agents keep.
    """

    view: MembershipView
    job_constants: JobConstants


FromAgent = (
    Ring | Notice | Stop | CutsWanted | Deliver | AllSealed | Copied | Copying | StartDetached
)

# ---- on a link between agents, beside the agreement's -------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye(WireMessage):
    """It ends, and none of its workers acts for the job any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat(WireMessage):
    """Number `n` of its beats; `heard`: the newest of the other one's.

    It was sure to be in the job for `left` seconds more when it heard that. `pages`: of those of
    its trainers that stand still; `waiting`: the leader names those that wait for the other's
    trainers, by slot.
    """

    n: int
    heard: int
    left: float
    pages: tuple[Sample, ...] = ()
    waiting: dict[int, Waiting] = field(default_factory=dict)


FromPeer = Message | Goodbye | Beat
