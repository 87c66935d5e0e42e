"""The declaration of a fault test: kind of fault, victim, moment, and the promise kept."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pytest

VICTIMS = ("slot", "slots", "victim", "victims", "lost", "node", "who", "link")
MOMENTS = ("phase", "moment", "death", "where", "at_once")
# As in "1@3:backward"; "1.1@7:forward" is the second worker of slot 1.
KILL = re.compile(r"(\d+(?:\.\d+)?)@(\d+):(\w+)")


class Kind(StrEnum):
    """The fault, or what else happens to a job."""

    KILL = "a worker is killed"
    KILLS = "several workers are killed"
    ALL = "all processes are killed at once"
    IN_RECOVERY = "another worker is killed in a recovery"
    KILL_AT_START = "a worker is killed before the first seal"
    KILL_AT_END = "a worker is killed after the last step"
    KILL_IN_SAVE = "workers are killed in a save"
    AGENT = "agents die, alone and with workers"
    NODE = "a node is lost with all that it holds"
    COPIES = "nodes are lost with all copies of a state"
    ZYGOTE = "a zygote is killed"
    RAISE = "a script fails by itself"
    HANG = "a worker hangs"
    HANG_IN_RECOVERY = "a worker hangs in a recovery"
    UNDEAD = "a killed process does not end"
    ZOMBIE = "a worker that was given up goes on"
    SUSPEND = "the whole job is stopped and continued"
    SLOW = "a worker gets slow"
    OUT_OF_MEMORY = "a survivor has no memory for what a loss adds"
    NOISE = "workers are late, and none hangs"
    LINK = "a link between living workers breaks"
    DISK = "the storage fails"
    DAMAGE = "a snapshot is damaged"
    BAD_CHECKPOINT = "a checkpoint cannot be read"
    WIDTH = "a checkpoint is of another width"
    LEAVE = "workers are told to leave"
    ALL_LEAVE = "all workers are told to leave"
    RETURN = "a lost worker comes back"
    RETURN_LOSS = "a worker is killed around a return"
    NODE_RETURN = "a lost node comes back, or another one takes its place"
    NEWCOMER = "a newcomer is killed on its way in"
    JOIN = "workers join beyond the launch"
    JOIN_LOSS = "a worker of a grown job is lost"
    MIGRATE = "layers are moved by request"
    MIGRATE_LOSS = "a worker is killed while layers are moved by request"
    RESUME = "a run is resumed"
    CHAOS = "random faults of every kind"
    SIGNAL = "a launcher is told to end, or killed"
    SCRIPT_END = "a script ends"
    NOT_ATTACHED = "nothing attaches in a script"
    WRONG_INPUT = "a setting or option is wrong"
    WRONG_SCRIPT = "a line of a script is wrong"
    STRANGERS = "processes that do not belong to the job come to its ports"
    SABOTAGE = "a part of the product is switched off"
    NOTHING = "no fault"


class Promise(StrEnum):
    """The assertion of a test."""

    EQUAL = "bit-equal to the undisturbed run"
    PLANNED = "bit-equal to the planned departure, close to the undisturbed run"
    CLOSE = "losses close to the undisturbed run"
    SAME = "as without the plugin"
    WHOLE = "checkpoints are whole, and load"
    OLDER = "an older step or a copy is used, and the job goes on"
    FRESH = "live objects equal fresh ones"
    LOGGED = "each step is logged once"
    GOES_ON = "the others go on, and the reason is said"
    NOBODY_LOST = "no worker is lost"
    SENT_AWAY = "the newcomer is sent away, and the others go on"
    STAYS = "a worker that is needed stays"
    SHORTER = "steps get shorter"
    STATUS = "the status says so"
    STOPS = "a clean stop that names what is lost"
    REQUEUE = "a clean stop that asks for a requeue"
    REFUSED = "refused in one sentence"
    NAMED = "named once, with what to do"
    TOLD = "trains right, is told what to write, or fails once"
    SEEN = "the comparison sees it"
    ENDS_WELL = "the job ends once, with its exit code"
    CLEAN = "no process is left"


@dataclass(frozen=True, slots=True, order=True)
class Proof:
    """One case: victims are slots at launch, moments as in "3:backward"; empty if there is none."""

    kind: str
    victim: str
    moment: str
    promise: str


def proves(
    kind: Kind, promise: Promise, *, victim: str = "", moment: str = ""
) -> pytest.MarkDecorator:
    """Declare what a test proves; what its parameters say of victim and moment comes first."""
    return pytest.mark.proof(kind=kind, promise=promise, victim=victim, moment=moment)


def proof_of(item: pytest.Item) -> Proof | None:
    """Return the declaration of a collected case."""
    mark = item.get_closest_marker("proof")
    if mark is None:
        return None
    victim, moment = struck(item.callspec.params if hasattr(item, "callspec") else {})
    said = mark.kwargs
    return Proof(
        kind=str(said["kind"]),
        victim=victim or said["victim"],
        moment=moment or said["moment"],
        promise=str(said["promise"]),
    )


def struck(params: Mapping[str, Any]) -> tuple[str, str]:
    """Victim and moment, as far as the parameters of a test say them."""
    victims, moments = [], []
    for name, value in params.items():
        kills = [KILL.fullmatch(one) for one in _texts(value)]
        for kill in filter(None, kills):
            victims.append(kill[1])
            moments.append(f"{kill[2]}:{kill[3]}")
        if not any(kills) and name in VICTIMS:
            victims += _words(value)
        if not any(kills) and name in MOMENTS:
            moments += _words(value)
        for lost in ("lost_trainers", "lost_nodes"):
            victims += map(str, getattr(value, lost, ()))
    return " ".join(victims), " ".join(moments)


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a value, in tuples of it, and those of a specification's kills."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _texts(one)
    else:
        yield from getattr(value, "kills", ())


def _words(value: Any) -> list[str]:
    return [str(one) for one in (value if isinstance(value, (tuple, list)) else (value,))]
