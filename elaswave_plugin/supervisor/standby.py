"""A supervisor that comes to a running job: at once, or as a standby once another one is lost.

Standard library only.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace

from elaswave_plugin.core.layout.reserve import built_among
from elaswave_plugin.errors import EXIT_CONFIGURATION, EXIT_REQUEUE
from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.peer import own_machine
from elaswave_plugin.supervisor.peers.join_client import Roster, SlotRefusedError, ask_roster
from elaswave_plugin.supervisor.supervisor import Supervisor
from elaswave_plugin.supervisor.supervisor_spec import SupervisorSpec

# How soon a standby sees that a slot has nobody.
_LOOK_EVERY_S = 0.2
STANDBY = -1
# What a standby ends with that was never needed: no code of the job.
EXIT_UNUSED = 71


def serve(
    spec: SupervisorSpec, zygote: socket.socket | None, *, on_trainer: Callable[[int], None]
) -> int:
    """Take the slot of the spec, or as a standby (slot STANDBY) a lost one; returns the exit code.

    Where another one was faster, it takes another free slot. A standby makes up for losses: the
    reserve is for workers that join. `on_trainer`: as for `Supervisor.run`.
    """
    if spec.rendezvous.slot == STANDBY:
        return _stand_by(spec, zygote, on_trainer)
    why, tried = "", None
    while True:
        slot = spec.rendezvous.slot
        try:
            roster = ask_roster(spec.joins, spec.rendezvous.secret)
        except OSError as error:
            say(f"worker {slot} does not join: no supervisor of the job answers ({error})")
            return EXIT_CONFIGURATION
        if tried is not None and slot not in roster.free and roster.free:
            # Others that joined at once were offered the same slots.
            slot = roster.free[0]
        spec = _in_slot(replace(spec, rendezvous=replace(spec.rendezvous, slot=slot)), roster)
        if spec.rendezvous == tried:
            say(f"worker {slot} does not join: {why}")
            return EXIT_REQUEUE  # started again, it finds what is free then
        tried = spec.rendezvous
        try:
            supervisor = Supervisor(spec, listener=None, zygote=zygote)
            return supervisor.run(on_trainer=on_trainer)
        except SlotRefusedError as error:
            why = str(error)


def _stand_by(
    spec: SupervisorSpec, zygote: socket.socket | None, on_trainer: Callable[[int], None]
) -> int:
    """Wait for an empty slot, and take it; EXIT_UNUSED where the job ends before."""
    heard_s = time.monotonic()
    who = {"machine": own_machine(), "pid": os.getpid(), "node": spec.rendezvous.node}
    contacts = spec.joins
    # Each contact may take its whole time to be silent, and name a leader that is.
    while time.monotonic() - heard_s < (2 + 2 * len(contacts)) * spec.heartbeat.timeout_s:
        try:
            roster = ask_roster(
                contacts,
                spec.rendezvous.secret,
                standby=who,
                timeout_s=spec.heartbeat.timeout_s,
            )
        except ConnectionRefusedError:
            return EXIT_UNUSED
        except OSError:
            # All of them are gone, or one is just being lost: which of the two, time tells.
            time.sleep(_LOOK_EVERY_S)
            continue
        heard_s = time.monotonic()
        contacts = tuple(peer.data for peer in roster.living)
        lost = [slot for slot in roster.free if slot not in roster.vacant]
        if lost and roster.record["started"] and not roster.record["ending"]:
            rendezvous = replace(spec.rendezvous, slot=lost[0])
            taken = _in_slot(replace(spec, rendezvous=rendezvous), roster)
            try:
                supervisor = Supervisor(taken, listener=None, zygote=zygote)
                return supervisor.run(on_trainer=on_trainer)
            except SlotRefusedError:
                pass  # somebody else was faster, or the job is ending
            heard_s = time.monotonic()
        time.sleep(_LOOK_EVERY_S)
    return EXIT_UNUSED


def _in_slot(spec: SupervisorSpec, roster: Roster) -> SupervisorSpec:
    """The spec with what its slot and node make of torchrun's variables."""
    slot, node, machine = spec.rendezvous.slot, spec.rendezvous.node, own_machine()
    if (node, machine) not in {(peer.node, peer.machine) for peer in roster.living}:
        # The first of its node, or all that were left of it have gone, or it is another's by now.
        node = roster.node_for(machine)
    env = {**spec.env, **roster.record["env"]}
    # A script knows ranks of the launch only.
    rank = built_among(slot, range(int(env["WORLD_SIZE"]))).index(slot)
    of_the_place = {"RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": node, "NODE_RANK": node}
    env |= {name: str(value) for name, value in of_the_place.items()}
    contacts = tuple(peer.data for peer in roster.living)
    return replace(spec, rendezvous=replace(spec.rendezvous, node=node), env=env, joins=contacts)
