"""The line of Python in which a trainer is, read without its help (standard library only).

py-spy reads it where that is installed. Else the trainer's own fault handler writes its stack,
behind its progress page. It does so from a signal, also where the interpreter is stuck in C.
"""

import contextlib
import faulthandler
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from elaswave_plugin.ipc.progress_page import PAGE_NAME, ProgressPage, page_fd

# None that a framework or a scheduler uses.
STACK_SIGNAL = signal.SIGRTMAX - 1
_PY_SPY_S = 5.0
_DUMP_S = 1.0
_LOOK_AGAIN_S = 0.01
# `  File "/x/dataset.py", line 12 in build`.
_OF_FAULTHANDLER = re.compile(r'^ +File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')


def offer_stack(environ: Mapping[str, str]) -> None:
    """Have this process, a trainer that begins, write its stack when it is asked for."""
    number = page_fd(environ)
    if number is not None:
        os.lseek(number, 0, os.SEEK_END)  # behind the page
        faulthandler.register(STACK_SIGNAL, file=number, all_threads=True)
        page = ProgressPage(number)
        page.offer_stack(number)
        page.close()


def where_is(pid: int, stack_fd: int) -> str | None:
    """The line of a trainer's main thread, as "dataset.py:12 in build"; None where unknown.

    ``stack_fd``: its descriptor to which it writes its stack, 0 where it does not. Takes up to some
    seconds.
    """
    if not pid:
        return None
    return _by_py_spy(pid) or (_by_faulthandler(pid, stack_fd) if stack_fd else None)


def _by_py_spy(pid: int) -> str | None:
    command = shutil.which("py-spy") or shutil.which(
        "py-spy", path=str(Path(sys.executable).parent)
    )
    if command is None:
        return None
    try:
        done = subprocess.run(
            [command, "dump", "--nonblocking", "--json", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=_PY_SPY_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None  # it may not look into other processes here
    # It knows the names of threads only where the script has imported `threading`.
    for thread in json.loads(done.stdout):
        if thread["os_thread_id"] == pid and thread["frames"]:
            frame = thread["frames"][0]
            return f"{Path(frame['filename']).name}:{frame['line']} in {frame['name']}"
    return None


def _by_faulthandler(pid: int, fd: int) -> str | None:
    """The main thread is the last one: threads are listed youngest first."""
    path = f"/proc/{pid}/fd/{fd}"
    with contextlib.suppress(OSError):
        if PAGE_NAME not in os.readlink(path):
            return None  # the process runs another program by now
        with open(path, "rb") as file:
            start = file.seek(0, os.SEEK_END)
            os.kill(pid, STACK_SIGNAL)
            return _first_line(_written(file, start).split("\n\n")[-1])
    return None


def _written(file: BinaryIO, start: int) -> str:
    """Return what a handler writes from ``start`` on, once no more comes; nothing without one."""
    deadline_s, text, before = time.monotonic() + _DUMP_S, b"", None
    while time.monotonic() < deadline_s and (not text or text != before):
        # Nothing can be waited for: a handler of a signal only writes.
        time.sleep(_LOOK_AGAIN_S)
        file.seek(start)
        before, text = text, file.read()
    return text.decode(errors="replace")


def _first_line(text: str) -> str | None:
    """The innermost frame."""
    for line in text.splitlines():
        found = _OF_FAULTHANDLER.match(line)
        if found:
            return f"{Path(found['file']).name}:{found['line']} in {found['name']}"
    return None
