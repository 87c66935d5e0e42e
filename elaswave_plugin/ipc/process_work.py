"""The work that a trainer and what it has started do while its progress page stands still."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elaswave_plugin.ipc.process_tree import group_members

COMPILERS = (
    *("as", "c++", "cc1", "cc1plus", "cicc", "clang", "clang++", "cudafe++", "g++", "gcc", "ld"),
    *("ninja", "nvcc", "ptxas"),
)
"""The programs that build kernels: those of torch's extensions and of its inductor."""
# A look goes through all processes of the machine.
_EVERY_S = 0.5
# What the other threads of a trainer do, such as to log, is no progress of a save.
_BUSY = 0.05
_LEAST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Work:
    """Processor seconds and written bytes of some processes, since each of them began."""

    processor_s: float = 0.0
    written: int = 0


class WorkWatch:
    """The moment at which a process group was last seen at work, on the monotonic clock.

    A compiler's work counts in every phase; where ``any_work``, as in a save, that of all of them.
    """

    def __init__(self) -> None:
        self._looked_s = 0.0
        self._kind = False
        self._before = Work()
        self._last_s = 0.0

    def last_s(self, leader_pid: int, since_s: float, *, any_work: bool) -> float:
        """Return when the group of this leader last worked, if after `since_s`, else `since_s`.

        `since_s`: when the leader last told of progress. The first look only learns.
        """
        now_s = time.monotonic()
        if now_s - since_s >= _EVERY_S and now_s - self._looked_s >= _EVERY_S:
            self._look(leader_pid, now_s, any_work=any_work)
        return max(self._last_s, since_s)

    def _look(self, leader_pid: int, now_s: float, *, any_work: bool) -> None:
        work = _work_of(group_members(leader_pid) if any_work else _compilers(leader_pid))
        elapsed_s, before = now_s - self._looked_s, self._before
        is_next = any_work == self._kind and elapsed_s < 10 * _EVERY_S
        busy = work.processor_s - before.processor_s >= _BUSY * elapsed_s
        if is_next and (busy or work.written - before.written >= _LEAST_BYTES):
            self._last_s = now_s
        self._looked_s, self._kind, self._before = now_s, any_work, work


def _compilers(leader_pid: int) -> Iterator[int]:
    return (one for one in group_members(leader_pid) if _name(one) in COMPILERS)


def _name(pid: int) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    return ""


def _work_of(pids: Iterator[int]) -> Work:
    """Add up what processes have done, with their children that have ended. Source: proc(5)."""
    processor_s, written = 0.0, 0
    for pid in pids:
        # It may end meanwhile, or be somebody else's.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            ticks = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[11:15]
            processor_s += sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
            told = Path(f"/proc/{pid}/io").read_bytes().split()
            written += int(told[told.index(b"wchar:") + 1])
    return Work(processor_s, written)
