"""Gives a GPU its own clocks back when a trainer is gone (standard library and NVML only).

python -m elaswave_plugin.recovery.clock_guard PID UUID
"""

import contextlib
import os
import select
import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    """Wait until process PID is gone, and unlock the clocks of the GPU UUID."""
    import pynvml

    # A scheduler signals every process of a job; this one has something to do after the trainer.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pid, uuid = int(arguments[0]), arguments[1]
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    # A trainer that is gone already has left its clocks as well.
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        print("watching", flush=True)
        select.select([pidfd], [], [])
    pynvml.nvmlDeviceResetGpuLockedClocks(gpu)


if __name__ == "__main__":
    main(sys.argv[1:])
