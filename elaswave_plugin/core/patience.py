"""How long a supervisor waits before it acts."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long things may take before something is done about it."""

    join_timeout_s: float = 900.0
    quiesce_timeout_s: float = 30.0
    quorum_wait_s: float = 5.0
    link_grace_s: float = 1.0
    finish_grace_s: float = 30.0
    notice_timeout_s: float = 25.0

    @property
    def gather_s(self) -> float:
        """For how long others may be told to leave too, before the first of them does.

        Whoever tells all of them does so one after the other.
        """
        return min(1.0, self.notice_timeout_s / 10)
