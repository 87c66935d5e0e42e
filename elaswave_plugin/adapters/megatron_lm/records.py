"""A patch record of Megatron-LM or Megatron-Core, for the versions that are known."""

from collections.abc import Callable
from inspect import unwrap
from typing import Any

from elaswave_plugin.adapters.patching import Hook, PatchRecord


def record(
    target: str,
    make: Callable[[Any], Any],
    reason: str,
    *parameters: str,
    gone: str | None = None,
    hook: Hook | None = None,
) -> PatchRecord:
    """Replace ``target`` by what ``make`` makes of it; ``parameters``: those it has to have.

    ``gone``: versions that have no such target; ``hook``: set where the source has it.
    """
    return PatchRecord(
        target=target,
        reason=reason,
        distribution="megatron-core",
        valid=">=0.16.1,<0.18",
        make=make,
        parameters=parameters or None,
        gone=gone,
        hook=hook,
    )


def by_name(target: str, make: Callable[[Any], Any]) -> Hook:
    """The hook that ``replaceable`` of patches/megatron-lm gives to a function of a module.

    The function there asks the hook, which is to call the one below it.
    """
    return Hook(f"{target}_hook", lambda function: make(unwrap(function)))
