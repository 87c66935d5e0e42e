"""The program of a job, which all its nodes have to have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elaswave_plugin.agent.peers.same_program import describe_program, difference
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.environment import Program
from elaswave_plugin.launch.options import LaunchSpec

_OPTIONS = (("nproc", "--nproc-per-node"), ("reserve", "--reserve"))


def program_of(spec: LaunchSpec) -> dict[str, Any]:
    """Describe what a job cannot begin with where it differs from node to node."""
    program = Program(script=spec.script, args=spec.args, module=spec.module)
    alike = {"nproc": spec.nproc_per_node, "reserve": spec.reserve}
    return {**describe_program(program), **alike}


def check_alike(ours: Mapping[str, Any], theirs: Mapping[str, Any], *, joins: bool = False) -> None:
    """Raise ConfigurationError for the first difference.

    A node that joins takes the job's own options from the job.
    """
    for name, option in () if joins else _OPTIONS:
        if theirs.get(name) != ours[name]:
            raise ConfigurationError(
                f"{option} is {ours[name]}, and {theirs.get(name)} in the job of this name"
            )
    differs = difference(ours, theirs)
    if differs is not None:
        raise ConfigurationError(differs)
