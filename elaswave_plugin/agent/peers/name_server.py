"""The process that answers for a listed name: forked from its launcher, and ends with it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
import traceback
from collections.abc import Mapping
from typing import Any, NoReturn

from elaswave_plugin.agent.peers.arrivals import Arrivals
from elaswave_plugin.core.agreement.named import Name, Question
from elaswave_plugin.core.codec import UnreadableMessageError, from_json, to_json
from elaswave_plugin.ipc.handshake import Kind
from elaswave_plugin.ipc.process_tree import (
    SIGNALS_TO_END,
    close_all_but,
    die_with_parent,
    exit_at_once,
    lead_group,
)
from elaswave_plugin.ipc.secret import Secret
from elaswave_plugin.ipc.title import set_title
from elaswave_plugin.ipc.wire import send_frame

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
