"""`elaswave run`: starts one node's supervisors (and zygote) and waits for the end of the job."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.runtime.coordinator import say
from elaswave_plugin.runtime.launch_options import LaunchSpec, parse_run_args
from elaswave_plugin.runtime.reactor import Reactor
from elaswave_plugin.runtime.rendezvous import Place, listen_at, own_host
from elaswave_plugin.runtime.supervisor import SupervisorSpec
from elaswave_plugin.runtime.supervisor_main import BOOT, EXIT_CRASHED, spec_to_json
from elaswave_plugin.runtime.trainer_process import Program
from elaswave_plugin.tracking.events import EventLog

__all__ = ["LaunchSpec", "main", "parse_run_args", "run_job"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Beyond the time in which workers that were told to go may leave between two steps.
_LAST_RESORT_S = 10.0


def main(argv: Sequence[str]) -> int:
    """`elaswave run ARGV`; bad input is one sentence on stderr and exit code 2."""
    try:
        return run_job(parse_run_args(argv))
    except ConfigurationError as error:
        print(f"elaswave run: {error}", file=sys.stderr)
        return 2


def run_job(spec: LaunchSpec) -> int:
    """Run this node's part of the job to its end; returns the exit code.

    Raises ConfigurationError for bad input, before anything is started.
    """
    listener = _listen(spec) if spec.node_rank == 0 else None
    port = spec.master_port if listener is None else listener.getsockname()[1]
    host = own_host(spec.master_addr, port, listener=listener, timeout_s=spec.start_timeout_s)
    zygotes = _connect_zygotes(spec)
    if spec.nnodes == 2 and spec.node_rank == 0:
        say("with 2 nodes the loss of a whole node cannot be survived: one of two is no majority")
    with EventLog(spec.run_dir / "events.jsonl" if spec.run_dir else None) as events:
        job = _NodeJob(spec, events, host)
        return job.run(listener, port, zygotes)


class _NodeJob:
    """The processes of one node: all are children of this one, and end with it."""

    def __init__(self, spec: LaunchSpec, events: EventLog, host: str) -> None:
        self._spec = spec
        self._host = host
        self._events = events
        self._reactor = Reactor()
        self._supervisors: dict[int, subprocess.Popen[bytes]] = {}
        self._zygote: subprocess.Popen[bytes] | None = None
        self._codes: list[int] = []
        self._signal: int | None = None
        self._scripts_port = _reserve_port()

    def run(self, listener: socket.socket | None, port: int, zygotes: list[socket.socket]) -> int:
        spec = self._spec
        old = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        self._events.emit(
            "job_started",
            launcher_pid=os.getpid(),
            node=spec.node_rank,
            nproc=spec.nproc_per_node,
            nnodes=spec.nnodes,
            script=spec.script,
        )
        try:
            if spec.preload and not zygotes:
                zygotes = self._start_zygote()
            for local_rank in range(spec.nproc_per_node):
                self._start_supervisor(local_rank, listener, port, zygotes)
            for sock in [*zygotes, *([listener] if listener else [])]:
                sock.close()
            self._reactor.run()
        finally:
            self._kill_all()
            for number, action in old.items():
                signal.signal(number, action)
            self._reactor.close()
            self._scripts_port.close()
        code = self._exit_code()
        self._events.emit("job_ended", node=spec.node_rank, exit_code=code)
        return code

    def _port_for_scripts(self, port: int) -> int:
        """MASTER_PORT of the trainers: the supervisors listen at `port` itself.

        With several nodes all have to name the same one, and only the user's is known to all.
        """
        if self._spec.nnodes == 1:
            reserved: int = self._scripts_port.getsockname()[1]
            return reserved
        return port + 1 if port < 65535 else port - 1

    def _start_supervisor(
        self,
        local_rank: int,
        listener: socket.socket | None,
        port: int,
        zygotes: list[socket.socket],
    ) -> None:
        spec = self._spec
        slot = spec.node_rank * spec.nproc_per_node + local_rank
        hosts_meeting = slot == 0 and listener is not None
        listener_fd = listener.fileno() if hosts_meeting and listener is not None else -1
        zygote_fd = zygotes[local_rank].fileno() if zygotes else -1
        supervisor = SupervisorSpec(
            place=Place(
                slot=slot,
                node=spec.node_rank,
                world_size=spec.nnodes * spec.nproc_per_node,
                host=spec.master_addr,
                port=port,
                timeout_s=spec.start_timeout_s,
            ),
            host=self._host,
            program=Program(script=spec.script, args=spec.args, module=spec.module),
            env={},
            run_dir=str(spec.run_dir) if spec.run_dir else None,
            patience=spec.patience,
            heartbeat=spec.heartbeat,
        )
        process = subprocess.Popen(
            [
                *_boot("supervisor_main"),
                str(os.getpid()),
                str(listener_fd),
                str(zygote_fd),
                spec_to_json(supervisor),
            ],
            env=_trainer_env(spec, local_rank, port, self._port_for_scripts(port)),
            pass_fds=[fd for fd in (listener_fd, zygote_fd) if fd >= 0],
            process_group=0,
        )
        self._supervisors[slot] = process
        pidfd = os.pidfd_open(process.pid)
        self._reactor.watch(pidfd, partial(self._on_supervisor_exit, slot, pidfd))

    def _start_zygote(self) -> list[socket.socket]:
        """A zygote for this run, with one connection for each supervisor."""
        pairs = [socket.socketpair() for _ in range(self._spec.nproc_per_node)]
        fds = [theirs.fileno() for _, theirs in pairs]
        self._zygote = subprocess.Popen(
            [
                *_boot("zygote"),
                f"--parent={os.getpid()}",
                f"--connections={','.join(map(str, fds))}",
                f"--preload={','.join(self._spec.preload)}",
            ],
            env=_job_env(self._spec),
            pass_fds=fds,
            process_group=0,
        )
        for _, theirs in pairs:
            theirs.close()
        return [ours for ours, _ in pairs]

    def _on_supervisor_exit(self, slot: int, pidfd: int) -> None:
        self._reactor.unwatch(pidfd)
        os.close(pidfd)
        code = self._supervisors.pop(slot).wait()
        self._codes.append(code)
        if not self._supervisors:
            self._reactor.stop()

    def _on_signal(self, number: int, frame: object) -> None:
        self._reactor.post(partial(self._end, number))

    def _end(self, number: int) -> None:
        """Told to end: ask the supervisors, which give their trainers a moment; then insist."""
        if self._signal is None:
            self._signal = number
            for process in self._supervisors.values():
                process.send_signal(signal.SIGTERM)
            limit_s = self._spec.patience.notice_timeout_s + _LAST_RESORT_S
            self._reactor.after(limit_s, self._kill_all)

    def _kill_all(self) -> None:
        for process in self._supervisors.values():
            process.kill()
        if self._zygote is not None:
            self._zygote.kill()
            self._zygote.wait()
            self._zygote = None

    def _exit_code(self) -> int:
        """That of the job, as the supervisors that lived to its end tell it."""
        if self._signal is not None:
            return 128 + self._signal
        told = [code for code in self._codes if code >= 0 and code != EXIT_CRASHED]
        if not told:
            say(f"no supervisor of node {self._spec.node_rank} lived to the end of the job")
            return 1
        return next((code for code in told if code), 0)


def _listen(spec: LaunchSpec) -> socket.socket:
    """The meeting point of the supervisors, bound here so that a taken port is told at once."""
    where = f"{spec.master_addr}:{spec.master_port}"
    try:
        return listen_at(spec.master_addr, spec.master_port)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen at {where} ({error.strerror}): give node 0's own address as "
            "--master-addr and a free port as --master-port"
        ) from error


def _connect_zygotes(spec: LaunchSpec) -> list[socket.socket]:
    if spec.zygote is None:
        return []
    return [connect_zygote(spec.zygote) for _ in range(spec.nproc_per_node)]


def connect_zygote(path: str | os.PathLike[str]) -> socket.socket:
    """A connection to the zygote that serves at `path`. Raises ConfigurationError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(os.fspath(path))
    except OSError as error:
        sock.close()
        raise ConfigurationError(
            f"--zygote is {path}, where no zygote answers ({error.strerror}): start one with "
            "`python -m elaswave_plugin.runtime.zygote --socket PATH --preload torch`"
        ) from error
    return sock


def _boot(module: str) -> list[str]:
    """The command that runs a module of this package, wherever the package was imported from."""
    root = str(Path(__file__).resolve().parents[2])
    return [sys.executable, "-c", BOOT.format(root=root, module=module)]


def _job_env(spec: LaunchSpec) -> dict[str, str]:
    env = {**os.environ, **spec.env}
    if spec.run_dir is not None:
        env["ELASWAVE_DIR"] = str(spec.run_dir)
    if spec.nproc_per_node > 1:
        env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    return env


def _reserve_port() -> socket.socket:
    """A port that nobody is given by chance; a script's own server may still bind and use it.

    Linux lets a second socket bind it because both have SO_REUSEADDR and this one never listens.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved


def _trainer_env(spec: LaunchSpec, local_rank: int, port: int, scripts_port: int) -> dict[str, str]:
    """torchrun's variables, so that scripts find what they are used to."""
    world_size = spec.nnodes * spec.nproc_per_node
    rank = spec.node_rank * spec.nproc_per_node + local_rank
    return {
        **_job_env(spec),
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(spec.nproc_per_node),
        "GROUP_RANK": str(spec.node_rank),
        "GROUP_WORLD_SIZE": str(spec.nnodes),
        "NODE_RANK": str(spec.node_rank),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": spec.master_addr,
        "MASTER_PORT": str(scripts_port),
        "TORCHELASTIC_RUN_ID": f"elaswave-{port}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
