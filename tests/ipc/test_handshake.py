"""The opening of a connection: who has the secret gets in, and nobody else, whatever is sent."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_plugin.ipc import secret
from elaswave_plugin.ipc.secret import (
    ANSWER_BYTES,
    OPENING_BYTES,
    PROOF_BYTES,
    Accepting,
    Dialling,
    HandshakeError,
    Kind,
    Secret,
    admit,
    asks_for_secret,
    prove,
    secret_at,
)
from tests.idle import within
from tests.job_secret import SECRET, accepted

OTHER = Secret(b"another secret, and as long as wanted")
SHORT_S, LONG_S = 0.2, 10.0


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def shake(pair: tuple[socket.socket, socket.socket], dials: Secret, accepts: Secret) -> int:
    """Run both sides; returns the node that the accepting one heard."""
    with ThreadPoolExecutor(1) as threads:
        accepted = threads.submit(admit, pair[1], accepts, Kind.SERVER, timeout_s=LONG_S)
        try:
            prove(pair[0], dials, Kind.SERVER, node=3, timeout_s=LONG_S)
        except BaseException:
            pair[0].close()
            accepted.exception(LONG_S)
            raise
        return accepted.result(LONG_S)


def test_both_sides_prove_the_secret_and_the_bytes_behind_it_stay(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    assert shake(pair, SECRET, SECRET) == 3
    pair[0].sendall(b"first frame")
    assert pair[1].recv(64) == b"first frame"


def test_another_secret_is_seen_by_the_side_that_dials_first(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """A process that dials a stranger so says nothing of its own secret."""
    with pytest.raises(HandshakeError, match="another secret than this one: set ELASWAVE_SECR"):
        shake(pair, OTHER, SECRET)


def test_a_proof_holds_for_one_connection_of_one_kind_in_one_direction() -> None:
    dialling, accepting = Dialling(SECRET, Kind.SERVER), Accepting(SECRET, Kind.SERVER)
    answer = accepting.opened(dialling.opening)
    proof = dialling.answered(answer)
    accepting.proved(proof)
    again = Accepting(SECRET, Kind.SERVER)  # a replay of all that was said
    assert again.opened(dialling.opening) != answer
    with pytest.raises(HandshakeError, match="does not have this job's secret"):
        again.proved(proof)
    with pytest.raises(HandshakeError):  # what the accepting side said, sent back
        again.proved(answer[-PROOF_BYTES:])
    with pytest.raises(HandshakeError, match="wants a connection of kind 3"):
        Accepting(SECRET, Kind.LINK).opened(dialling.opening)
    with pytest.raises(HandshakeError):  # an answer for another opening
        Dialling(SECRET, Kind.SERVER).answered(answer)


def test_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret, "VERSION", 2)
    newer = Dialling(SECRET, Kind.SERVER)
    monkeypatch.undo()
    answer = Accepting(SECRET, Kind.SERVER).opened(newer.opening)
    monkeypatch.setattr(secret, "VERSION", 2)
    with pytest.raises(HandshakeError, match="speaks version 1 of the handshake and this process"):
        newer.answered(answer)


def test_of_several_secrets_the_one_that_fits_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        arrival = threads.submit(accepted, listener, Kind.SERVER)
        host, port = listener.getsockname()
        assert secret_at(f"{host}:{port}", [OTHER, SECRET], LONG_S) == SECRET
        arrival.result(LONG_S).close()


def test_only_the_question_for_the_secret_asks_for_it() -> None:
    assert asks_for_secret(Dialling(OTHER, Kind.SECRET).opening)
    assert not asks_for_secret(Dialling(OTHER, Kind.MEETING).opening)


@pytest.mark.parametrize("said", [b"", b"EWav", b"\0" * (OPENING_BYTES - 1)])
def test_silence_and_half_a_handshake_end_in_time(
    pair: tuple[socket.socket, socket.socket], said: bytes
) -> None:
    pair[0].sendall(said)
    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        admit(pair[1], SECRET, Kind.SERVER, timeout_s=SHORT_S)
    assert time.monotonic() - began_s < LONG_S / 2


def test_bytes_that_drip_end_in_time(pair: tuple[socket.socket, socket.socket]) -> None:
    """The limit is for the whole, not for the next byte."""
    opening, ended = Dialling(SECRET, Kind.SERVER).opening, threading.Event()

    def drip() -> None:
        for byte in opening:
            pair[0].send(bytes([byte]))
            if ended.wait(SHORT_S / 4):
                return

    with ThreadPoolExecutor(1) as threads:
        threads.submit(drip)
        with within(5 * SHORT_S), pytest.raises(TimeoutError):
            admit(pair[1], SECRET, Kind.SERVER, timeout_s=SHORT_S)
        ended.set()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_no_changed_byte_is_a_proof(data: st.DataObject) -> None:
    """Each part of an honest handshake, with something of it changed, or anything in its place."""
    dialling, accepting = Dialling(SECRET, Kind.SERVER), Accepting(SECRET, Kind.SERVER)

    def changed(part: bytes) -> bytes:
        if data.draw(st.booleans()):
            return data.draw(st.binary(min_size=len(part), max_size=len(part)).filter(part.__ne__))
        where = data.draw(st.integers(0, len(part) - 1))
        byte = data.draw(st.integers(1, 255))
        return part[:where] + bytes([part[where] ^ byte]) + part[where + 1 :]

    part = data.draw(st.sampled_from(["opening", "answer", "proof"]))

    def shaken() -> None:
        opening = changed(dialling.opening) if part == "opening" else dialling.opening
        answer = accepting.opened(opening)
        assert len(answer) == ANSWER_BYTES
        proof = dialling.answered(changed(answer) if part == "answer" else answer)
        accepting.proved(changed(proof) if part == "proof" else proof)

    with pytest.raises(HandshakeError):
        shaken()
