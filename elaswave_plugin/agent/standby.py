"""The places of a node that wait until a slot is lost elsewhere, and take it then.

They make up for losses: the reserve is for workers that join. Standard library only.
"""

import contextlib
import threading
from functools import partial

from elaswave_plugin.agent.common import Common
from elaswave_plugin.core.agreement.quorum import Applicant
from elaswave_plugin.core.layout.reserve import NOBODY_CAME
from elaswave_plugin.ipc.requests import request

# How soon a standby sees that a slot has nobody.
_LOOK_EVERY_S = 0.2
_ANSWER_S = 5.0


class Standby:
    """One agent's idle places."""

    def __init__(self, common: Common) -> None:
        self._common = common
        count = len(common.spec.envs)
        self._idle = list(range(count - common.spec.standby, count))
        self._asks = False

    @property
    def waiting(self) -> int:
        """The number of places that wait."""
        return len(self._idle)

    def start(self) -> None:
        """Begin to look for slots."""
        if self._idle:
            self._common.reactor.after(_LOOK_EVERY_S, self._look)

    def place_for(self, slot: int) -> int:
        """Give a place to a slot that this node was given."""
        return self._idle.pop(0)

    def taken(self, place: int) -> None:
        """Note that a slot has a place of this node since an agent's earlier life."""
        if place in self._idle:
            self._idle.remove(place)

    def _look(self) -> None:
        agreement, common = self._common.agreement, self._common
        if common.exit_code is not None or not self._idle:
            return
        lost = [slot for slot, why in agreement.nodes.without_agent.items() if why != NOBODY_CAME]
        free = sorted({*lost} - {*agreement.committed.ranks})
        if free and agreement.started and not agreement.ending and not self._asks:
            self._ask(tuple(free[: len(self._idle)]))
        common.reactor.after(_LOOK_EVERY_S, self._look)

    def _ask(self, slots: tuple[int, ...]) -> None:
        """Ask the leader for slots; it is this agent itself where that one leads."""
        agreement, node = self._common.agreement, self._common.node
        if agreement.leader == node:
            agreement.admit(Applicant(node=node, slots=slots, address=self._common.address))
            return
        self._asks = True
        address = agreement.addresses[agreement.leader]
        asked = {"t": "admit", "node": node, "slots": slots, "address": self._common.address}
        secret = self._common.spec.rendezvous.secret

        def ask() -> None:
            with contextlib.suppress(OSError):  # it asks again
                request(address, asked, _ANSWER_S, secret)
            self._common.reactor.post(partial(setattr, self, "_asks", False))

        threading.Thread(target=ask, name="standby", daemon=True).start()
