"""SIGTERM and SIGHUP end a command as an exit does, and with it all that it has started."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def signals_unwind() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit(128 + number), except where ignored (nohup).

    To be called in the main thread only.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    heeded = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, leave) for number in heeded}
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action)
