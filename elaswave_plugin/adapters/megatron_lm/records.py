"""A patch record of Megatron-LM or Megatron-Core, for the versions that are known."""

from collections.abc import Callable
from typing import Any

from elaswave_plugin.adapters.patching import PatchRecord


def record(
    target: str,
    make: Callable[[Any], Any],
    reason: str,
    *parameters: str,
    gone: str | None = None,
) -> PatchRecord:
    """Replace ``target`` by what ``make`` makes of it; ``parameters``: those it has to have.

    ``gone``: versions that have no such target.
    """
    return PatchRecord(
        target=target,
        reason=reason,
        distribution="megatron-core",
        valid=">=0.16.1,<0.18",
        make=make,
        parameters=parameters or None,
        gone=gone,
    )
