"""The states that a script is about to save, which follow from who is there.

A script builds them and then saves them, in two calls; a loss in the second makes the first's old.
"""

from collections.abc import Callable
from typing import Any


class StatesToSave:
    """The results of ``sharded_state_dict`` since the last step, built again after a loss."""

    def __init__(self) -> None:
        self._known: list[tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = []
        self._epoch = 0

    def add(self, state: dict[str, Any], build: Callable[[], dict[str, Any]], epoch: int) -> None:
        """One more, built in this view."""
        self.renew(epoch)
        self._known.append((state, build))

    def renew(self, epoch: int) -> None:
        """Have in each of them, where the script has put it, what there is in this view."""
        for state, build in self._known if epoch != self._epoch else ():
            now = build()
            state.clear()
            state.update(now)
        self._epoch = epoch

    def forget(self) -> None:
        """A step was made, after which they are others."""
        self._known.clear()
