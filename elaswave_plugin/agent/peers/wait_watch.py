"""Says which worker all others wait for, for how long, and where it is; in the leader.

The awaited worker's own agent knows where in its program that worker is. It is asked in a
thread, since that takes long.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from threading import Thread

from elaswave_plugin.core.agreement.all_wait import AllWait, Said, all_wait
from elaswave_plugin.core.agreement.hang import Sample
from elaswave_plugin.core.agreement.leader import Agreement
from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.progress_page import BETWEEN_STEPS
from elaswave_plugin.ipc.requests import request
from elaswave_plugin.ipc.secret import Secret
from elaswave_plugin.tracking.events import EventLog

_ASK_S = 8.0
_MOST_NAMED = 4


class WaitWatch:
    """One agent's; only the one that leads hears of all workers."""

    def __init__(self, agreement: Agreement, events: EventLog, secret: Secret) -> None:
        self._agreement = agreement
        self._events = events
        self._secret = secret
        self._said = Said()

    def look(self, pages: Mapping[int, Sample]) -> None:
        """Say it where it is due; ``pages``: those of the workers that stand still."""
        view = self._agreement.committed
        members = dict(zip(view.ranks, view.incarnations, strict=True))
        samples = {
            slot: page for slot, page in pages.items() if members.get(slot) == page.incarnation
        }
        found = all_wait(members, samples)
        if self._said.is_due(found, time.monotonic()):
            assert found is not None
            address = self._agreement.addresses[self._node_of(found.late[0])]
            what = self._described(found, samples.get(found.late[0]))
            ask = Thread(target=self._tell, args=(found, address, what), name="where", daemon=True)
            ask.start()

    def _node_of(self, slot: int) -> int:
        return self._agreement.nodes.of_slots[slot]

    def _described(self, found: AllWait, page: Sample | None) -> str:
        nodes = [f"{slot} (node {self._node_of(slot)})" for slot in found.late[:_MOST_NAMED]]
        more = len(found.late) - len(nodes)
        who = f"worker{'s' if len(found.late) > 1 else ''} {', '.join(nodes)}"
        who += f" and {more} more" if more else ""
        if page is None and not self._agreement.committed.epoch:
            where = "not attached yet"
        elif page is None:
            where = "at work"
        elif not self._agreement.started and page.phase == BETWEEN_STEPS:
            where = "before the first step"
        else:
            where = f"{page.phase} of step {page.step}"
        return f"all others wait for {who}, for {found.waited_s:.0f} s: {where}"

    def _tell(self, found: AllWait, address: str, what: str) -> None:
        try:
            asked = {"t": "where", "slot": found.late[0]}
            line = request(address, asked, _ASK_S, self._secret)["line"]
        except OSError:
            line = None
        say(what if line is None else f"{what}, in {line}")
        self._events.emit("all_wait", slots=list(found.late), waited_s=found.waited_s, line=line)
