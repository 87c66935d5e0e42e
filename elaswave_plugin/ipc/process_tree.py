"""The processes of a node: tied to their parents, seen in /proc, ended with what they have left."""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.reactor import Reactor

# What threading says, which has no class of its own for it.
_NO_THREAD = "can't start new thread"


@contextmanager
def explained_process_limit() -> Iterator[None]:
    """Raise ConfigurationError in the place of what a limit of processes makes the block raise."""
    try:
        yield
    except BlockingIOError as error:
        raise ConfigurationError(_sentence(error.strerror or "fork")) from error
    except RuntimeError as error:
        if str(error) != _NO_THREAD:
            raise
        raise ConfigurationError(_sentence(_NO_THREAD)) from error


def _sentence(why: str) -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limit = "without limit" if soft == resource.RLIM_INFINITY else str(soft)
    return (
        f"this user may start no more processes or threads ({why}; `ulimit -u` is {limit}): raise "
        "it, or the pids limit of the container; a worker takes two processes and tens of threads"
    )


_PF_EXITING = 0x4
# Places behind the name in /proc/PID/stat: the flags, the resident pages, the exit status.
_FLAGS, _PAGES, _STATUS = 6, 21, 49


def resident_bytes(pid: int) -> int:
    """Bytes of memory that a process has; 0 where it is gone, or ends."""
    try:
        return int(_fields(Path(f"/proc/{pid}"))[_PAGES]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def dying_by(pid: int) -> int:
    """Return the signal that ends a process all of whose threads have begun to end; 0 if none.

    Before the kernel has freed its memory: that goes first when a process ends, then its
    descriptors, and only then is its parent told, 0.1 to 0.2 s for each GB of it. Each of its
    threads is marked as it begins to end; from then on it runs nothing of its program, and no
    system call of it is under way. Source: Linux, kernel/exit.c, do_exit(); include/linux/sched.h,
    PF_EXITING; proc(5).
    """
    try:
        threads = [_fields(one) for one in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:  # it is gone, and its parent is told otherwise
        return 0
    if not threads or not all(int(one[_FLAGS]) & _PF_EXITING for one in threads):
        return 0
    return os.WTERMSIG(int(threads[0][_STATUS]))


def _fields(folder: Path) -> list[bytes]:
    """Raises OSError where the process or thread is gone."""
    return (folder / "stat").read_bytes().rpartition(b")")[2].split()


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
SIGNALS_TO_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""The signals by which people, launchers and schedulers tell a process of a job to end."""
STOPPED, IN_KERNEL, RUNNABLE = "T", "D", "R"
"""States of a process: a signal has stopped it; it sleeps in the kernel, and no signal wakes it."""


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends; exit at once if it has ended.

    Call it in the child; `parent_pid` is the parent as it was before the fork.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os._exit(128 + signal.SIGKILL)


def adopt_orphans() -> None:
    """Have the kernel make this process the parent of what its descendants leave behind."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def own_children() -> set[int]:
    """Return the children of this process. Source: Linux, proc(5), task/TID/children."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread has ended meanwhile
            found |= {*map(int, (task / "children").read_text().split())}
    return found


def exit_at_once(code: int) -> NoReturn:
    """End this process without its exit functions, which may wait for others; its output is out."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def close_all_but(kept: set[int]) -> None:
    """Close all descriptors but these and the standard streams, after a fork."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd not in kept:
            # One of them is the descriptor of the listing itself, closed by now.
            with contextlib.suppress(OSError):
                os.close(fd)


def lead_group() -> None:
    """Make this process the leader of a process group, which its children belong to."""
    os.setpgid(0, 0)


def signal_group(leader_pid: int, number: int) -> bool:
    """Signal what is left of the group of an ended leader; false where nothing is left."""
    try:
        os.killpg(leader_pid, number)
    except ProcessLookupError:
        return False
    return True


def describe_status(status: int) -> tuple[str, int | None]:
    """A wait status in words, and its exit code (None where a signal ended the process)."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        return f"killed by {name}", None
    code = os.WEXITSTATUS(status)
    return f"exit code {code}", code


def state_of(pid: int) -> str:
    """Return the kernel's letter for the state of a process; "" where there is none.

    Source: Linux, proc(5).
    """
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def group_members(leader_pid: int) -> Iterator[int]:
    """Yield the processes of a group, as far as they live: a trainer and what it has started."""
    for entry in os.scandir("/proc"):
        # One that is somebody else's may end meanwhile.
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.getpgid(int(entry.name)) == leader_pid:
                yield int(entry.name)


def _is_resource_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


class Orphans:
    """The process groups that ended trainers have led, until nothing is left of them."""

    def __init__(self, reactor: Reactor, *, grace_s: float) -> None:
        """SIGKILL comes `grace_s` seconds after SIGTERM."""
        self._reactor = reactor
        self._grace_s = grace_s
        self._leaders: set[int] = set()

    def end_now(self, leader_pid: int) -> None:
        """End what a lost trainer had started by SIGKILL: a writer of its could still write.

        The others write the same checkpoint again. A script that handles SIGTERM hands that on to
        the processes that it forks, so that it would end none of them. Python's resource tracker
        writes nothing, and frees shared memory: it has its time.
        """
        if leader_pid and signal_group(leader_pid, signal.SIGSTOP):
            for pid in group_members(leader_pid):
                if not _is_resource_tracker(pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            signal_group(leader_pid, signal.SIGCONT)
            self.end(leader_pid)

    def end(self, leader_pid: int) -> None:
        """End what is left of the group of a trainer that has ended.

        Only a group that still has members is signalled again, so that its number is not reused.
        """
        if leader_pid and signal_group(leader_pid, signal.SIGTERM):
            self._leaders.add(leader_pid)
            self._reactor.after(self._grace_s, self.kill)

    def finish(self) -> None:
        """Wait for all that are left, for `grace_s` at most: they may have shared memory to free.

        The reactor has stopped by then.
        """
        until_s = time.monotonic() + self._grace_s
        while any(signal_group(leader, 0) for leader in self._leaders):
            if time.monotonic() > until_s:
                return self.kill()
            time.sleep(0.01)  # they are no children of ours: nothing tells of their end

    def kill(self) -> None:
        """SIGKILL to all that are left, at once."""
        while self._leaders:
            signal_group(self._leaders.pop(), signal.SIGKILL)


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
