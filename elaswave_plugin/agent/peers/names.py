"""The listed names of a job: asked at once, answered by a process, renewing a lease together."""

import contextlib
import os
import signal
import socket
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NoReturn

from elaswave_plugin.agent.peers.arrivals import Arrivals
from elaswave_plugin.core.agreement.named import (
    Ended,
    Known,
    LostLifeError,
    Name,
    Question,
    Renewal,
    renews,
)
from elaswave_plugin.core.codec import UnreadableMessageError, from_json, to_json
from elaswave_plugin.ipc.process_tree import (
    SIGNALS_TO_END,
    close_all_but,
    die_with_parent,
    exit_at_once,
    lead_group,
)
from elaswave_plugin.ipc.secret import ANY_NODE, Kind, Secret, prove
from elaswave_plugin.ipc.title import set_title
from elaswave_plugin.ipc.wire import receive_frame, send_frame

_LOOK_EVERY_S = 60.0
_SEND_S = 1.0


class NameServer:
    """Starts the process; `listener`: where it answers who proves `secret`.

    The listener stays open here: while this process lives, nobody is told that none is there.
    """

    def __init__(self, listener: socket.socket, program: Mapping[str, Any], secret: Secret) -> None:
        self._listener = listener
        self._program = program
        self._secret = secret
        self._pid = 0

    def start(self) -> None:
        """Fork it, or another one, which knows nothing of what the one before was told."""
        self._kill()
        parent_pid = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            _become(self._listener, self._program, self._secret, parent_pid)

    def end(self) -> None:
        """End it, and listen no more."""
        self._kill()
        self._listener.close()

    def _kill(self) -> None:
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            # The node's guardian may have taken note of its end.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)


def _become(
    listener: socket.socket, program: Mapping[str, Any], secret: Secret, parent_pid: int
) -> NoReturn:
    try:
        die_with_parent(parent_pid)
        lead_group()
        close_all_but({listener.fileno()})
        # Who signals all processes of a job means the launcher.
        for number in SIGNALS_TO_END:
            signal.signal(number, signal.SIG_IGN)
        set_title("name of a job")
        serve(listener, Name(program), secret)
    except BaseException:
        traceback.print_exc()
    finally:
        exit_at_once(1)


def serve(listener: socket.socket, name: Name, secret: Secret) -> NoReturn:
    """Answer one question a connection, for ever."""
    with Arrivals(listener, secret, Kind.NAME) as arrivals:
        while True:
            for sock, asked in arrivals.greetings(_LOOK_EVERY_S):
                with sock, contextlib.suppress(OSError):  # the asker is gone
                    sock.settimeout(_SEND_S)
                    try:
                        question: Question = from_json(Question, asked.get("question"))
                    except UnreadableMessageError as error:
                        send_frame(sock, {"error": str(error)})
                        continue
                    send_frame(sock, to_json(name.hear(question, time.monotonic())))


_ANSWER_S = 1.0


class Names:
    """Asks; `names`: "host:port" each."""

    def __init__(self, names: Sequence[str], secret: Secret) -> None:
        self.names = tuple(names)
        self._secret = secret
        # Of the last round, by name.
        self.why_silent: dict[str, str] = {}

    def ask(self, question: Question) -> dict[str, Known | None]:
        """Return the answers; None: nobody listens there; without those that do not answer."""
        with ThreadPoolExecutor(len(self.names)) as pool:
            answers = pool.map(partial(self._ask_or_say_why, question), self.names)
        all_said = dict(zip(self.names, answers, strict=True))
        self.why_silent = {name: one for name, one in all_said.items() if isinstance(one, str)}
        return {name: one for name, one in all_said.items() if not isinstance(one, str)}

    def _ask_or_say_why(self, question: Question, name: str) -> Known | str | None:
        try:
            return self.ask_one(name, question)
        except (OSError, ValueError) as error:
            return str(error)

    def ask_one(self, name: str, question: Question) -> Known | None:
        """Ask one; None: nobody listens there. Raises OSError, and ValueError for a stranger."""
        host, _, port = name.rpartition(":")
        try:
            sock = socket.create_connection((host, int(port)), timeout=_ANSWER_S)
        except ConnectionRefusedError:
            return None
        with sock:
            prove(sock, self._secret, Kind.NAME, timeout_s=_ANSWER_S)
            send_frame(sock, {"node": ANY_NODE, "question": question})
            known: Known = from_json(Known, receive_frame(sock, _ANSWER_S))
        return known


class NamedLease:
    """The lease of a job without a folder: `wanted` names have to be part of it."""

    def __init__(self, names: Sequence[str], wanted: int, secret: Secret) -> None:
        self._names = Names(names, secret)
        self._wanted = wanted
        self.where = f"at {', '.join(names)}"

    def renew(self, life: int, contacts: tuple[str, ...]) -> bool:
        """Renew it; False: another life has begun. Raises OSError where too few are part of it."""
        answers = self._names.ask(Renewal(life=life, contacts=contacts))
        try:
            if renews(answers.values(), life, self._wanted):
                return True
        except LostLifeError:
            return False
        part = sum(1 for one in answers.values() if one is not None and one.life == life)
        are = "is" if part == 1 else "are"
        raise TimeoutError(f"{part} of these names {are} part of the job, wanted {self._wanted}")

    def end(self, life: int, exit_code: int) -> None:
        """Tell all names of the job's end, which answer for a moment yet."""
        self._names.ask(Ended(life=life, exit_code=exit_code))
