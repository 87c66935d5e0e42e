"""`PYTHON_EXEC=elaswave-python torchrun ... script.py`: python that supervises workers.

torchrun starts its workers with the interpreter that PYTHON_EXEC names. Called for a worker's
script or module, this is `elaswave_plugin.run`; called for anything else, it is python.
"""

import os
import sys
from collections.abc import Mapping, Sequence

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.environment import AGENT, Program
from elaswave_plugin.launch.standard_streams import fill_closed_streams
from elaswave_plugin.launch.torchrun import supervise

_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_WORKER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main(argv: Sequence[str] | None = None) -> int:
    """Behave as python does, with an agent beside a worker's program."""
    words = list(sys.argv[1:] if argv is None else argv)
    program = worker_program(words, os.environ)
    if program is None:
        os.execv(sys.executable, [sys.executable, *words])
    fill_closed_streams()
    try:
        return supervise(program, os.environ)
    except ConfigurationError as error:
        print(f"elaswave-python: {error}", file=sys.stderr)
        return 2


def worker_program(words: Sequence[str], env: Mapping[str, str]) -> Program | None:
    """Return what a worker is to run; None where python itself is meant.

    That is with -c, without a script, and for a process that is not a worker.
    """
    if AGENT in env or any(name not in env for name in _WORKER):
        return None
    position = 0
    while position < len(words) and words[position].startswith("-") and words[position] != "-m":
        if words[position] in ("-", "-c") or words[position].startswith(("-c", "-h", "-V", "--v")):
            return None
        position += 2 if words[position] in _WITH_VALUE else 1
    options, rest = tuple(words[:position]), list(words[position:])
    module = rest[:1] == ["-m"]
    if module:
        rest = rest[1:]
    if not rest:
        return None
    return Program(script=rest[0], args=tuple(rest[1:]), module=module, options=options)


if __name__ == "__main__":
    sys.exit(main())
