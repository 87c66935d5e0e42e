"""One node's part of a job of `elaswave run`: its guardian, which starts the rest, to the end."""

import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from elaswave_plugin.agent.agent_process import AgentProcess
from elaswave_plugin.agent.common import AgentSpec
from elaswave_plugin.agent.guarded_trainers import ForkServer, Starter
from elaswave_plugin.agent.guardian import EXIT_CRASHED, Guardian
from elaswave_plugin.agent.notice_file import NOTICE_FILE
from elaswave_plugin.agent.peers.rendezvous import (
    RendezvousSpec,
    listen_at,
    own_host,
    tell_of_end,
)
from elaswave_plugin.agent.snapshot_server import listen_for_data
from elaswave_plugin.errors import EXIT_FAILED, EXIT_LEFT_OUT, ConfigurationError
from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.environment import QUIESCE, RESERVE, Program
from elaswave_plugin.ipc.process_tree import SIGNALS_TO_END, adopt_orphans
from elaswave_plugin.ipc.reactor import Reactor
from elaswave_plugin.ipc.secret import SECRET_FILE, Secret, left_to_user
from elaswave_plugin.launch.job_secret import agreed_secret, check_required
from elaswave_plugin.launch.join import Vacancy, find_vacancy
from elaswave_plugin.launch.options import (
    LaunchSpec,
    allow_descriptors,
    open_run_dir,
    refuse_second_job,
)
from elaswave_plugin.launch.own_zygote import OwnZygote, check_zygote
from elaswave_plugin.launch.standard_streams import relayed_output
from elaswave_plugin.tracking.events import EventLog
from elaswave_plugin.words import variable


class GuardedNode:
    """Guards a node; `on_signal(number)` runs in the reactor, once there is a `guardian`.

    `env`: the agent's own; `listener`: where others come to, on the first node of a launch, which
    is closed here.
    """

    guardian: Guardian

    def __init__(
        self,
        spec: AgentSpec,
        env: Mapping[str, str],
        listener: socket.socket | None,
        *,
        on_signal: Callable[[int], None],
    ) -> None:
        self._spec = spec
        self._listener = listener
        self._data = listen_for_data(spec.host)
        self._process = AgentProcess(spec=spec, env=env, data=self._data, listener=listener)
        self._on_signal = on_signal
        self._code = EXIT_FAILED
        self.has_met = False
        self.reactor = Reactor()
        # Those that were acted on.
        self.signals: list[int] = []

    def run(self, starters: Sequence[Starter | None]) -> int:
        """Serve until there is to be no agent any more; returns the exit code of the job here.

        `starters`: the ways to start trainers, by place; None: by exec.
        """
        self.guardian = Guardian(self.reactor, self._process.begin, starters, on_end=self._on_end)
        old = {number: signal.signal(number, self._post_signal) for number in SIGNALS_TO_END}
        try:
            self.guardian.start()
            if self._listener is not None:
                self._listener.close()
            self.reactor.run()
        finally:
            self.guardian.close()
            for number, action in old.items():
                signal.signal(number, action)
            for sock in self._data:
                sock.close()
            self.reactor.close()
        return self._exit_code()

    def _post_signal(self, number: int, frame: object) -> None:
        self.reactor.post(partial(self._on_signal, number))

    def _on_end(self, code: int) -> None:
        self._code, self.has_met = code, self.guardian.has_met
        self.reactor.stop()

    @property
    def is_left_out(self) -> bool:
        """True if the job has gone on without this node."""
        return self._code == EXIT_LEFT_OUT

    def _exit_code(self) -> int:
        """That of the job, as the agent that lived to its end tells it."""
        code, node = self._code, self._spec.rendezvous.node
        has_crashed = code < 0 or code == EXIT_CRASHED
        if code and not self.has_met and not self._spec.joins and not self.signals:
            # The others need not wait; one that has not crashed has said why.
            if has_crashed:
                say(f"the agent of node {node} ended before the job began")
            tell_of_end(self._spec.rendezvous, f"status {code}" if code > 0 else f"signal {-code}")
        if has_crashed and not self.signals:
            say(f"no agent of node {node} lived to the end of the job")
        return EXIT_FAILED if has_crashed or code == EXIT_LEFT_OUT else code


# Beyond the time in which workers that were told to go may leave between two steps.
_LAST_RESORT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnd:
    """The end of a node's part: its exit code, and how it came to it.

    ``met``: it has taken part in the job; ``told``: a signal has ended it; ``left_out``: the job
    has gone on without it.
    """

    exit_code: int
    met: bool
    told: bool
    left_out: bool


def run_job(spec: LaunchSpec) -> int:
    """Run this node's part of the job to its end; returns the exit code.

    Raises ConfigurationError for bad input, before anything is started.
    """
    return run_part(spec).exit_code


def run_part(spec: LaunchSpec, listener: socket.socket | None = None) -> NodeEnd:
    """The same; ``listener``: where node 0 waits for the others, if it listens already."""
    if spec.join is not None:
        return _join_job(spec)
    alone = spec.nnodes == 1
    check_required(os.environ, alone=alone, required=spec.require_secret)
    allow_descriptors(spec.nnodes * spec.nproc_per_node + spec.reserve)
    open_run_dir(spec.run_dir)
    if spec.node_rank == 0:
        refuse_second_job(spec.run_dir)
        listener = listener or _listen(spec)
    port = spec.master_port if listener is None else listener.getsockname()[1]
    host = own_host(
        spec.master_addr,
        port,
        listener=listener,
        timeout_s=spec.start_timeout_s,
        several=spec.nnodes > 1,
    )
    secret = agreed_secret(
        os.environ,
        spec.run_dir,
        node=spec.node_rank,
        host=spec.master_addr,
        ports=(port,),
        job=_job_name(spec, port),
        timeout_s=spec.start_timeout_s,
    )
    zygotes = _connect_zygotes(spec)
    if spec.nnodes == 2 and spec.node_rank == 0:
        here = socket.gethostname()
        say(
            f"with 2 nodes the loss of node 0 ({here}) cannot be survived: the other half ends then"
        )
    with (
        EventLog(spec.run_dir / "events.jsonl" if spec.run_dir else None) as events,
        left_to_user(secret),
        relayed_output(),
    ):
        return _NodeJob(spec, events, host, secret).run(listener, port, zygotes)


def _join_job(spec: LaunchSpec) -> NodeEnd:
    vacancy = find_vacancy(spec)
    spec = vacancy.spec
    open_run_dir(spec.run_dir)
    allow_descriptors(vacancy.world_size)
    contact, _, port = vacancy.contacts[0].rpartition(":")
    host = own_host(contact, int(port), listener=None, timeout_s=spec.start_timeout_s)
    zygotes = _connect_zygotes(spec)
    with (
        EventLog(spec.run_dir / "events.jsonl" if spec.run_dir else None) as events,
        relayed_output(),
    ):
        return _NodeJob(spec, events, host, vacancy.secret).run_newcomers(vacancy, zygotes)


class _NodeJob:
    """The processes of one node: all are children of this one, and end with it."""

    def __init__(self, spec: LaunchSpec, events: EventLog, host: str, secret: Secret) -> None:
        self._spec = spec
        self._secret = secret
        self._host = host
        self._events = events
        self._guarded: GuardedNode
        self._scripts_port = reserve_port()
        adopt_orphans()

    def run(
        self, listener: socket.socket | None, port: int, zygotes: list[socket.socket]
    ) -> NodeEnd:
        """Start the job's part of this node, and wait for the end of the job."""
        spec, width = self._spec, self._spec.nproc_per_node
        self._events.emit("job_started", **self._described(spec.node_rank, spec.nnodes))
        first = spec.node_rank * width
        rendezvous = RendezvousSpec(
            node=spec.node_rank,
            slots=tuple(range(first, first + width)),
            world_size=spec.nnodes * width,
            host=spec.master_addr,
            ports=(port,),
            job=_job_name(spec, port),
            timeout_s=spec.start_timeout_s,
            secret=self._secret,
            hands_out=_hands_out(spec),
            reserve=spec.reserve,
            width=width,
        )
        scripts_port = self._port_for_scripts(port)
        envs = tuple(
            _trainer_env(spec, place, port, scripts_port) for place in range(width + spec.standby)
        )
        return self._guard(self._agent_spec(rendezvous, envs), listener, zygotes)

    def run_newcomers(self, vacancy: Vacancy, zygotes: list[socket.socket]) -> NodeEnd:
        """Start an agent that takes slots of a running job, and wait for its end."""
        described = self._described(vacancy.node, None)
        self._events.emit("node_joins", slots=list(vacancy.slots), **described)
        rendezvous = RendezvousSpec(
            node=vacancy.node,
            slots=vacancy.slots,
            world_size=vacancy.world_size,
            host="",
            ports=(),
            job="",
            timeout_s=self._spec.start_timeout_s,
            secret=self._secret,
        )
        width = {"LOCAL_WORLD_SIZE": str(self._spec.nproc_per_node)}
        envs = tuple(
            {**_job_env(self._spec), "LOCAL_RANK": str(place), **width}
            for place in range(self._spec.nproc_per_node)
        )
        spec = self._agent_spec(rendezvous, envs)
        spec = replace(spec, joins=vacancy.contacts, wanted=vacancy.slots)
        return self._guard(spec, None, zygotes)

    def _described(self, node: int, nnodes: int | None) -> dict[str, object]:
        return {
            "launcher_pid": os.getpid(),
            "node": node,
            "nproc": self._spec.nproc_per_node,
            "nnodes": nnodes,
            "script": self._spec.script,
        }

    def _agent_spec(
        self, rendezvous: RendezvousSpec, envs: tuple[Mapping[str, str], ...]
    ) -> AgentSpec:
        spec = self._spec
        return AgentSpec(
            rendezvous=rendezvous,
            host=self._host,
            program=Program(script=spec.script, args=spec.args, module=spec.module),
            envs=envs,
            standby=spec.standby,
            run_dir=str(spec.run_dir) if spec.run_dir else None,
            notice_file=str(spec.notice_file) if spec.notice_file else None,
            timeouts=spec.timeouts,
            heartbeat=spec.heartbeat,
            job_place=spec.shared.place if spec.shared else None,
            job_life=spec.shared.life if spec.shared else 0,
        )

    def _guard(
        self, agent: AgentSpec, listener: socket.socket | None, zygotes: list[socket.socket]
    ) -> NodeEnd:
        """Guard the node until there is to be no agent any more."""
        env = _job_env(self._spec)
        guarded = self._guarded = GuardedNode(agent, env, listener, on_signal=self._end)
        starters = [ForkServer(guarded.reactor, sock) for sock in zygotes]
        command = [*_zygote_command(), f"--preload={','.join(self._spec.preload)}"]
        own = OwnZygote(
            guarded.reactor,
            command,
            env,
            len(agent.envs),
            on_new=lambda others, pid: guarded.guardian.start_by(others, pid),
        )
        try:
            if self._spec.preload and not zygotes:
                starters = own.start()
            code = guarded.run(starters)
        finally:
            own.end()
            self._scripts_port.close()
        if guarded.signals:
            code = 128 + guarded.signals[0]
            say(f"ended by {signal.Signals(guarded.signals[0]).name} (exit code {code})")
        self._events.emit("job_ended", node=agent.rendezvous.node, exit_code=code)
        return NodeEnd(
            exit_code=code,
            met=guarded.has_met,
            told=bool(guarded.signals),
            left_out=guarded.is_left_out,
        )

    def _port_for_scripts(self, port: int) -> int:
        """MASTER_PORT of the trainers: the agents listen at `port` itself.

        With several nodes all have to name the same one, and only the user's is known to all.
        """
        if self._spec.shared is not None and self._spec.shared.scripts_port:
            return self._spec.shared.scripts_port
        if self._spec.nnodes == 1:
            reserved: int = self._scripts_port.getsockname()[1]
            return reserved
        return port + 1 if port < 65535 else port - 1

    def _end(self, number: int) -> None:
        """Told to end: ask the agent, which gives its trainers a moment; then insist.

        It takes a second signal for one that cannot wait; a third one kills.
        """
        signals, guardian = self._guarded.signals, self._guarded.guardian
        signals.append(number)
        if len(signals) > 2:
            return guardian.kill()
        guardian.send_signal(signal.SIGTERM)
        if len(signals) == 1:
            limit_s = self._spec.timeouts.notice_timeout_s + _LAST_RESORT_S
            self._guarded.reactor.after(limit_s, guardian.kill)


def _hands_out(spec: LaunchSpec) -> bool:
    """Return whether another node may be given the secret, which has no file for it."""
    return spec.nnodes > 1 and not os.environ.get(SECRET_FILE) and not spec.require_secret


def _listen(spec: LaunchSpec) -> socket.socket:
    """The meeting point of the agents, bound here so that a taken port is told at once."""
    where = f"{spec.master_addr}:{spec.master_port}"
    try:
        return listen_at(spec.master_addr, spec.master_port, several=spec.nnodes > 1)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen at {where} ({error.strerror}): give node 0's own address as "
            "--master-addr and a free port as --master-port"
        ) from error


def _connect_zygotes(spec: LaunchSpec) -> list[socket.socket]:
    if spec.zygote is None:
        return []
    count, env = spec.nproc_per_node + spec.standby, _job_env(spec)
    return [connect_zygote(spec.zygote, env) for _ in range(count)]


def connect_zygote(path: str | os.PathLike[str], env: Mapping[str, str]) -> socket.socket:
    """A connection to the zygote that serves at `path`, for workers with this environment.

    Raises ConfigurationError where there is none, or one that has loaded other settings.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(os.fspath(path))
    except OSError as error:
        sock.close()
        raise ConfigurationError(
            f"--zygote is {path}, where no zygote answers ({error.strerror}): start one with "
            "`python -m elaswave_plugin.trainer.zygote --socket PATH --preload torch`"
        ) from error
    try:
        check_zygote(sock, os.fspath(path), env)
    except ConfigurationError:
        sock.close()
        raise
    return sock


def _zygote_command() -> list[str]:
    """The zygote of this package, wherever the package was imported from."""
    root = str(Path(__file__).resolve().parents[2])
    code = "from elaswave_plugin.trainer.zygote import main; sys.exit(main(sys.argv[1:]))"
    return [sys.executable, "-c", f"import sys; sys.path[0] = {root!r}; {code}"]


def _job_env(spec: LaunchSpec) -> dict[str, str]:
    env = {**os.environ, **spec.env}
    if spec.run_dir is not None:
        env["ELASWAVE_DIR"] = str(spec.run_dir)
    if spec.notice_file is not None:
        env[NOTICE_FILE] = str(spec.notice_file)
    if spec.join is None:
        env[variable(QUIESCE)] = str(spec.timeouts.quiesce_timeout_s)
    if spec.nproc_per_node > 1:
        env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    return env


def reserve_port() -> socket.socket:
    """Hold a port that no process is given by chance; a script's own server may still bind it.

    Linux lets a second socket bind it because both have SO_REUSEADDR and this one never listens.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved


def _job_name(spec: LaunchSpec, port: int) -> str:
    """Return the name that all nodes give the job, from the port that each of them is told."""
    if spec.shared is not None:
        return f"{spec.shared.name}-{spec.shared.life}"
    return f"elaswave-{port}"


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
        "TORCHELASTIC_RUN_ID": _job_name(spec, port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        RESERVE: str(spec.reserve),
    }
