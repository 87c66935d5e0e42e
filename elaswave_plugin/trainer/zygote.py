"""A process that has imported the frameworks and forks trainers for guardians.

    python -m elaswave_plugin.trainer.zygote --socket PATH --preload torch,megatron.core

It has no threads. The socket appears (by rename) only once the imports are done. A trainer is
killed when the connection of its guardian closes, and dies with the zygote; those of a zygote that
a guardian has started are the guardian's own children, and go on without it.
"""

import argparse
import atexit
import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from elaswave_plugin.errors import EXIT_CONFIGURATION
from elaswave_plugin.ipc.environment import JOB_SECRET_FD, SNAPSHOT_FDS
from elaswave_plugin.ipc.process_tree import (
    SIGNALS_TO_END,
    close_all_but,
    die_with_parent,
    exit_at_once,
    lead_group,
)
from elaswave_plugin.ipc.progress_page import PROGRESS_FD
from elaswave_plugin.ipc.secret import is_same_user
from elaswave_plugin.ipc.snapshot_record import MEMORIES
from elaswave_plugin.ipc.title import set_title
from elaswave_plugin.ipc.wire import Frame, FrameBuffer, encode
from elaswave_plugin.trainer.script_run import Reporter, guarded, run, show_few_warnings

# Standard streams, secret, page, and the memories of its snapshots.
_FDS_A_REQUEST = 5 + MEMORIES
# That of jemalloc, as pyarrow has it, is there again after a fork; that of NVML's look for GPUs, no
# child has missed (driver 580 on an H100).
_NEEDED_BY_NO_CHILD = ("jemalloc_bg_thd", "cuda")
# By it torch.cuda.is_available() asks NVML; else it initialises CUDA, and frameworks ask at import.
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


@dataclass(slots=True)
class _Guardian:
    sock: socket.socket
    buffer: FrameBuffer = field(default_factory=FrameBuffer)
    fds: list[int] = field(default_factory=list)
    children: dict[int, int] = field(default_factory=dict)


class Zygote:
    """Serves fork requests; `serve` returns the request in the child, None at the end."""

    def __init__(
        self,
        listener: socket.socket | None,
        connections: Sequence[socket.socket],
        *,
        refusal: str | None = None,
        guardian_pid: int = 0,
    ) -> None:
        """`refusal`: why it cannot fork trainers, which is its answer to every request then.

        `guardian_pid`: the parent, which is to be that of the trainers too.
        """
        self._refusal = refusal
        self._guardian_pid = guardian_pid
        self._pid = os.getpid()
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._guardians: list[_Guardian] = []
        self._wake_read, self._wake_write = socket.socketpair()
        for sock in (self._wake_read, self._wake_write):
            sock.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        if listener is not None:
            self._selector.register(listener, selectors.EVENT_READ, None)
        for sock in connections:
            self._add(sock)

    def serve(self) -> Frame | None:
        """Serve until a signal asks to end and no trainer is left.

        Returns the request in each forked child, None in the zygote. The trainers die with the
        zygote, and such a signal may be one to all processes of a job.
        """
        signal.set_wakeup_fd(self._wake_write.fileno())
        for number in SIGNALS_TO_END:
            signal.signal(number, lambda number, frame: None)  # it only wakes
        told = False
        while not told or any(guardian.children for guardian in self._guardians):
            for key, _ in self._selector.select():
                if key.fileobj is self._wake_read:
                    told = bool(self._wake_read.recv(4096))
                elif key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, _Guardian):
                    request = self._read(key.data)
                    if request is not None:
                        return request
                elif key.fd in self._selector.get_map():
                    self._reap(*key.data, pidfd=key.fd)
        self._close()
        return None

    def _accept(self) -> None:
        assert self._listener is not None
        sock, _ = self._listener.accept()
        if is_same_user(sock):
            self._add(sock)
        else:
            sock.close()

    def _add(self, sock: socket.socket) -> None:
        guardian = _Guardian(sock)
        self._guardians.append(guardian)
        self._selector.register(sock, selectors.EVENT_READ, guardian)

    def _read(self, guardian: _Guardian) -> Frame | None:
        try:
            data, fds, _, _ = socket.recv_fds(guardian.sock, 1 << 16, _FDS_A_REQUEST)
        except ConnectionError:
            data, fds = b"", []
        guardian.fds += fds
        if not data:
            self._forget(guardian)
            return None
        for request in guardian.buffer.feed(data):
            given, guardian.fds = guardian.fds[:_FDS_A_REQUEST], guardian.fds[_FDS_A_REQUEST:]
            if self._refusal is not None:
                _refuse(guardian, self._refusal, EXIT_CONFIGURATION)
                _close_all(given)
            elif (self._hand_over if self._guardian_pid else self._fork)(guardian, given):
                return {**request, "given": given}
        return None

    def _hand_over(self, guardian: _Guardian, given: list[int]) -> bool:
        """Fork a trainer that becomes the guardian's child; true in it.

        The process between the two ends at once, and the kernel gives its child to the guardian,
        which the child tells of itself: the zygote may be dead by then.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS_TO_END)
        try:
            between = os.fork()
        except OSError:
            between = -1
        if between == 0:
            try:
                if os.fork():
                    os._exit(0)
            except OSError:
                os._exit(1)
            while os.getppid() != self._guardian_pid:
                if os.getppid() == 1:  # the guardian is gone
                    os._exit(128 + signal.SIGKILL)
                time.sleep(0.001)
            die_with_parent(self._guardian_pid)
            lead_group()
            pidfd = os.pidfd_open(os.getpid())
            socket.send_fds(guardian.sock, [encode({"pid": os.getpid()})], [pidfd])
            os.close(pidfd)
            self._be_nobody()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS_TO_END)
        if between == 0:
            return True
        _close_all(given)
        if between < 0 or os.waitpid(between, 0)[1]:
            _refuse(guardian, "fork failed: there is no room for another process", 1)
        return False

    def _fork(self, guardian: _Guardian, given: list[int]) -> bool:
        """Fork; true in the child."""
        # A signal for the child that comes at once must not ring our bell, which it inherits.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS_TO_END)
        try:
            pid = os.fork()
        except OSError as error:
            _refuse(guardian, f"fork failed: {error}", 1)
            pid = -1
        if pid == 0:
            die_with_parent(self._pid)
            lead_group()
            self._be_nobody()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS_TO_END)
        if pid == 0:
            return True
        _close_all(given)
        if pid > 0:
            pidfd = os.pidfd_open(pid)
            guardian.children[pid] = pidfd
            self._selector.register(pidfd, selectors.EVENT_READ, (guardian, pid))
            try:
                socket.send_fds(guardian.sock, [encode({"pid": pid})], [pidfd])
            except ConnectionError:
                self._forget(guardian)
        return False

    def _reap(self, guardian: _Guardian, pid: int, *, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        del guardian.children[pid]
        status = os.waitpid(pid, 0)[1]
        # Where its guardian is gone too, the reading side cleans up.
        with contextlib.suppress(OSError):
            guardian.sock.sendall(encode({"pid_ended": pid, "status": status}))

    def _forget(self, guardian: _Guardian) -> None:
        """The guardian is gone: its trainers go too, and are reaped as they end."""
        self._selector.unregister(guardian.sock)
        guardian.sock.close()
        self._guardians.remove(guardian)
        for pidfd in guardian.children.values():
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        _close_all(guardian.fds)

    def _be_nobody(self) -> None:
        """Leave nothing of the zygote's in a child."""
        self._close()
        for number in SIGNALS_TO_END:
            signal.signal(number, signal.SIG_DFL)

    def _close(self) -> None:
        """Close everything of the zygote's own (in a child: nothing of it stays open)."""
        signal.set_wakeup_fd(-1)
        pidfds = [key.fd for key in self._selector.get_map().values() if type(key.data) is tuple]
        self._selector.close()
        _close_all(pidfds)
        for guardian in self._guardians:
            guardian.sock.close()
            _close_all(guardian.fds)
        for sock in (self._listener, self._wake_read, self._wake_write):
            if sock is not None:
                sock.close()


def _refuse(guardian: _Guardian, why: str, exit_code: int) -> None:
    # Where it is gone, the reading side cleans up.
    with contextlib.suppress(OSError):
        guardian.sock.sendall(encode({"error": why, "exit_code": exit_code}))


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def become_trainer(request: Frame) -> None:
    """Make this forked process look like the one of `python -u script args` (or -m)."""
    stdin, stdout, stderr, secret, progress, *snapshots = request["given"]
    for target, fd in enumerate((stdin, stdout, stderr)):
        os.dup2(fd, target)
        os.close(fd)
    for number in SIGNALS_TO_END:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    os.environ[JOB_SECRET_FD] = str(secret)
    os.environ[PROGRESS_FD] = str(progress)
    os.environ[SNAPSHOT_FDS] = ",".join(map(str, snapshots))
    _set_path(request)
    if "torch" in sys.modules:  # which looks for us at its import, and knew of no guardian then
        importlib.import_module("elaswave_plugin.loops.unjoined").watch()


def _set_path(request: Frame) -> None:
    """sys.path as a new interpreter would have it: the script's directory (or the cwd) first."""
    script = os.path.realpath(request["script"])
    given = [part for part in request["env"].get("PYTHONPATH", "").split(os.pathsep) if part]
    first = os.getcwd() if request["module"] else os.path.dirname(script)
    sys.path[:] = [first, *map(os.path.abspath, given), *request["base_path"]]


def _base_path() -> list[str]:
    """sys.path without its first entry (the zygote's own) and the zygote's PYTHONPATH."""
    own = {os.path.abspath(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    rest = sys.path[1:]
    while rest and rest[0] in own:
        rest = rest[1:]
    return rest


def main(argv: Sequence[str]) -> int:
    """Import, then serve; in a forked child, run the trainer's script."""
    parser = argparse.ArgumentParser(prog="elaswave zygote", description=__doc__)
    parser.add_argument("--socket", help="unix socket to serve at")
    parser.add_argument("--connections", default="", help="inherited connections, as 5,6,7")
    parser.add_argument("--parent", type=int, help="end when this process, our parent, ends")
    parser.add_argument("--preload", default="", help="modules to import, as torch,megatron.core")
    options = parser.parse_args(argv)
    base_path = _base_path()
    set_title("zygote")
    connections = [int(fd) for fd in options.connections.split(",") if fd]
    if options.parent:
        die_with_parent(options.parent)
    close_all_but({*connections})  # what was inherited by accident
    refusal = _preload([name for name in options.preload.split(",") if name])
    if refusal is not None and not connections:
        print(f"elaswave zygote: {refusal}", file=sys.stderr)
        return EXIT_CONFIGURATION
    gc.collect()
    gc.freeze()
    listener = _listen(options.socket) if options.socket else None
    inherited = [socket.socket(fileno=fd) for fd in connections]
    zygote = Zygote(listener, inherited, refusal=refusal, guardian_pid=options.parent or 0)
    request = zygote.serve()
    if request is None:
        if options.socket:
            os.unlink(options.socket)
        return 0
    _leave(_run({**request, "base_path": base_path}))


def _preload(modules: Sequence[str]) -> str | None:
    """Import them; in words why trainers cannot be forked then, None where they can."""
    show_few_warnings(os.environ)
    os.environ[NVML_CHECK] = "1"  # a trainer gets the environment of its own launch
    if modules:
        # The threads of its linear algebra are started again in a child: they may be there.
        importlib.import_module("numpy")
    native = _native_threads()
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            return f"--preload names {name!r}, which cannot be imported ({said}); leave it out"
    started = None
    if _lost_cuda():
        started = "initialised CUDA, which no child can use then"
    elif threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate()[1:])
        started = f"started threads ({names})"
    elif _native_threads() > native:
        started = f"started threads of C code ({_native_threads() - native}), which no child has"
    what = ",".join(modules)
    return started and f"--preload is {what!r}: importing {started}; leave out what does"


def _native_threads() -> int:
    """Count the threads of this process that Python does not know and a child would miss."""
    threads = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
            threads += not (task / "comm").read_text().startswith(_NEEDED_BY_NO_CHILD)
    return threads - threading.active_count()


def _lost_cuda() -> bool:
    """Return whether no child can use CUDA, as it was initialised here; torch knows it in a child.

    What is open does not tell: NVML, which a child may use again, opens the same devices.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    pid = os.fork()
    if pid == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    is_bad = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    # Without NVML torch looks by CUDA itself: where there is no GPU, nothing is lost by that.
    return is_bad and bool(torch.cuda.device_count())


def _leave(code: int) -> NoReturn:
    """End a forked trainer as multiprocessing ends its children.

    An interpreter's own end takes every imported module apart, which for the frameworks takes
    seconds and touches all the memory that is shared with the zygote.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    exit_at_once(code)


def _run(request: dict[str, Any]) -> int:
    """Run the trainer; returns its exit code."""
    try:
        become_trainer(request)
        work = partial(run, request["script"], request["args"], module=request["module"])
        guarded(Reporter(os.environ), work, ours=(__file__,))
    except SystemExit as wanted:
        if wanted.code is None or isinstance(wanted.code, int):
            return wanted.code or 0
        print(wanted.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    hidden = f"{path}.{os.getpid()}"
    listener.bind(hidden)
    listener.listen(256)
    os.rename(hidden, path)
    return listener


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
