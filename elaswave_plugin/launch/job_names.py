"""A node's view of a job by the names of its nodes: `elaswave run --rdzv-endpoint`."""

import contextlib
import errno
import os
import random
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elaswave_plugin.agent.peers.names import Names, NameServer
from elaswave_plugin.agent.peers.rendezvous import listen_at
from elaswave_plugin.core.agreement.founding import Decision, End, Join, LastCall, Wait
from elaswave_plugin.core.agreement.named import Call, Known, NamedFounder, Own, digest
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.secret import (
    SECRET_FILE,
    Secret,
    named_secret,
    read_secret,
    secret_in,
    write_secret,
)
from elaswave_plugin.launch.join import check_alike
from elaswave_plugin.launch.options import open_run_dir

# Those that still wait look once a second.
_LINGER_S = 5.0
_LIVES = 2**31


class JobNames:
    """Asks the listed names, and answers for one of them where this machine has it.

    `who`: this node, in this life of its process. The job's secret is in a file that all nodes
    have. Raises ConfigurationError where there is none, or none of several names is this machine's.
    """

    def __init__(
        self,
        names: Sequence[str],
        who: str,
        program: Mapping[str, Any],
        last_call: LastCall,
        run_dir: Path | None,
    ) -> None:
        secret = _secret(run_dir)
        self._names = Names(names, secret)
        self._program = program
        self._call = Call(who=who, program=digest(program))
        self._own, listener = _own_name(names)
        self.host = self._own.rpartition(":")[0] or None
        self._server = None if listener is None else NameServer(listener, program, secret)
        if self._server is not None:
            self._server.start()
        self._founder = NamedFounder(
            who, self._own, names, last_call, draw_life=lambda: random.randrange(1, _LIVES)
        )
        if len(names) == 1:
            say(f"where the process at {names[0]} is lost, the job waits until it is back")

    def look(self, address: str, scripts_port: int) -> Decision:
        """Ask all names; raises ConfigurationError where the job runs something else."""
        answers = self._names.ask(self._call)
        if self._own:
            answers.pop(self._own, None)
            with contextlib.suppress(OSError, ValueError):  # a silent name, as any other
                answers[self._own] = self._tell(Own())
        decision = self._founder.decide(
            answers, time.monotonic(), address=address, scripts_port=scripts_port
        )
        # All have to run what the first name runs that answers.
        in_turn = (answers.get(name) for name in self._names.names)
        first = next((one for one in in_turn if one is not None), None)
        if first is not None and not isinstance(decision, End):
            check_alike(self._program, first.program, joins=isinstance(decision, Join))
        if isinstance(decision, Wait) and self._names.why_silent:
            whys = [f"{name}: {why}" for name, why in self._names.why_silent.items()]
            return Wait(f"{decision.why} ({'; '.join(whys)})")
        return decision

    def takes_part(self, life: int) -> None:
        """Say that this node is part of a life; raises OSError."""
        offer = self._founder.offer
        is_ours = offer is not None and offer.life == life
        self._tell(Own(life=life, offer=offer if is_ours else None))

    def waits(self, life: int) -> None:
        """Found nothing at once; its own name is told by the next look."""
        self._founder.left()

    def close(self) -> None:
        """Answer no more; of a job that has ended the end is told for another moment."""
        if self._server is None:
            return
        with contextlib.suppress(OSError, ValueError):  # it was killed, and knows nothing
            known = self._names.ask_one(self._own, self._call)
            if known is not None and known.exit_code is not None:
                time.sleep(_LINGER_S)
        self._server.end()

    def _tell(self, own: Own) -> Known | None:
        """Tell the own name, which is started again where it was killed; raises OSError."""
        if self._server is None:
            return None
        try:
            return self._names.ask_one(self._own, own)
        except (OSError, ValueError):
            self._server.start()
            return self._names.ask_one(self._own, own)


def _secret(run_dir: Path | None) -> Secret:
    """Return the secret that every node has: that of ELASWAVE_SECRET_FILE, or the run directory's.

    The first node makes it there.
    """
    secret = named_secret(os.environ)
    if secret is not None:
        return secret
    if run_dir is None:
        raise ConfigurationError(
            "--rdzv-endpoint needs the job's secret on every node: name a run directory that all"
            f" nodes see (--dir), or make a file with `elaswave secret new FILE`, have it on every"
            f" node, and name it as {SECRET_FILE}"
        )
    open_run_dir(run_dir)
    path = secret_in(run_dir)
    try:
        write_secret(path, Secret.new())
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigurationError(
            f"the job's secret cannot be written in {str(run_dir)!r} ({error.strerror})"
        ) from error
    os.environ[SECRET_FILE] = str(path)
    return read_secret(path)


def _own_name(names: Sequence[str]) -> tuple[str, socket.socket | None]:
    """Return the first name at which this machine can listen, and a listener there; or none.

    Raises ConfigurationError where there are several, and none is free here.
    """
    whys = []
    for name in names:
        host, _, port = name.rpartition(":")
        try:
            return name, listen_at(host, int(port), several=True)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                whys.append(f"; {name} is taken by another process")
    if len(names) == 1:
        return "", None
    raise ConfigurationError(
        f"--rdzv-endpoint is {','.join(names)}, and this machine has none of these names free"
        + "".join(whys)
    )
