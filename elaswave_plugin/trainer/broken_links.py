"""The response of a worker to a link to a live worker that broke while it was needed."""

import contextlib
from collections import Counter

from elaswave_plugin.errors import JobStopped
from elaswave_plugin.ipc.process_tree import exit_at_once
from elaswave_plugin.trainer.member import Member

# Each costs a view change and a redone step.
ATTEMPTS = 3
# Where the other machine answers nothing, each has taken seconds as well.
SILENT_ATTEMPTS = 2


class BrokenLinks:
    """Has the view renewed, which dials again; a pair that stays apart loses its higher slot."""

    def __init__(self, member: Member, *, returns: bool) -> None:
        """``returns``: another worker is started in the place of one that is given up."""
        self._member = member
        self._returns = returns
        self._broken: Counter[tuple[int, int]] = Counter()

    def report(self, slot: int, why: str, *, silent: bool, epoch: int, step: int) -> None:
        """The link to `slot` broke in this epoch, while `step` steps were completed.

        Mostly the peer is dead: the agents know that first, and forget this report.
        ``silent``: its machine answers nothing, though agents may still hear it.
        """
        here = self._member.slot
        evidence = f"the link between workers {here} and {slot} is {why}"
        self._broken[slot, step] += 1
        with contextlib.suppress(JobStopped):  # the agent is gone: the member says so
            times = self._broken[slot, step]
            apart = f"{evidence}, {times} times in one step"
            if times >= (SILENT_ATTEMPTS if silent else ATTEMPTS) and here > slot:
                # Another one is let in as soon as it reaches all.
                self._member.leave(apart, returns=silent and self._returns)
                exit_at_once(0)
            self._member.severed(epoch, evidence)
