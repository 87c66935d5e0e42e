"""Has a worker that comes later meet nobody where Accelerate makes a group of CPUs by itself.

With ``use_cpu`` it does so before DeepSpeed is asked, by a store in which the others of the launch
have met long ago.
"""

import functools
import os
import sys
from importlib import import_module
from typing import Any

# Of the workers of a job (ipc/environment.py); 0 for those of the launch.
_INCARNATION = "ELASWAVE_INCARNATION"
_MARK = "__elaswave__"


def install() -> None:
    """Look at each question for a backend; changes nothing on a worker of the launch."""
    kind = sys.modules["accelerate.state"].PartialState
    native = kind._prepare_backend
    if hasattr(native, _MARK):
        return

    @functools.wraps(native)
    def _prepare_backend(self: Any, cpu: bool = False, *args: Any, **given: Any) -> Any:
        # Asked now: a process that has imported this may be forked into a worker.
        if cpu and int(os.environ.get(_INCARNATION, "0")):
            import_module("elaswave_plugin.adapters.deepspeed.engine.newcomer").meet_nobody()
        return native(self, cpu, *args, **given)

    _prepare_backend.__dict__[_MARK] = True
    kind._prepare_backend = _prepare_backend
