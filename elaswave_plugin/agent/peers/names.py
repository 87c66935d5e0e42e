"""The listed names of a job, asked at the same time, and the lease that they renew together."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from elaswave_plugin.core.agreement.named import (
    Ended,
    Known,
    LostLifeError,
    Question,
    Renewal,
    renews,
)
from elaswave_plugin.core.codec import from_json
from elaswave_plugin.ipc.handshake import ANY_NODE, Kind, prove
from elaswave_plugin.ipc.secret import Secret
from elaswave_plugin.ipc.wire import receive_frame, send_frame

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
