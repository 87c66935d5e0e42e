"""The limit of files that a process may have open: as many as the job's workers ask for."""

from __future__ import annotations

import resource

from elaswave_plugin.errors import ConfigurationError

OWN_DESCRIPTORS = 256
"""The most that a worker has open beside one connection with each of the others."""


def allow_descriptors(workers: int) -> None:
    """Raise the limit of this process and its children by what a job of this many workers needs.

    Raises ConfigurationError where the hard limit is too low for it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = workers + OWN_DESCRIPTORS
    most = soft + needed if hard == resource.RLIM_INFINITY else hard
    if most < needed:
        raise ConfigurationError(
            f"the limit of open files is {most} (`ulimit -Hn`), wanted at least {needed}: each of "
            f"{workers} workers has a connection with each other one; raise it on every node"
        )
    # Not to the hard limit, which may be a billion: some programs go through all numbers below it.
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, soft + needed), hard))
