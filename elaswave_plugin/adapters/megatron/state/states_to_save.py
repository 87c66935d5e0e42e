"""The states that a script is about to save, which follow from who is there.

A script builds them and then saves them, in two calls; a loss in the second makes the first's old.
"""

from collections.abc import Callable
from typing import Any


class StatesToSave:
    """The results of ``sharded_state_dict`` since the last step, built again after a loss."""

    def __init__(self) -> None:
        # What the script was given, the keys of that, and what builds it.
        self._known: list[tuple[dict[str, Any], set[str], Callable[[], dict[str, Any]]]] = []
        self._epoch = 0
        self._is_building = False

    def build(self, build: Callable[[], dict[str, Any]], epoch: int) -> dict[str, Any]:
        """Build one more in this view; within another one it is a part of that."""
        if self._is_building:
            return build()
        self.renew(epoch)
        state = self._built(build)
        self._known.append((state, {*state}, build))
        return state

    def renew(self, epoch: int) -> None:
        """Have in each of them, where the script has put it, what there is in this view.

        What the script has added stays.
        """
        for state, keys, build in self._known if epoch != self._epoch else ():
            now = self._built(build)
            for key in keys:
                state.pop(key, None)
            state.update(now)
        self._epoch = epoch

    def _built(self, build: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        self._is_building = True
        try:
            return build()
        finally:
            self._is_building = False

    def forget(self) -> None:
        """A step was made, after which they are others."""
        self._known.clear()
