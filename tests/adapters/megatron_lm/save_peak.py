"""Prints what a process of Megatron-LM holds at most in a save, and what it held before it."""

import functools
import os
import sys
from pathlib import Path
from typing import Any


def watch() -> None:
    """Have each save say so; in a script whose Megatron-LM can be imported."""
    from megatron.training import training

    module: Any = training
    native = module.save_checkpoint

    @functools.wraps(native)
    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        # The peak is counted from here on.
        Path("/proc/self/clear_refs").write_text("5")
        before = _kib("VmRSS")
        result = native(*args, **kwargs)
        # In one piece: all workers write to the same place.
        os.write(sys.stdout.fileno(), b"save: %d KiB, %d before\n" % (_kib("VmHWM"), before))
        return result

    module.save_checkpoint = save_checkpoint


def _kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(found)
