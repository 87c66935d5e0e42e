"""The check that a worker that comes later runs the job's program (standard library only)."""

import contextlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from elaswave_plugin.ipc.environment import Program
from elaswave_plugin.version import __version__

# What each node has a place of its own for.
_OF_THE_NODE = "--elaswave-dir"


def describe_program(program: Program) -> dict[str, Any]:
    """Describe what has to be alike for two workers of one job; the script by its content."""
    digest = None
    if not program.module:
        with contextlib.suppress(OSError):
            digest = zlib.crc32(Path(program.script).read_bytes())
    return {
        "version": __version__,
        "name": program.script if program.module else Path(program.script).name,
        "module": program.module,
        "args": list(_of_the_job(program.args)),
        "digest": digest,
    }


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Say where two descriptions first differ, and what to give; None where they are alike."""
    if ours["version"] != theirs.get("version"):
        return (
            f"the job runs version {theirs.get('version')} of elaswave_plugin, and this is version"
            f" {ours['version']}: install the job's version here"
        )
    if any(ours[key] != theirs[key] for key in ("name", "module", "digest")):
        return (
            f"the job runs {theirs['name']}, and the {ours['name']} here differs from it: give the"
            " same script"
        )
    before = "the script's name"
    for here, there in zip_longest(ours["args"], theirs["args"]):
        if here != there:
            said = [repr(one) if one is not None else "nothing" for one in (here, there)]
            return (
                f"after {before} the script gets {said[0]} here and {said[1]} in the job: give the"
                " job's arguments"
            )
        before = repr(here)
    return None


def _of_the_job(args: Sequence[str]) -> Iterator[str]:
    """Yield the arguments except the run directory, which may differ from node to node."""
    words = iter(args)
    for word in words:
        name, equals, _ = word.partition("=")
        if name != _OF_THE_NODE:
            yield word
        elif not equals:
            next(words, None)
