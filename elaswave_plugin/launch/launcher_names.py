"""Other launchers' names for what torchrun sets: Open MPI's, and Slurm's in a step of srun."""

from __future__ import annotations

import re
from collections.abc import Mapping

from elaswave_plugin.errors import ConfigurationError

_OF_OPEN_MPI = (
    ("RANK", "OMPI_COMM_WORLD_RANK"),
    ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)
_OF_SLURM = (
    ("RANK", "SLURM_PROCID"),
    ("WORLD_SIZE", "SLURM_NTASKS"),
    ("LOCAL_RANK", "SLURM_LOCALID"),
    ("GROUP_RANK", "SLURM_NODEID"),
)
# Of the step, and of the allocation where that is not set: as "2(x3),1".
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
# Those above are salloc's shell and the like (slurm.h): one process, of whatever number of tasks.
_LAST_STEP_OF_SRUN = 0xFFFFFFF0


def torchrun_names(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with torchrun's names too, where it has another launcher's.

    Raises ConfigurationError where Slurm's numbers are none.
    """
    found = {**{ours: env[name] for ours, name in _OF_OPEN_MPI if name in env}, **env}
    return {**_of_slurm(found), **found}


def _of_slurm(env: Mapping[str, str]) -> dict[str, str]:
    """Name what Slurm says of this task, if it is srun that has started it.

    A batch script has SLURM_PROCID and SLURM_NTASKS too, but no step. A launcher that a step has
    started has ranks of its own, which Slurm's would contradict.
    """
    if not _is_step_of_srun(env) or any(name not in env for _, name in _OF_SLURM):
        return {}
    found = {ours: env[name] for ours, name in _OF_SLURM}
    if any(env.get(name, found[name]) != found[name] for name in ("RANK", "WORLD_SIZE")):
        return {}
    for name in _TASKS_PER_NODE:
        if name in env:
            width = _tasks_of_node(name, env[name], env["SLURM_NODEID"])
            return {**found, "LOCAL_WORLD_SIZE": width}
    return found


def _is_step_of_srun(env: Mapping[str, str]) -> bool:
    step = env.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) <= _LAST_STEP_OF_SRUN


def _tasks_of_node(name: str, text: str, node: str) -> str:
    """Read the number of a node's tasks, the third node's of "2(x2),1" being 1."""
    counts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    place = int(node) if node.isdecimal() else -1
    for count in counts:
        if count is None or place < 0:
            break
        place -= int(count[2] or 1)
        if place < 0:
            return count[1]
    raise ConfigurationError(
        f"{name} is {text!r} and SLURM_NODEID {node!r}, wanted numbers such as '2(x3),1' and 3"
    )
