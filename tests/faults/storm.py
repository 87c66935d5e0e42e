"""A minute of strangers at all ports of a running job: python -m tests.faults.storm RUN_DIR.

Runs until its standard input ends, and prints what it has done as one JSON object. It knows the
secret of the job only to record an honest handshake, which it then repeats.
"""

import itertools
import json
import os
import select
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil

from elaswave_plugin.communicator.links.frames import Hello
from elaswave_plugin.core.codec import to_json
from elaswave_plugin.ipc.secret import ANSWER_BYTES, Dialling, Kind, Secret, read_secret, secret_in
from elaswave_plugin.ipc.wire import encode
from elaswave_plugin.tracking.events import EVENTS_FILE, read_lines
from tests.core.sealed import sealed

SILENT = 200
PAUSE_S = 0.03
ANSWER_S = 2.0


class Storm:
    """Connects, says what it should not, and notes what it is answered."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._silent: list[socket.socket] = []
        self._ports: list[tuple[str, int]] = []
        self._looked_s = 0.0
        self.done: Counter[str] = Counter()
        # Bytes that a connection got beyond the answer of the handshake, where it proved nothing.
        self.leaked = 0

    def run(self) -> None:
        """One kind after the other, at one port after the other, until standard input ends."""
        kinds: tuple[Callable[[tuple[str, int]], None], ...] = (
            self.scan,
            self.be_silent,
            self.say_anything,
            self.half_a_handshake,
            self.replay,
            self.wrong_secret,
            self.frames_without_proof,
        )
        for number, kind in enumerate(itertools.cycle(kinds)):
            if select.select([sys.stdin], [], [], PAUSE_S)[0]:
                break
            ports = self._listening()
            if not ports:
                continue
            try:
                kind(ports[number // len(kinds) % len(ports)])
                self.done[kind.__name__] += 1
            except OSError:
                self.done["refused or gone"] += 1
        for sock in self._silent:
            sock.close()

    def _listening(self) -> list[tuple[str, int]]:
        """All ports at which processes of the job listen, looked up now and then."""
        if time.monotonic() - self._looked_s > 1.0:
            self._looked_s = time.monotonic()
            started = [
                e
                for e in read_lines(self._run_dir / EVENTS_FILE)
                if e["kind"] in ("worker_started", "agent_started")
            ]
            found: set[tuple[str, int]] = set()
            for pid in {one["pid"] for one in started}:
                try:
                    connections = psutil.Process(pid).net_connections("tcp")
                except psutil.Error:
                    continue
                listening = [one.laddr for one in connections if one.status == "LISTEN"]
                found |= {(where.ip, where.port) for where in listening}
            self._ports = sorted(found)
        return self._ports

    def scan(self, where: tuple[str, int]) -> None:
        """As a port scanner does."""
        socket.create_connection(where, timeout=ANSWER_S).close()

    def be_silent(self, where: tuple[str, int]) -> None:
        """Keep SILENT connections open, which say nothing."""
        for _ in range(20):
            self._silent.append(socket.create_connection(where, timeout=ANSWER_S))
        while len(self._silent) > SILENT:
            self._silent.pop(0).close()

    def say_anything(self, where: tuple[str, int]) -> None:
        """Random bytes."""
        self._say(where, os.urandom(300))

    def half_a_handshake(self, where: tuple[str, int]) -> None:
        """An opening as it should be, and nothing after the answer."""
        self._say(where, Dialling(Secret.new(), self._kind(where)).opening)

    def replay(self, where: tuple[str, int]) -> None:
        """All that an honest side has said before, said again."""
        honest = Dialling(read_secret(secret_in(self._run_dir)), Kind.SERVER)
        with socket.create_connection(where, timeout=ANSWER_S) as sock:
            sock.sendall(honest.opening)
            answer = sock.recv(ANSWER_BYTES, socket.MSG_WAITALL)
        if len(answer) == ANSWER_BYTES:
            self._say(where, honest.opening + honest.answered(answer), encode({"t": "status"}))

    def wrong_secret(self, where: tuple[str, int]) -> None:
        """The right handshake, with a proof made of another secret."""
        other = Secret.new()
        opening = Dialling(other, self._kind(where)).opening
        self._say(where, opening, os.urandom(32) + encode({"t": "status"}))

    def frames_without_proof(self, where: tuple[str, int]) -> None:
        """Send frames of members of the job without a proof before them."""
        frames = encode({"t": "copy", "record": to_json(sealed(0, 10**6))})
        self._say(where, frames + Hello(1, "127.0.0.1:9", 1, 5, 0).pack())

    def _kind(self, where: tuple[str, int]) -> Kind:
        return Kind.LINK if where[1] % 2 else Kind.SERVER

    def _say(self, where: tuple[str, int], *parts: bytes) -> None:
        """Say it, and read until the other side closes, or says nothing for a while."""
        got = 0
        with socket.create_connection(where, timeout=ANSWER_S) as sock:
            sock.settimeout(0.05)
            for part in parts:
                sock.sendall(part)
            try:
                while data := sock.recv(4096):
                    got += len(data)
            except (TimeoutError, ConnectionResetError):
                pass
        self.leaked += max(0, got - ANSWER_BYTES)


if __name__ == "__main__":
    storm = Storm(Path(sys.argv[1]))
    began_s = time.monotonic()
    storm.run()
    seconds = time.monotonic() - began_s
    print(json.dumps({"seconds": seconds, "done": storm.done, "leaked": storm.leaked}))
