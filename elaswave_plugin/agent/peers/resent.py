"""Tells a network that loses packets from an agent that is silent: the first has more time.

Where packets are lost a beat is sent again until it arrives, which can take longer than the limit
of a silence. Its machine answers meanwhile, and what goes to it is sent again as well; a machine
that is gone answers nothing, and to a stopped process on a good network nothing is sent again.
"""

from __future__ import annotations

from elaswave_plugin.ipc.silence import Answers

# The time that one has beyond a good network, as a factor. A lease only ends earlier.
MORE = 2.0


class Resent:
    """Notes what is sent again to each agent; ``timeout_s``: the limit of a silence."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # Packets sent again to each so far, and when the number last rose.
        self._known: dict[int, tuple[int, float]] = {}

    def limit_s(self, node: int, answers: Answers, *, now_s: float) -> float:
        """Return for how long nothing may be heard of an agent; to be asked at each beat."""
        before, rose_s = self._known.get(node, (answers.sent_again, -self._timeout_s))
        if answers.sent_again > before:
            rose_s = now_s
        self._known[node] = answers.sent_again, rose_s
        loses_packets = now_s - rose_s < self._timeout_s
        is_there = answers.silent_s < self._timeout_s / 2
        return self._timeout_s * (MORE if loses_packets and is_there else 1.0)

    def forget(self, node: int) -> None:
        """Another connection takes the place of an agent's."""
        self._known.pop(node, None)
