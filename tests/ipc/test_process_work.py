"""The work of a process group that its leader's progress page does not tell of."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elaswave_plugin.ipc.process_tree import IN_KERNEL, WorkWatch, state_of
from tests.idle import Deadline

# Longer than between two looks.
LOOK_S = 0.6
LOOP = "print('begins', flush=True)\nwhile True: pass"
SLEEP = "import time\nprint('begins', flush=True)\nwhile True: time.sleep(1)"
# As slow as a throttled disk, and waiting for it all the time.
WRITE = """
import sys, time
print("begins", flush=True)
with open(sys.argv[1], "wb", buffering=0) as file:
    while True:
        file.write(bytes(8192)); time.sleep(0.2)
"""


@contextmanager
def group(code: str, *args: str, python: str = sys.executable) -> Iterator[int]:
    """A leader of a group that has started this program, which has begun, and waits for it."""
    # The variable: a copy of the interpreter looks for its library beside itself.
    leader = f"import subprocess, sys; subprocess.run({[python, '-c', code, *args]!r})"
    env = {**os.environ, "PYTHONHOME": sys.base_prefix}
    process = subprocess.Popen(
        [sys.executable, "-c", leader], process_group=0, env=env, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        yield process.pid
    finally:
        os.killpg(process.pid, 9)
        process.communicate()


def works(watch: WorkWatch, pid: int, *, any_work: bool, looks: int = 4) -> bool:
    """Return whether it is seen at work in a later look than the first."""
    since_s = time.monotonic() - 10.0
    assert watch.last_s(pid, since_s, any_work=any_work) == since_s, "the first look only learns"
    for _ in range(looks):
        time.sleep(LOOK_S)
        if watch.last_s(pid, since_s, any_work=any_work) > since_s:
            return True
    return False


def test_a_child_that_computes_counts_in_a_save_only() -> None:
    with group(LOOP) as pid:
        assert works(WorkWatch(), pid, any_work=True)
        assert not works(WorkWatch(), pid, any_work=False)


def test_a_child_that_writes_slowly_counts_in_a_save(tmp_path: Path) -> None:
    with group(WRITE, str(tmp_path / "file")) as pid:
        assert works(WorkWatch(), pid, any_work=True)


def test_children_that_do_nothing_do_not_count() -> None:
    with group(SLEEP) as pid:
        assert not works(WorkWatch(), pid, any_work=True)


def test_a_compiler_counts_in_any_phase(tmp_path: Path) -> None:
    """The kernel names a process after its file."""
    compiler = tmp_path / "cc1plus"
    shutil.copy(Path(sys.executable).resolve(), compiler)
    with group(LOOP, python=str(compiler)) as pid:
        assert works(WorkWatch(), pid, any_work=False)


def test_work_before_the_last_progress_does_not_count() -> None:
    with group(LOOP) as pid:
        watch = WorkWatch()
        assert works(watch, pid, any_work=True)
        now_s = time.monotonic()
        assert watch.last_s(pid, now_s, any_work=True) == now_s


# A parent sleeps in the kernel from vfork(2) until its child ends or calls exec.
VFORK = """
import ctypes, os, sys, time
CLONE_VFORK, SIGCHLD, SYS_CLONE = 0x4000, 17, 56
print("begins", flush=True)
if ctypes.PyDLL(None).syscall(SYS_CLONE, CLONE_VFORK | SIGCHLD, 0, 0, 0, 0) == 0:
    time.sleep(60)
    os._exit(0)
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of a system call")
def test_a_sleep_in_the_kernel_is_seen() -> None:
    with group(SLEEP) as pid:
        assert state_of(pid) != IN_KERNEL
    process = subprocess.Popen(
        [sys.executable, "-c", VFORK], process_group=0, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        deadline = Deadline(10.0)
        while state_of(process.pid) != IN_KERNEL:
            assert deadline.left_s(), state_of(process.pid)
    finally:
        os.killpg(process.pid, 9)
        process.communicate()
    assert state_of(process.pid) == ""
