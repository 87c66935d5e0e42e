"""The lease: a worker may act in the name of the job as long as the others wait for it (pure).

An agent that is silent for ``lasts_s`` is lost, and its workers with it. So a beat that an
agent has heard is a promise: for ``lasts_s`` after it was *sent*, none gives its sender up. The
sender counts on less, by `DRIFT`, since its clock may be slower than those of the others. The
leader tells each agent which of its beats it has heard, and for how long from then on it
was sure to lead itself, which it is while most nodes of the view have heard it. Each reads its own
clock, which counts on while its machine is suspended (``ipc/progress_page.py``).

>>> leader, other = Lease(lasts_s=3.0), Lease(lasts_s=3.0)
>>> number = other.send(now_s=10.0)
>>> other.granted(number, left_s=2.5, now_s=10.2)
>>> other.until_s
12.5
>>> leader.acknowledged("b", leader.send(now_s=10.0), now_s=10.3)
>>> leader.lead(own="a", voters={"a", "b", "c"}, now_s=10.4)
>>> round(leader.until_s, 3)
12.97
"""

from collections.abc import Collection, Hashable

DRIFT = 0.01
"""The clocks of two nodes run apart by less than this: quartz does by a ten-thousandth."""


class Lease:
    """One agent's lease; ``lasts_s``: the silence in seconds after which it is lost."""

    def __init__(self, *, lasts_s: float) -> None:
        self._lasts_s = lasts_s * (1 - DRIFT)
        self._sent_s: dict[int, float] = {}
        self._number = 0
        self._heard_by: dict[Hashable, float] = {}
        self.until_s = 0.0
        # Until when the others count this node in, whatever the lease of the job.
        self.counted_until_s = 0.0

    def send(self, *, now_s: float) -> int:
        """Return the number of the beats that go out now."""
        self._number += 1
        self._forget(now_s)
        self._sent_s[self._number] = now_s
        return self._number

    def granted(self, number: int, *, left_s: float, now_s: float) -> None:
        """Note that the leader was sure to lead for ``left_s`` more when it heard this beat."""
        self._forget(now_s)
        if number in self._sent_s:
            until_s = self._sent_s[number] + min(self._lasts_s, left_s)
            self.until_s = max(self.until_s, until_s)
            self.counted_until_s = max(self.counted_until_s, until_s)

    def acknowledged(self, node: Hashable, number: int, *, now_s: float) -> None:
        """Note that an agent on another node has heard this beat."""
        self._forget(now_s)
        if number in self._sent_s:
            known_s = self._heard_by.get(node, float("-inf"))
            self._heard_by[node] = max(known_s, self._sent_s[number])

    def lead(
        self,
        *,
        own: Hashable,
        voters: Collection[Hashable],
        now_s: float,
        most_s: float = float("inf"),
    ) -> None:
        """Extend the leader's own lease (node ``own``): most voting nodes must have heard it.

        ``most_s``: when the lease of the job as a whole ends, where it has one.
        """
        heard_s = [self._heard_by.get(node, float("-inf")) for node in voters if node != own]
        heard_s.sort(reverse=True)
        # Together with the own node, if that votes, they are more than half.
        needed = len(voters) // 2 + 1 - (own in voters)
        since_s = now_s if needed == 0 else heard_s[needed - 1]
        self.counted_until_s = max(self.counted_until_s, since_s + self._lasts_s)
        self.until_s = max(self.until_s, min(since_s + self._lasts_s, most_s))

    def left_s(self, now_s: float) -> float:
        """Return the seconds that it still holds; 0 if it does not."""
        return max(0.0, self.until_s - now_s)

    def _forget(self, now_s: float) -> None:
        """Drop beats that are older than a lease, and nodes that have heard no newer one."""
        long_ago_s = now_s - self._lasts_s
        self._sent_s = {n: sent_s for n, sent_s in self._sent_s.items() if sent_s >= long_ago_s}
        self._heard_by = {n: sent_s for n, sent_s in self._heard_by.items() if sent_s >= long_ago_s}
