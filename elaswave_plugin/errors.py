"""The exceptions of elaswave_plugin, in one tree.

ElasWaveError                      anything that can happen in a run
├── ConfigurationError             bad input or an unsupported setting (a ValueError; exit 2)
│   └── PatchMismatchError         the installed framework is not that of a patch record
├── AgreementError                 the members cannot agree on a view (majority lost, late)
├── PlanDigestError                workers computed different plans from one commit
├── WeightsDifferError             replicas hold other weights after a recovery, read again as well
├── LayoutError                    the live workers do not make a layout any more
├── TooLittleMemoryError           what a loss adds fits into no memory, however it is dealt
├── SnapshotGapError               state is lost with all its copies; the missing shards are named
├── CheckpointUnreadableError      what the tracker of a directory names cannot be loaded
├── SnapshotUnreadableError        sealed bytes do not arrive, or not as they were sealed
├── UnreadableValueError           bytes of another worker are no plain value, or of another version
├── LinkError                      a link to a live worker failed or timed out
│   ├── MismatchError              members of a group do not call the same collective
│   └── PeerError                  another member's part of a collective failed; says whose and why
└── JobStopped                     the job ends by a decision of the coordinator; carries the reason

EpochChanged                       not an error: control flow that unwinds the interrupted step
"""

from typing import Any

EXIT_FAILED = 1
EXIT_CONFIGURATION = 2
# Of an agent whose part of the job ends: others may go on, and it is they who tell the job's.
EXIT_LEFT_OUT = 72
EXIT_REQUEUE = 75
# As a process that SIGTERM ends.
EXIT_TOLD = 143


class ElasWaveError(Exception):
    """Anything that can go wrong in a run."""


class ConfigurationError(ElasWaveError, ValueError):
    """Bad input or an unsupported setting: the value seen, the value wanted and what to do."""


class PatchMismatchError(ConfigurationError):
    """The installed framework does not match the range or fingerprint of a patch record."""


class AgreementError(ElasWaveError):
    """The members cannot agree on the next view."""


class PlanDigestError(ElasWaveError):
    """Workers computed different plans from the same commit."""


class WeightsDifferError(ElasWaveError):
    """Replicas hold different weights after a recovery, also when all of it was read again."""


class LayoutError(ElasWaveError):
    """The live workers do not make up a layout any more; the message says what is missing."""


class TooLittleMemoryError(ElasWaveError):
    """A loss adds to a worker what does not fit; the message says what was wanted and free."""


class SnapshotGapError(ElasWaveError):
    """State was lost together with all its copies; the message names the missing shards."""


class CheckpointUnreadableError(ElasWaveError):
    """A checkpoint to load cannot be read; the message names the file and the newest whole one."""


class UnreadableValueError(ElasWaveError):
    """Bytes of another worker are no plain value, or one of another version of the package."""


class LinkError(ElasWaveError):
    """A link to a worker that is believed to be alive failed or timed out."""


class MismatchError(LinkError):
    """Members of a group do not call the same collective, or on tensors that do not match."""


class PeerError(LinkError):
    """Another member's part of the same collective failed; the message says whose and why."""


class JobStopped(ElasWaveError):
    """The coordinator ended the job, or this worker's part; the message is its reason."""

    def __init__(self, reason: str, *, exit_code: int = 1) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


class EpochChanged(BaseException):
    """A new view is proposed: the current step unwinds.

    A BaseException, so that no ``except Exception`` of a framework or user swallows it.
    """

    def __init__(self, epoch: int, reason: str = "") -> None:
        super().__init__(
            f"the workers changed ({reason}; view {epoch}) during a call that is not made again: "
            "have the job's run() call what makes it (with DeepSpeed, run of "
            "elaswave_plugin.deepspeed)"
        )
        self.epoch = epoch
        self.reason = reason


class SnapshotUnreadableError(ElasWaveError):
    """Sealed bytes did not arrive, or not as they were sealed; another holder is tried.

    ``sealed``: which ones and where, a `SealedShard` (core/layout/worker_facts.py).
    """

    def __init__(self, message: str, sealed: Any) -> None:
        super().__init__(message)
        self.sealed = sealed
