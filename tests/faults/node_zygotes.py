"""Zygotes of the nodes of a network, which import what they need once.

python -m tests.faults.node_zygotes MODULES PID=SOCKET...: one in the network namespace of each
process, which serves at the socket until SIGTERM.
"""

import ctypes
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from elaswave_plugin.ipc.process_tree import die_with_parent, exit_at_once
from elaswave_plugin.trainer import zygote

_CLONE_NEWNET = 0x40000000


def main(argv: Sequence[str]) -> int:
    """Import, fork one for each namespace, and end when they have ended."""
    preload, *places = argv
    os.environ[zygote.NVML_CHECK] = "1"
    for name in preload.split(","):
        importlib.import_module(name)
    own, pids = os.getpid(), list[int]()

    def end(*_: Any) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGTERM)

    for place in places:
        inside, _, path = place.partition("=")
        if not (pid := os.fork()):
            die_with_parent(own)
            enter_network_of(int(inside))
            return zygote.main([f"--socket={path}", f"--preload={preload}"])
        pids.append(pid)
    signal.signal(signal.SIGTERM, end)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)


def enter_network_of(pid: int) -> None:
    """Enter the network namespace of a process; raises OSError where that is refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    refused = libc.setns(descriptor, _CLONE_NEWNET)
    os.close(descriptor)
    if refused:
        raise OSError(ctypes.get_errno(), f"setns to the network of process {pid}")


if __name__ == "__main__":
    exit_at_once(main(sys.argv[1:]))  # to take the frameworks apart would take seconds
