"""Until when a worker may act in the name of the job: no longer than the others wait for it (pure).

A supervisor that is silent for so long is lost, and its worker with it. So a beat that somebody has
heard is a promise: until so long after it was *sent*, nobody gives its sender up for silence. The
leader tells each other one which of its beats it has heard, and for how long from then on it was
sure to lead itself; it is, while most nodes of the view have heard it. Each reads its own clock.

>>> leader, other = Lease(lasts_s=3.0), Lease(lasts_s=3.0)
>>> number = other.send(now_s=10.0)
>>> other.granted(number, left_s=2.5, now_s=10.2)
>>> other.until_s
12.5
>>> leader.acknowledged("b", leader.send(now_s=10.0), now_s=10.3)
>>> leader.lead(own="a", voters={"a", "b", "c"}, now_s=10.4)
>>> leader.until_s
13.0
"""

from __future__ import annotations

from collections.abc import Collection, Hashable


class Lease:
    """One supervisor's; ``lasts_s``: a supervisor that is silent for so long is lost."""

    def __init__(self, *, lasts_s: float) -> None:
        self._lasts_s = lasts_s
        self._sent_s: dict[int, float] = {}
        self._number = 0
        self._heard_by: dict[Hashable, float] = {}
        self.until_s = 0.0

    def send(self, *, now_s: float) -> int:
        """The number of the beats that go out now."""
        self._number += 1
        self._forget(now_s)
        self._sent_s[self._number] = now_s
        return self._number

    def granted(self, number: int, *, left_s: float, now_s: float) -> None:
        """The leader was sure to lead for ``left_s`` more when it heard this beat."""
        self._forget(now_s)
        if number in self._sent_s:
            until_s = self._sent_s[number] + min(self._lasts_s, left_s)
            self.until_s = max(self.until_s, until_s)

    def acknowledged(self, node: Hashable, number: int, *, now_s: float) -> None:
        """Somebody on another node had heard this beat."""
        self._forget(now_s)
        if number in self._sent_s:
            known_s = self._heard_by.get(node, float("-inf"))
            self._heard_by[node] = max(known_s, self._sent_s[number])

    def lead(self, *, own: Hashable, voters: Collection[Hashable], now_s: float) -> None:
        """As the leader, on the node ``own``: sure while most of the nodes that vote have heard."""
        heard_s = [self._heard_by.get(node, float("-inf")) for node in voters if node != own]
        heard_s.sort(reverse=True)
        # With the own node, if that votes, they are more than half.
        needed = len(voters) // 2 + 1 - (own in voters)
        since_s = now_s if needed == 0 else heard_s[needed - 1]
        self.until_s = max(self.until_s, since_s + self._lasts_s)

    def left_s(self, now_s: float) -> float:
        """How long it still holds; 0 where it does not."""
        return max(0.0, self.until_s - now_s)

    def _forget(self, now_s: float) -> None:
        """Beats that nothing follows from any more."""
        old = [n for n, sent_s in self._sent_s.items() if sent_s + self._lasts_s < now_s]
        for number in old:
            del self._sent_s[number]
