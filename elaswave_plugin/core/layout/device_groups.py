"""The fate of each device communicator when the view changes: kept, shrunk or aborted."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from elaswave_plugin.errors import ConfigurationError

# Below the first version there is no ncclCommShrink. From the second on, torch waits forever in
# shrink with abort, because it destroys the parent (pytorch#194679).
SHRINKS_FROM = (2, 27)
SHRINKS_BELOW = (2, 31)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorFacts:
    """One member's knowledge of a communicator once it launches nothing more.

    ``name`` is from its creation (group and epoch), ``members`` are the slots in rank order at its
    creation. ``sent`` and ``received`` count point-to-point calls by the slot of the peer.
    ``idle``: all that was launched is complete. ``shrinks``: this member's NCCL can shrink it.
    """

    name: str
    members: tuple[int, ...]
    collectives: int
    sent: Mapping[int, int]
    received: Mapping[int, int]
    idle: bool
    shrinks: bool


class Fate(Enum):
    """The fate of a communicator in the next epoch."""

    KEEP = "keep"
    SHRINK = "shrink"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A fate and the reason for it."""

    fate: Fate
    reason: str


def fate_of(
    name: str, answers: Mapping[int, CommunicatorFacts | None], members: Sequence[int]
) -> Verdict:
    """Decide the fate of the communicator ``name`` when its group has ``members`` from now on.

    ``answers``: what each slot holds for the group, None for nothing. All members decide from the
    same answers, so all decide alike. A communicator on which a member may still wait is not kept.
    """
    held: list[CommunicatorFacts] = []
    for slot in members:
        facts = answers.get(slot)
        if facts is None or facts.name != name:
            return Verdict(Fate.ABORT, f"slot {slot} does not hold it")
        if not facts.idle:
            return Verdict(Fate.ABORT, f"slot {slot} has operations in flight")
        held.append(facts)
    if not held:
        return Verdict(Fate.ABORT, "the group has no members left")
    disagreement = _disagreement(dict(zip(members, held, strict=True)))
    if disagreement:
        return Verdict(Fate.ABORT, disagreement)
    made_of = held[0].members
    if made_of == tuple(members):
        return Verdict(Fate.KEEP, "members unchanged, counters equal, nothing in flight")
    if tuple(slot for slot in made_of if slot in members) != tuple(members):
        return Verdict(Fate.ABORT, f"slots {made_of} became {tuple(members)}: not a part in order")
    if not all(facts.shrinks for facts in held):
        return Verdict(Fate.ABORT, "this version of NCCL cannot shrink safely")
    if not held[0].collectives:
        return Verdict(Fate.ABORT, "there was no collective: nothing to shrink yet")
    return Verdict(Fate.SHRINK, f"slots {made_of} became {tuple(members)}")


def _disagreement(held: Mapping[int, CommunicatorFacts]) -> str:
    """Find calls that only one side has made: their bytes would be taken for later ones."""
    first, *others = held
    for slot in others:
        if held[slot].collectives != held[first].collectives:
            return (
                f"slot {first} began {held[first].collectives} collectives, "
                f"slot {slot} {held[slot].collectives}"
            )
    for source, facts in held.items():
        for target, theirs in held.items():
            sent, received = facts.sent.get(target, 0), theirs.received.get(source, 0)
            if sent != received:
                return f"slot {source} sent {sent} messages to slot {target}, which took {received}"
    return ""


def shrink_is_safe(version: tuple[int, ...]) -> bool:
    """Return whether shrink with abort returns in this NCCL, as torch 2.11 to 2.15 call it."""
    return SHRINKS_FROM <= version[:2] < SHRINKS_BELOW


def obstacle(devices: Mapping[int, str]) -> str:
    """Say why the workers (slot -> device, "" for none) cannot use NCCL; "" when they can."""
    missing = sorted(slot for slot, device in devices.items() if not device)
    if missing:
        return f"slots {missing} have no CUDA device with NCCL"
    owners: dict[str, list[int]] = defaultdict(list)
    for slot, device in sorted(devices.items()):
        owners[device].append(slot)
    for device, slots in owners.items():
        if len(slots) > 1:
            return (
                f"slots {slots} share the device {device}; run one process per GPU and call "
                "torch.cuda.set_device(LOCAL_RANK) before init_process_group()"
            )
    return ""


def uses_nccl(setting: str, devices: Mapping[int, str]) -> bool:
    """Return whether GPU tensors use NCCL under the setting gpu_engine (auto, host, nccl).

    Raises ConfigurationError if the setting is nccl and NCCL cannot be used.
    """
    why_not = obstacle(devices)
    if setting == "nccl" and why_not:
        raise ConfigurationError(
            f"gpu_engine is nccl, but {why_not}; or set gpu_engine to auto or host"
        )
    return setting != "host" and not why_not
