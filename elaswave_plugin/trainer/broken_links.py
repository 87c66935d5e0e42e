"""The response of a worker to a link to a live worker that broke while it was needed."""

import contextlib
from collections import Counter

from elaswave_plugin.errors import JobStopped
from elaswave_plugin.ipc.process_tree import exit_at_once
from elaswave_plugin.trainer.member import Member

# Each costs a view change and a redone step.
ATTEMPTS = 3


class BrokenLinks:
    """Has the view renewed, which dials again; a pair that stays apart loses its higher slot."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._broken: Counter[tuple[int, int]] = Counter()

    def report(self, slot: int, why: str, *, epoch: int, step: int) -> None:
        """The link to `slot` broke in this epoch, while `step` steps were completed.

        Mostly the peer is dead: the supervisors know that first, and forget this report.
        """
        here = self._member.slot
        evidence = f"the link between workers {here} and {slot} is {why}"
        self._broken[slot, step] += 1
        with contextlib.suppress(JobStopped):  # the supervisor is gone: the member says so
            if self._broken[slot, step] >= ATTEMPTS and here > slot:
                self._member.leave(f"{evidence}, {ATTEMPTS} times in one step")
                exit_at_once(0)
            self._member.severed(epoch, evidence)
