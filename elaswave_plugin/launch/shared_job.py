"""`elaswave run --rdzv-dir` and `--rdzv-endpoint`: the same line on every node starts or joins.

What the nodes know of each other is in a folder (`JobFolder`), or asked of the names of all
(`job_names.py`); what is decided there is carried out here, by the same code as `--node-rank` and
`--join`.
"""

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from elaswave_plugin.agent.peers.job_place import held
from elaswave_plugin.agent.peers.rendezvous import MeetingWait, listen_at, way_out
from elaswave_plugin.core.agreement.founding import (
    Decision,
    End,
    Founder,
    Join,
    LastCall,
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
from elaswave_plugin.ipc.secret import SECRET_FILE, Secret, secret_in, write_secret
from elaswave_plugin.launch.job_names import JobNames
from elaswave_plugin.launch.join import NoAnswerError, NoRoomError, check_alike, program_of
from elaswave_plugin.launch.node_job import NodeEnd, reserve_port, run_part
from elaswave_plugin.launch.options import LaunchSpec, SecondJobError, deepspeed_config, peek
from elaswave_plugin.launch.shared_options import SharedJob

_OPEN_WITHIN_S = 60.0


class JobFolder:
    """Looks at the job's record; `who`: this node, in this life of its process.

    The job's secret lies in the folder. Raises ConfigurationError where that cannot be written.
    """

    host: str | None = None

    def __init__(
        self, folder: Path, who: str, program: Mapping[str, Any], last_call: LastCall
    ) -> None:
        self._folder = folder
        self._program = program
        self._founder = Founder(who, program=program, last_call=last_call)
        _open_folder(folder)
        os.environ.setdefault(SECRET_FILE, str(secret_in(folder)))

    def look(self, address: str, scripts_port: int) -> Decision:
        """Look at the record; a node that runs something else leaves no trace in it.

        Raises ConfigurationError for that one.
        """
        try:
            with held(self._folder) as record:
                new, decision = self._founder.look(
                    record.record, time.monotonic(), address=address, scripts_port=scripts_port
                )
                if not isinstance(decision, End):
                    joins = isinstance(decision, Join)
                    check_alike(self._program, new.program, joins=joins)
                record.write(new)
                self._founder.decided(decision)
        except OSError as error:
            return Wait(f"the record in {str(self._folder)!r} ({error})")
        return decision

    def takes_part(self, life: int) -> None:
        """Leave it to the record, which is written."""

    def waits(self, life: int) -> None:
        """Have the nodes meet again where the life that this one has founded never ran."""
        with contextlib.suppress(OSError), held(self._folder) as record:
            record.write(self._founder.start_failed(record.record, life))

    def close(self) -> None:
        """Leave it to the record, in which the job's agents have written its end."""


def _open_folder(folder: Path) -> None:
    """Make the job's folder and its secret, or take what another node has made."""
    deadline_s = time.monotonic() + _OPEN_WITHIN_S
    while True:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with held(folder):
                _make_secret(secret_in(folder))
            return
        except OSError as error:
            # Others come at the same moment; what is not writable stays so.
            if isinstance(error, TimeoutError) and time.monotonic() < deadline_s:
                continue
            raise ConfigurationError(
                f"--rdzv-dir is {str(folder.parent)!r}, where the job's folder cannot be"
                f" written or locked ({error.strerror or error}); name one that all nodes see"
            ) from error


def _make_secret(path: Path) -> None:
    """Leave a secret there, under the lock; what a killed launcher left half made is replaced."""
    if not path.exists():
        for draft in path.parent.glob(f".{path.name}.*"):
            draft.unlink()
        write_secret(path, Secret.new())


_PARALLEL = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
)
_BATCH, _MICRO = "--global-batch-size", "--micro-batch-size"
# DeepSpeed's names: samples of a step are micro-batch x accumulation x workers.
_SAMPLES, _EACH, _TIMES = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


def fits(args: Sequence[str], workers: int) -> bool:
    """Return whether layout and batch allow a start on this number of workers.

    That is Megatron's: whole model-parallel groups, and a global batch of whole micro-batches for
    each replica; and DeepSpeed's, of the file of --deepspeed_config. True where nothing says so.
    """
    replica = 1
    for option in _PARALLEL:
        replica *= _number(peek(args, option)) or 1
    if workers % replica:
        return False
    batch, micro = _number(peek(args, _BATCH)), _number(peek(args, _MICRO)) or 1
    if batch is not None and batch % (micro * (workers // replica)):
        return False
    return _fits_deepspeed(deepspeed_config(args), workers // replica)


def _fits_deepspeed(config: Mapping[str, Any], replicas: int) -> bool:
    samples, each, times = (_number(config.get(name)) for name in (_SAMPLES, _EACH, _TIMES))
    if samples is None:
        return True
    if each is not None and times is not None:
        return samples == each * times * replicas
    return samples % ((each or times or 1) * replicas) == 0


def _number(value: object) -> int | None:
    """Return a positive whole number; None for everything else, such as "auto"."""
    text = str(value)
    return int(text) if text.isdecimal() and int(text) > 0 else None


_LOOK_EVERY_S = 1.0
_MEET_WITHIN_S = 60.0
_MOST_FAILED_STARTS = 5


def run_shared_job(spec: LaunchSpec, shared: SharedJob) -> int:
    """Take this node's part in the job of this name to its end; returns the job's exit code.

    Raises ConfigurationError for bad input: a folder that cannot be written, another program.
    """
    _check(spec, shared)
    return _Node(spec, shared).run()


class _Node:
    """This node, as long as it looks at the place between its parts in the job."""

    def __init__(self, spec: LaunchSpec, shared: SharedJob) -> None:
        self._spec = spec
        self._shared = shared
        self._place = _open_place(spec, shared)
        self._host = shared.local_addr or self._place.host or way_out()
        self._waiting = MeetingWait()
        self._failed_starts = 0
        if not shared.local_addr and not self._place.host and self._host.startswith("127."):
            say(f"other machines do not reach this node at {self._host}: name its --local-addr")
        # MASTER_PORT of the scripts, if it founds.
        self._scripts = reserve_port()

    def run(self) -> int:
        """Look, and do what is to be done, until there is an exit code."""
        try:
            return self._run()
        finally:
            self._place.close()

    def _run(self) -> int:
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
            port = self._scripts.getsockname()[1]
            while isinstance(decision := self._place.look(address, port), Wait):
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

    def _carry_out(self, decision: Decision, listener: socket.socket | None) -> int | str:
        """Do what was decided; returns the job's exit code, or what is waited for then."""
        match decision:
            case Start() | Join():
                return self._take_part(decision, listener)
            case End():
                say(
                    f"the job {self._shared.name!r} has ended with exit code {decision.exit_code};"
                    " another --rdzv-id begins another one"
                )
                return decision.exit_code
            case Wait():
                return decision.why

    def _take_part(self, decision: Start | Join, listener: socket.socket | None) -> int | str:
        try:
            self._place.takes_part(decision.life)
        except (OSError, ValueError) as error:
            return f"the own name to answer ({error})"
        if isinstance(decision, Start):
            outcome = self._start(decision, listener)
        else:
            outcome = self._join(decision)
        if isinstance(outcome, str):
            self._place.waits(decision.life)
        return outcome

    def _start(self, start: Start, listener: socket.socket | None) -> int | str:
        shared, spec = self._shared, self._spec
        host, _, port = start.address.rpartition(":")
        if start.rank == 0:
            say(_words_of_start(start.nodes, shared, spec.reserve))
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
                why = f"an answer of the job, which lives, from {error.contact} ({error.why})"
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


def _words_of_start(nodes: int, shared: SharedJob, reserve: int) -> str:
    """Say how many nodes train, and by how much that may grow."""
    of = f"{shared.least} to {shared.most}" if shared.least < shared.most else shared.most
    words = f"the job starts on {nodes} of {of} nodes"
    if nodes == shared.most and not reserve:
        return words
    grows = f"may grow by {reserve} workers" if reserve else "grows by none"
    return f"{words}, and {grows}: --reserve is {reserve}"


def _check(spec: LaunchSpec, shared: SharedJob) -> None:
    """Raise ConfigurationError for what no number of nodes can begin."""
    counts = range(shared.least, shared.most + 1)
    if not any(fits(spec.args, count * spec.nproc_per_node) for count in counts):
        raise ConfigurationError(
            f"--nnodes is {shared.least}:{shared.most} and --nproc-per-node {spec.nproc_per_node}:"
            " the script's layout and batch allow none of these numbers of workers"
        )
    if spec.run_dir is not None and str(spec.run_dir) == shared.place.folder:
        raise ConfigurationError(
            f"the run directory is {str(spec.run_dir)!r}, where the job's record is: name another"
        )


def _open_place(spec: LaunchSpec, shared: SharedJob) -> JobFolder | JobNames:
    """Return where the nodes of this job learn of each other; raises ConfigurationError."""
    who = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    last_call = LastCall(
        shared.least,
        shared.most,
        last_call_s=shared.last_call_s,
        fits=lambda nodes: fits(spec.args, nodes * spec.nproc_per_node),
    )
    program = program_of(spec)
    if shared.place.names:
        return JobNames(shared.place.names, who, program, last_call, spec.run_dir)
    return JobFolder(Path(shared.place.folder), who, program, last_call)


def _listen(host: str) -> socket.socket:
    """Listen at a free port of an address of this machine; raises ConfigurationError."""
    try:
        return listen_at(host, 0, several=True)
    except OSError as error:
        raise ConfigurationError(
            f"--local-addr is {host!r}, which is no address of this machine ({error.strerror})"
        ) from error
