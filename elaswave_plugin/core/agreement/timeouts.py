"""The timeouts of an agent."""

from dataclasses import dataclass

from elaswave_plugin.errors import ConfigurationError

_LEAST_BEATS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """The times that things may take before the agent acts."""

    join_timeout_s: float = 900.0
    quiesce_timeout_s: float = 30.0
    quorum_wait_s: float = 5.0
    link_grace_s: float = 1.0
    finish_grace_s: float = 30.0
    notice_timeout_s: float = 25.0

    @property
    def gather_s(self) -> float:
        """The seconds between the first notice to leave and the first departure.

        A scheduler that tells all workers to leave tells them one after the other.
        """
        return min(1.0, self.notice_timeout_s / 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """An agent that is silent for `timeout_s` is lost; each sends a beat every `every_s`."""

    every_s: float = 0.5
    timeout_s: float = 3.0

    def __post_init__(self) -> None:
        """Raise ConfigurationError if one or two late beats would be the loss of a worker."""
        least_s = _LEAST_BEATS * self.every_s
        if self.timeout_s < least_s:
            raise ConfigurationError(
                f"--heartbeat-timeout-s is {self.timeout_s:g}, wanted {least_s:g} or more: a beat"
                f" comes every {self.every_s:g} s"
            )
