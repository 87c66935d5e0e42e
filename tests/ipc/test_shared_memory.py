"""Memory that a process makes is found by another one of its node that has the key."""

import gc
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaswave_plugin.ipc.shared_memory import Place, SharedMemory

WRITE = """
import sys
from elaswave_plugin.ipc.shared_memory import Place, SharedMemory
found = SharedMemory.find(Place(sys.argv[1], sys.argv[2]))
found.data[:5] = b"there"
"""


def _open() -> set[str]:
    """Return what is open here, without what lists it, whose number is any that is free."""
    return {one for one in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{one}")}


@pytest.fixture(autouse=True)
def _no_threads_of_others() -> Iterator[None]:
    """Threads and garbage of another test are gone: else descriptors close while one counts."""
    _await_threads()
    gc.collect()
    yield
    _await_threads()


def test_another_process_writes_what_this_one_reads() -> None:
    before = _open()
    memory = SharedMemory.make("test", 1 << 20)
    assert len(memory.data) == 1 << 20 and memory.data[:5] == bytes(5)
    subprocess.run([sys.executable, "-c", WRITE, *memory.place], check=True, timeout=60)
    assert memory.data[:5] == b"there"
    memory.close()
    assert SharedMemory.find(memory.place) is None
    _await_threads()
    assert _open() <= before  # garbage of others may have gone


def test_one_that_was_found_is_handed_on_when_its_maker_is_gone() -> None:
    memory = SharedMemory.make("test", 4096)
    memory.data[:5] = b"maker"
    found = SharedMemory.find(memory.place)
    assert found is not None and found.place != memory.place
    memory.close()
    third = SharedMemory.find(found.place)
    assert third is not None and third.data[:5] == b"maker"
    found.close()
    third.close()


def test_without_the_key_nothing_is_handed_over() -> None:
    memory = SharedMemory.make("test", 4096)
    other = SharedMemory.make("test", 4096)
    assert SharedMemory.find(Place(memory.place.name, other.place.key)) is None
    assert SharedMemory.find(Place("elaswave memory of none", memory.place.key)) is None
    # A process that says nothing is left alone, and does not keep others out for long.
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(f"\0{memory.place.name}")
        silent.sendall(b"no handshake" * 10)
        found = SharedMemory.find(memory.place)
        assert found is not None
        found.close()
    memory.close()
    other.close()


def test_a_descriptor_of_no_memory_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a pipe, in place of the memory."""
    before = _open()
    memory = SharedMemory.make("test", 4096)
    reader, writer = os.pipe()
    send = socket.send_fds
    monkeypatch.setattr(socket, "send_fds", lambda sock, data, _: send(sock, data, [reader]))
    assert SharedMemory.find(memory.place) is None
    for one in (reader, writer):
        os.close(one)
    memory.close()
    _await_threads()
    assert _open() <= before  # garbage of others may have gone


def test_no_process_opens_memory_of_another_one_by_its_path() -> None:
    source = Path("elaswave_plugin/ipc/shared_memory.py").read_text()
    assert "/proc" not in source


def _await_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "shared-memory":
            thread.join(10)
            assert not thread.is_alive()
