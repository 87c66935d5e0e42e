"""`elaswave run --rdzv-dir`: the same line on every node, whenever it is started, starts or joins.

The nodes share a record of the job in that folder (`core/agreement/founding.py` says what becomes
of it); what is decided there is carried out here, by the same code as `--node-rank` and `--join`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from elaswave_plugin.agent.peers.job_file import held
from elaswave_plugin.agent.peers.rendezvous import MeetingWait, own_host
from elaswave_plugin.agent.peers.same_program import describe_program, difference
from elaswave_plugin.core.agreement.founding import (
    Decision,
    End,
    Founder,
    Join,
    Start,
    Wait,
)
from elaswave_plugin.errors import (
    EXIT_CONFIGURATION,
    EXIT_REQUEUE,
    EXIT_TOLD,
    ConfigurationError,
)
from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.environment import Program
from elaswave_plugin.ipc.secret import SECRET_FILE, Secret, secret_in, write_secret
from elaswave_plugin.launch.join import NoAnswerError, NoRoomError
from elaswave_plugin.launch.node_job import NodeEnd, reserve_port, run_part
from elaswave_plugin.launch.options import LaunchSpec, SharedJob
from elaswave_plugin.launch.preflight import SecondJobError
from elaswave_plugin.launch.sizes import fits

_LOOK_EVERY_S = 1.0
_MEET_WITHIN_S = 60.0
_OPEN_WITHIN_S = 60.0
_MOST_FAILED_STARTS = 5
# An address that nobody has (RFC 5737): the way there is the way out of this machine.
_OUTSIDE = "192.0.2.1"


def run_shared_job(spec: LaunchSpec, shared: SharedJob) -> int:
    """Take this node's part in the job of this name to its end; returns the job's exit code.

    Raises ConfigurationError for bad input: a folder that cannot be written, another program.
    """
    _check(spec, shared)
    _open_folder(shared)
    os.environ.setdefault(SECRET_FILE, str(secret_in(shared.folder)))
    return _Node(spec, shared).run()


class _Node:
    """This node, as long as it looks at the record between its parts in the job."""

    def __init__(self, spec: LaunchSpec, shared: SharedJob) -> None:
        self._spec = spec
        self._shared = shared
        self._host = shared.local_addr or _way_out()
        program = Program(script=spec.script, args=spec.args, module=spec.module)
        # What a job cannot begin with where it differs from node to node.
        alike = {"nproc": spec.nproc_per_node, "reserve": spec.reserve}
        self._program = {**describe_program(program), **alike}
        self._founder = Founder(
            f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}",
            program=self._program,
            least=shared.least,
            most=shared.most,
            last_call_s=shared.last_call_s,
            fits=lambda nodes: fits(spec.args, nodes * spec.nproc_per_node),
        )

        self._waiting = MeetingWait()
        self._failed_starts = 0
        if shared.most > 1 and self._host.startswith("127."):
            say(f"other machines do not reach this node at {self._host}: name its --local-addr")
        # MASTER_PORT of the scripts, if it founds.
        self._scripts = reserve_port()

    def run(self) -> int:
        """Look, and do what is to be done, until there is an exit code."""
        while True:
            decision, listener = self._next()
            if self._is_told_to_leave:
                say(f"this node waits no more: {str(self._spec.notice_file)!r} is there")
                return EXIT_TOLD
            outcome = self._carry_out(decision, listener)
            if isinstance(outcome, int):
                return outcome
            self._waiting.tell(outcome)
            # Nothing can be waited for: others change the record whenever they come.
            time.sleep(_LOOK_EVERY_S)

    def _next(self) -> tuple[Decision, socket.socket | None]:
        """Wait until there is something to do; for the founder, with where the others come to.

        Nobody is to come there once this node waits no more.
        """
        with _listen(self._host) as listener:
            address = f"{self._host}:{listener.getsockname()[1]}"
            while isinstance(decision := self._look(address), Wait):
                if self._is_told_to_leave:
                    break
                self._waiting.tell(decision.why)
                time.sleep(_LOOK_EVERY_S)
            founds = isinstance(decision, Start) and decision.rank == 0
            return decision, listener.dup() if founds else None

    @property
    def _is_told_to_leave(self) -> bool:
        file = self._spec.notice_file
        return file is not None and file.exists()

    def _look(self, address: str) -> Decision:
        """Look at the record; a node that runs something else leaves no trace in it."""
        folder, port = self._shared.folder, self._scripts.getsockname()[1]
        try:
            with held(folder) as record:
                new, decision = self._founder.look(
                    record.record, time.monotonic(), address=address, scripts_port=port
                )
                differs = None if isinstance(decision, End) else self._difference(new.program)
                if differs is None:
                    record.write(new)
                    self._founder.decided(decision)
        except OSError as error:
            return Wait(f"the record in {str(folder)!r} ({error})")
        if differs is not None:
            raise ConfigurationError(differs)
        return decision

    def _difference(self, theirs: Mapping[str, Any]) -> str | None:
        for name, option in (("nproc", "--nproc-per-node"), ("reserve", "--reserve")):
            ours = self._program[name]
            if theirs.get(name) != ours:
                return f"{option} is {ours}, and {theirs.get(name)} in the job of this name"
        return difference(self._program, theirs)

    def _carry_out(self, decision: Decision, listener: socket.socket | None) -> int | str:
        """Do what was decided; returns the job's exit code, or what is waited for then."""
        match decision:
            case Start():
                return self._start(decision, listener)
            case Join():
                return self._join(decision)
            case End():
                folder = str(self._shared.folder)
                say(
                    f"the job in {folder!r} has ended with exit code {decision.exit_code}; another"
                    " --rdzv-id begins another one"
                )
                return decision.exit_code
            case Wait():
                return decision.why

    def _start(self, start: Start, listener: socket.socket | None) -> int | str:
        shared, spec = self._shared, self._spec
        host, _, port = start.address.rpartition(":")
        if start.rank == 0:
            of = f"{shared.least} to {shared.most}" if shared.least < shared.most else shared.most
            say(f"the job starts on {start.nodes} of {of} nodes")
        part = replace(
            spec,
            nnodes=start.nodes,
            node_rank=start.rank,
            master_addr=host,
            master_port=int(port),
            # One of those that were chosen may be gone: then they meet again.
            start_timeout_s=min(spec.start_timeout_s, _MEET_WITHIN_S),
            shared=replace(shared, life=start.life, scripts_port=start.scripts_port),
        )
        try:
            end = run_part(part, listener)
        except SecondJobError as error:
            end, why = None, str(error)
        else:
            why = "not all nodes that were chosen have come"
        finally:
            if listener is not None:
                listener.close()  # nobody is to come there now, whatever has failed
        if end is not None and self._is_final(end):
            return end.exit_code
        if end is not None and end.met:
            return "the job to let it in again: it has gone on without this node"
        self._failed_starts += 1
        if self._failed_starts == _MOST_FAILED_STARTS:
            say(f"the job does not start: {why}, {_MOST_FAILED_STARTS} times")
            return EXIT_REQUEUE if end is None else end.exit_code
        with contextlib.suppress(OSError), held(shared.folder) as record:
            record.write(self._founder.start_failed(record.record, start.life))
        return f"the nodes to meet again: {why}"

    def _join(self, join: Join) -> int | str:
        spec, why = self._spec, ""
        for contact in join.contacts:
            part = replace(
                spec,
                join=contact,
                # It takes part at once; who stands by does so without a slot.
                standby=0,
                start_timeout_s=min(spec.start_timeout_s, _MEET_WITHIN_S),
                shared=replace(self._shared, life=join.life),
            )
            try:
                end = run_part(part)
            except NoAnswerError as error:
                why = f"an answer of the job, whose record is fresh: {error}"
                continue
            except NoRoomError as error:
                return f"a slot of the job, which runs: {error}"
            if self._is_final(end):
                return end.exit_code
            return "the job to let it in"
        return why

    @staticmethod
    def _is_final(end: NodeEnd) -> bool:
        """Return whether it is the end of this line, and not only of a try."""
        if end.told or end.exit_code == EXIT_CONFIGURATION:
            return True
        return end.met and not end.left_out


def _check(spec: LaunchSpec, shared: SharedJob) -> None:
    """Raise ConfigurationError for what no number of nodes can begin."""
    counts = range(shared.least, shared.most + 1)
    if not any(fits(spec.args, count * spec.nproc_per_node) for count in counts):
        raise ConfigurationError(
            f"--nnodes is {shared.least}:{shared.most} and --nproc-per-node {spec.nproc_per_node}:"
            " the script's layout and batch allow none of these numbers of workers"
        )
    if spec.run_dir == shared.folder:
        raise ConfigurationError(
            f"the run directory is {str(spec.run_dir)!r}, where the job's record is: name another"
        )


def _listen(host: str) -> socket.socket:
    """Listen at a free port of an address of this machine; raises ConfigurationError."""
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, 0), family=family, backlog=1024)
    except OSError as error:
        raise ConfigurationError(
            f"--local-addr is {host!r}, which is no address of this machine ({error.strerror})"
        ) from error


def _open_folder(shared: SharedJob) -> None:
    """Make the job's folder and its secret, or take what another node has made."""
    deadline_s = time.monotonic() + _OPEN_WITHIN_S
    while True:
        try:
            shared.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with held(shared.folder):
                _make_secret(secret_in(shared.folder))
            return
        except OSError as error:
            # Others come at the same moment; what is not writable stays so.
            if isinstance(error, TimeoutError) and time.monotonic() < deadline_s:
                continue
            raise ConfigurationError(
                f"--rdzv-dir is {str(shared.folder.parent)!r}, where the job's folder cannot be"
                f" written or locked ({error.strerror or error}); name one that all nodes see"
            ) from error


def _make_secret(path: Path) -> None:
    """Leave a secret there, under the lock; what a killed launcher left half made is replaced."""
    if not path.exists():
        for draft in path.parent.glob(f".{path.name}.*"):
            draft.unlink()
        write_secret(path, Secret.new())


def _way_out() -> str:
    """This machine's address for the others; the loopback one where there are no others."""
    try:
        return own_host(_OUTSIDE, 1, listener=None, timeout_s=0.0)
    except ConfigurationError:
        return "127.0.0.1"
