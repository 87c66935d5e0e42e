"""Runs a Megatron-Core script whose draws are not keyed: each worker draws from its own stream.

    elaswave run ... benchmarks/drawn_by_worker.py SCRIPT ARGUMENTS...

As it is without the plugin: what a worker draws depends on what it has run before.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

from elaswave_plugin.adapters.megatron.compat import rng


def leave_generators_alone() -> None:
    """Take the keys of steps, samples and layers out."""
    keyed: Any = rng
    for name in ("set_key", "settle", "install_keyed_draws"):
        setattr(keyed, name, lambda *_, **__: None)


if __name__ == "__main__":
    script, *arguments = sys.argv[1:]
    leave_generators_alone()
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")
