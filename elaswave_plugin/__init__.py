"""Public names of elaswave_plugin; importing it imports no torch, no framework and no pydantic."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from elaswave_plugin.errors import (
    AgreementError,
    ConfigurationError,
    ElasWaveError,
    EpochChanged,
    JobStopped,
    LayoutError,
    LinkError,
    PatchMismatchError,
    PeerError,
    PlanDigestError,
    SnapshotGapError,
    SnapshotUnreadableError,
    TooLittleMemoryError,
    WeightsDifferError,
)

if TYPE_CHECKING:
    from elaswave_plugin.config import ElasticConfig
    from elaswave_plugin.ipc.progress_page import phase
    from elaswave_plugin.kept import keep
    from elaswave_plugin.loss_terms import terms


__all__ = [
    "AgreementError",
    "ConfigurationError",
    "ElasWaveError",
    "ElasticConfig",
    "EpochChanged",
    "JobStopped",
    "LayoutError",
    "LinkError",
    "PatchMismatchError",
    "PeerError",
    "PlanDigestError",
    "SnapshotGapError",
    "SnapshotUnreadableError",
    "TooLittleMemoryError",
    "WeightsDifferError",
    "keep",
    "phase",
    "terms",
]

_LAZY = (
    ("__version__", "elaswave_plugin.version"),
    ("ElasticConfig", "elaswave_plugin.config"),
    ("keep", "elaswave_plugin.kept"),
    ("phase", "elaswave_plugin.ipc.progress_page"),
    ("terms", "elaswave_plugin.loss_terms"),
)


def __getattr__(name: str) -> Any:
    for public, module in _LAZY:
        if name == public:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
