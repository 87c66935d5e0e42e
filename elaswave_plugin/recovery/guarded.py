"""Work that is interrupted by a change of the view, and runs again after a recovery."""

from collections.abc import Callable
from typing import TypeVar

from elaswave_plugin.errors import EpochChanged, LinkError, MismatchError, PeerError

Result = TypeVar("Result")


def guarded(
    work: Callable[[], Result],
    recover: Callable[[], object],
    *,
    blame: Callable[[LinkError], object] | None = None,
) -> Result:
    """Run ``work``, and again after ``recover()``, until nothing interrupts it.

    ``blame(error)`` is told where members of a group do not do the same; it returns where some of
    them leave for that, which others are to recover from. Without it, that is raised.
    """
    while True:
        try:
            return work()
        except EpochChanged:
            pass
        except (MismatchError, PeerError) as error:
            if blame is None:
                raise
            blame(error)
        # Outside of the handler: its traceback would keep a step's autograd graph alive.
        recover()
