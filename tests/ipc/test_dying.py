"""The end of a large process is seen while its memory is being freed."""

import mmap
import os
import select
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from elaswave_plugin.ipc.process_tree import dying_by, resident_bytes

GIB = 1 << 30
LIMIT_S = 30.0


@pytest.fixture
def large() -> Iterator[int]:
    """A process that holds two GiB in small pages, and has a second thread."""
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        memory = mmap.mmap(-1, 2 * GIB)
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        held = np.frombuffer(memory, dtype=np.uint8)
        held[:] = 1
        threading.Thread(target=time.sleep, args=(LIMIT_S,), daemon=True).start()
        os.write(told, b"%d" % held[-1])
        time.sleep(LIMIT_S)
        os._exit(0)
    os.close(told)
    try:
        assert os.read(ready, 1) == b"1"
        yield pid
    finally:
        os.close(ready)
        os.kill(pid, signal.SIGKILL)  # not reaped yet
        os.waitpid(pid, 0)


def test_it_is_seen_before_the_process_is_gone(large: int) -> None:
    assert resident_bytes(large) >= 2 * GIB
    assert dying_by(large) == 0
    pidfd = os.pidfd_open(large)
    gone = select.poll()
    gone.register(pidfd, select.POLLIN)
    os.kill(large, signal.SIGKILL)
    began_s = time.monotonic()
    while not (number := dying_by(large)):
        assert time.monotonic() - began_s < LIMIT_S
    seen_s = time.monotonic() - began_s
    was_there = not gone.poll(0)
    gone.poll(1e3 * LIMIT_S)
    gone_s = time.monotonic() - began_s
    os.close(pidfd)
    print(f"seen after {1e3 * seen_s:.1f} ms, gone after {1e3 * gone_s:.1f} ms")
    assert number == signal.SIGKILL
    assert was_there and seen_s < gone_s / 2
    assert resident_bytes(large) == 0


def test_control_of_one_that_is_not_there_nothing_is_said() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert (dying_by(pid), resident_bytes(pid)) == (0, 0)
