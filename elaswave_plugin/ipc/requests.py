"""Requests of an outsider (`elaswave status`): asked of a server's thread, answered in the loop's.

And the asking.

Standard library only.
"""

import socket
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from elaswave_plugin.ipc.reactor import Reactor
from elaswave_plugin.ipc.secret import Kind, Secret, prove
from elaswave_plugin.ipc.wire import Frame, receive_frame, send_frame

Answer = Callable[[Frame], Frame]
ANSWER_S = 2.0


def in_loop(reactor: Reactor, answer: Answer) -> Answer:
    """`answer`, to be called from any thread; it runs in the thread of the reactor.

    Where it fails, or the loop does not come to it within ANSWER_S, the result is {"error": why};
    in the second case it is not called any more.
    """

    def ask(request: Frame) -> Frame:
        result: SimpleQueue[Frame] = SimpleQueue()
        # For the first of the two: the loop, which answers, or the asker, which gives up.
        turn = threading.Lock()

        def work() -> None:
            if not turn.acquire(blocking=False):
                return
            try:
                result.put(answer(request))
            except Exception as error:  # a mere request must not bring a worker down
                result.put({"error": f"{type(error).__name__}: {error}"})

        reactor.post(work)
        try:
            return result.get(timeout=ANSWER_S)
        except Empty:
            if turn.acquire(blocking=False):
                return {"error": f"its control loop did not answer within {ANSWER_S:g} s"}
        try:
            return result.get(timeout=ANSWER_S)
        except Empty:
            return {"error": f"its control loop has begun and not ended within {ANSWER_S:g} s"}

    return ask


def request(address: str, frame: Frame, timeout_s: float, secret: Secret) -> Frame:
    """Return what an agent answers at "host:port"; raises OSError with the reason."""
    host, _, port = address.rpartition(":")
    deadline_s = time.monotonic() + timeout_s
    with socket.create_connection((host, int(port)), timeout=timeout_s) as sock:
        prove(sock, secret, Kind.SERVER, timeout_s=timeout_s)
        send_frame(sock, frame)
        try:
            answer = receive_frame(sock, deadline_s - time.monotonic())
        except ValueError as error:
            raise ConnectionError("another program answers there, not an agent") from error
    if "error" in answer:
        raise ConnectionError(answer["error"])
    return answer
