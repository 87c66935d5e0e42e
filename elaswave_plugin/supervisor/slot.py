"""The two ways to a slot for a supervisor: at the launch, with all others, or in a running job.

With the slot it gets the register of its node, which all supervisors there share: that of the first
of them. Each of the others is handed it by one that is there before it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from elaswave_plugin.errors import AgreementError
from elaswave_plugin.ipc.peer import Peer, own_machine
from elaswave_plugin.ipc.wire import Frame
from elaswave_plugin.supervisor.peers.join_client import SlotRefusedError, seek_admission
from elaswave_plugin.supervisor.peers.node_register import NodeRegister
from elaswave_plugin.supervisor.peers.rendezvous import (
    Meeting,
    RendezvousSpec,
    host_meeting,
    join_meeting,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSlot:
    """A supervisor's links, and what was kept for one that comes later."""

    meeting: Meeting
    kept: Frame | None = None


def slot_at_launch(
    rendezvous: RendezvousSpec,
    host: str,
    listener: socket.socket | None,
    data: str,
    register: NodeRegister,
) -> OwnSlot:
    """Meet the others: at `listener` those that come, else at `host`.

    Raises AgreementError, ConfigurationError as `host_meeting` and `join_meeting` do.
    """
    if listener is not None:
        meeting = host_meeting(rendezvous, listener, data)
    else:
        meeting = join_meeting(rendezvous, host, data)
    first = next(peer for peer in meeting.peers if peer.node == rendezvous.node)
    if first.slot != rendezvous.slot:
        _share(register, first, rendezvous)
    return OwnSlot(meeting=meeting)


def slot_in_job(
    rendezvous: RendezvousSpec, contacts: Sequence[str], data: str, register: NodeRegister
) -> OwnSlot:
    """Take the place of a lost supervisor. Raises SlotRefusedError."""
    own = Peer(
        slot=rendezvous.slot,
        node=rendezvous.node,
        pid=os.getpid(),
        control="",
        data=data,
        machine=own_machine(),
    )
    meeting, kept = seek_admission(own, contacts, rendezvous.secret, timeout_s=rendezvous.timeout_s)
    assert meeting.welcome is not None
    gone = {rendezvous.slot, *meeting.welcome.lost}
    beside = [one for one in meeting.peers if one.node == rendezvous.node and one.slot not in gone]
    if beside:
        try:
            _share(register, beside[0], rendezvous)
        except AgreementError as error:
            raise SlotRefusedError(str(error)) from error
    return OwnSlot(meeting=meeting, kept=kept)


def _share(register: NodeRegister, peer: Peer, rendezvous: RendezvousSpec) -> None:
    try:
        register.take_from(peer.data, rendezvous.secret)
    except AgreementError as error:
        raise AgreementError(
            f"worker {rendezvous.slot} cannot share the votes of node {rendezvous.node}"
            f" with worker {peer.slot}: {error}"
        ) from error
