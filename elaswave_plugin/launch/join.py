"""`elaswave run --join`: which free slots of a running job a node takes, or why it takes none."""

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from elaswave_plugin.agent.peers.job_place import JobPlace
from elaswave_plugin.agent.peers.same_program import describe_program, difference
from elaswave_plugin.agent.way_in import Roster, ask_roster
from elaswave_plugin.core.agreement.timeouts import Heartbeat, Timeouts
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.environment import RESERVE, Program
from elaswave_plugin.ipc.secret import Secret, named_secrets, secret_at
from elaswave_plugin.ipc.wire import Frame
from elaswave_plugin.launch.options import LaunchSpec
from elaswave_plugin.launch.shared_options import SharedJob

_OPTIONS = (("nproc", "--nproc-per-node"), ("reserve", "--reserve"))


def program_of(spec: LaunchSpec) -> dict[str, Any]:
    """Describe what a job cannot begin with where it differs from node to node."""
    program = Program(script=spec.script, args=spec.args, module=spec.module)
    alike = {"nproc": spec.nproc_per_node, "reserve": spec.reserve}
    return {**describe_program(program), **alike}


def check_alike(ours: Mapping[str, Any], theirs: Mapping[str, Any], *, joins: bool = False) -> None:
    """Raise ConfigurationError for the first difference.

    A node that joins takes the job's own options from the job.
    """
    for name, option in () if joins else _OPTIONS:
        if theirs.get(name) != ours[name]:
            raise ConfigurationError(
                f"{option} is {ours[name]}, and {theirs.get(name)} in the job of this name"
            )
    differs = difference(ours, theirs)
    if differs is not None:
        raise ConfigurationError(differs)


_ANSWER_S = 5.0
# So long a worker that was told to leave may take: it leaves between two steps.
_LEAVING_S = 120.0
_ASK_AGAIN_S = 0.2


class NoRoomError(ConfigurationError):
    """The job runs, and has no free slots for a node."""


class NoAnswerError(ConfigurationError):
    """No agent of the job answers at `contact`; `why`: what the machine says of it."""

    def __init__(self, contact: str, why: str) -> None:
        super().__init__(
            f"--join is {contact}, where no agent of a job answers ({why});"
            " `elaswave status DIR --json` has their addresses"
        )
        self.contact, self.why = contact, why


class Vacancy(NamedTuple):
    """The slots to take, the node's number, the job's size, and the spec as the job has it."""

    slots: tuple[int, ...]
    node: int
    world_size: int
    contacts: tuple[str, ...]
    spec: LaunchSpec
    secret: Secret


def find_vacancy(spec: LaunchSpec) -> Vacancy:
    """Ask the job of `spec.join`. Raises ConfigurationError where it cannot be joined so."""
    assert spec.join is not None
    host, _, port = spec.join.rpartition(":")
    contact = f"{host.removeprefix('[').removesuffix(']')}:{port}"
    secrets = named_secrets(os.environ, spec.run_dir)
    try:
        secret = secret_at(contact, secrets, _ANSWER_S)
        roster = ask_roster([contact], secret)
        check_alike(
            program_of(spec), roster.record["program"], joins=True
        )  # before a wait that would be for nothing
        roster = _with_room(roster, secret, spec.nproc_per_node)
    except OSError as error:
        raise NoAnswerError(spec.join, error.strerror or str(error)) from error
    if roster.record["ending"]:
        raise NoRoomError(f"the job at {spec.join} is ending: no worker can join it")
    world_size, free = roster.width, roster.free
    if len(free) < spec.nproc_per_node:
        raise NoRoomError(
            f"--nproc-per-node is {spec.nproc_per_node}, and {len(free)} of the job's {world_size} "
            "slots are free: start fewer, wait until a node is gone, or "
            f"launch the job with a --reserve of more than {roster.record['env'][RESERVE]}"
        )
    record = roster.record
    run_dir = spec.run_dir or (Path(record["run_dir"]) if record["run_dir"] else None)
    return Vacancy(
        slots=free[: spec.nproc_per_node],
        node=int(roster.record["unused_node"]),
        world_size=world_size,
        contacts=roster.contacts,
        secret=secret,
        spec=replace(
            spec,
            run_dir=run_dir,
            shared=_shared(spec, record),
            timeouts=Timeouts(**record["timeouts"]),
            heartbeat=Heartbeat(**record["heartbeat"]),
        ),
    )


def _shared(spec: LaunchSpec, record: Frame) -> SharedJob | None:
    """The job's own place and life, where it renews a lease: this node may have to do that."""
    if record.get("job_place") is None:
        return spec.shared
    place = JobPlace.of_record(record["job_place"])
    if place.folder and not os.access(place.folder, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"the job renews its lease in {place.folder!r}, which cannot be written here: have this"
            " node see it too"
        )
    given = spec.shared or SharedJob(name="", place=place, least=1, most=1, last_call_s=0.0)
    return replace(given, place=place, life=int(record["job_life"]))


def _with_room(roster: Roster, secret: Secret, wanted: int) -> Roster:
    """Ask for the job again while workers that leave make room; raises OSError."""
    deadline_s = time.monotonic() + _LEAVING_S
    if _awaits_room(roster, wanted):
        slots = ", ".join(map(str, roster.leaving))
        say(f"waits for the slot of worker {slots}, told to leave")
    while _awaits_room(roster, wanted) and time.monotonic() < deadline_s:
        time.sleep(_ASK_AGAIN_S)
        # Any of them: the one that the user has named may be the one that leaves.
        roster = ask_roster(roster.contacts, secret)
    return roster


def _awaits_room(roster: Roster, wanted: int) -> bool:
    """Return whether workers that leave would make the room that is missing."""
    missing = wanted - len(roster.free)
    return 0 < missing <= len(roster.leaving) and not roster.record["ending"]
