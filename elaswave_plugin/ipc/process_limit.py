"""Says in a sentence that no more processes or threads may be started (standard library only)."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

from elaswave_plugin.errors import ConfigurationError

# What threading says, which has no class of its own for it.
_NO_THREAD = "can't start new thread"


@contextmanager
def explained_process_limit() -> Iterator[None]:
    """Raise ConfigurationError in the place of what a limit of processes makes the block raise."""
    try:
        yield
    except BlockingIOError as error:
        raise ConfigurationError(_sentence(error.strerror or "fork")) from error
    except RuntimeError as error:
        if str(error) != _NO_THREAD:
            raise
        raise ConfigurationError(_sentence(_NO_THREAD)) from error


def _sentence(why: str) -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limit = "without limit" if soft == resource.RLIM_INFINITY else str(soft)
    return (
        f"this user may start no more processes or threads ({why}; `ulimit -u` is {limit}): raise "
        "it, or the pids limit of the container; a worker takes two processes and tens of threads"
    )
