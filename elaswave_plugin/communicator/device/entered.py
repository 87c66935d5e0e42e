"""The native calls that a worker has entered, on its progress page: who is behind is seen there.

A native call blocks in the backend or on the device, and nothing tells which member it needs. But a
member that has entered more calls on a communicator than another one waits for that one, or will.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Container, Sequence

from elaswave_plugin.ipc.progress_page import MOST_ENTERED, ProgressPage


class Entered:
    """The counts of one worker; of more than MOST_ENTERED communicators some are not told."""

    def __init__(self, page: ProgressPage) -> None:
        self._page = page
        # The doorbell's thread ends communicators.
        self._changing = threading.Lock()
        # By communicator and channel: the place on the page, and the calls so far.
        self._counts: dict[tuple[str, str], list[int]] = {}

    def count(
        self, name: str, members: Sequence[int], call: str, me: int, peer: int | None
    ) -> None:
        """Note a call on a communicator, before it is made: a collective, or one with a ``peer``.

        ``me`` and ``peer`` are group ranks. A message counts alike at both of its ends.
        """
        channel = ""
        if peer is not None:
            source, target = (me, peer) if call == "send" else (peer, me)
            channel = f"{members[source]}>{members[target]}"
        self._page.count_operation()
        key = name, channel
        with self._changing:
            place = self._counts.get(key)
            if place is None:
                free = set(range(MOST_ENTERED)) - {index for index, _ in self._counts.values()}
                if not free:
                    return
                place = self._counts[key] = [min(free), 0]
            place[1] += 1
            self._page.set_entered(place[0], _number(f"{name} {channel}"), place[1])

    def keep(self, names: Container[str]) -> None:
        """All communicators but these have ended, or will on all of their members."""
        with self._changing:
            for key in [one for one in self._counts if one[0] not in names]:
                self._page.set_entered(self._counts.pop(key)[0], 0, 0)


def _number(text: str) -> int:
    """A number of seven bytes, which is alike on all workers."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
