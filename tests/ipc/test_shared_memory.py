"""Memory that a process makes is found by another one of its node, and by nobody else."""

import os
import subprocess
import sys

from elaswave_plugin.ipc.shared_memory import Place, SharedMemory

WRITE = """
import sys
from elaswave_plugin.ipc.shared_memory import Place, SharedMemory
found = SharedMemory.find(Place(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
found.data[:5] = b"there"
"""


def test_another_process_writes_what_this_one_reads() -> None:
    memory = SharedMemory.make("test", 1 << 20)
    assert len(memory.data) == 1 << 20 and memory.data[:5] == bytes(5)
    arguments = [str(one) for one in memory.place]
    subprocess.run([sys.executable, "-c", WRITE, *arguments], check=True, timeout=60)
    assert memory.data[:5] == b"there"
    memory.close()
    assert SharedMemory.find(memory.place) is None


def test_what_is_not_that_memory_is_not_opened() -> None:
    memory = SharedMemory.make("test", 4096)
    other = SharedMemory.make("test", 4096)
    pid, fd, name = memory.place
    assert SharedMemory.find(Place(pid, fd, other.place.name)) is None
    assert SharedMemory.find(Place(pid, other.place.fd, name)) is None
    # A pipe, which an open would wait for.
    reader, writer = os.pipe()
    assert SharedMemory.find(Place(pid, reader, name)) is None
    assert SharedMemory.find(Place(2**22 + 1, fd, name)) is None
    for one in (reader, writer):
        os.close(one)
    memory.close()
    other.close()
