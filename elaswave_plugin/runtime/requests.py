"""Requests of an outsider (`elaswave status`): asked of a server's thread, answered in the loop's.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue

from elaswave_plugin.runtime.reactor import Reactor
from elaswave_plugin.runtime.wire import Frame

Answer = Callable[[Frame], Frame]
ANSWER_S = 2.0


def in_loop(reactor: Reactor, answer: Answer) -> Answer:
    """`answer`, to be called from any thread; it runs in the thread of the reactor.

    Where it fails, or the loop does not come to it within ANSWER_S, the result is {"error": why}.
    """

    def ask(request: Frame) -> Frame:
        result: SimpleQueue[Frame] = SimpleQueue()

        def work() -> None:
            try:
                result.put(answer(request))
            except Exception as error:  # whoever only asks must not bring a worker down
                result.put({"error": f"{type(error).__name__}: {error}"})

        reactor.post(work)
        try:
            return result.get(timeout=ANSWER_S)
        except Empty:
            return {"error": f"its control loop did not answer within {ANSWER_S:g} s"}

    return ask
