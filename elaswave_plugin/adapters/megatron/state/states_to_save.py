"""The states that a script is about to save, which follow from who is there.

A script builds them and then saves them, in two calls; a loss in the second makes the first's old.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import NoneType
from typing import Any, NamedTuple

State = dict[str, Any]
# Values that several objects of a script may be, with no state in them.
_SHARED = (int, float, complex, str, bytes, NoneType)


class _Built(NamedTuple):
    """A state that the script was given: the object, what was in it, and what builds it."""

    state: State
    items: State
    build: "partial[State]"

    def put(self, now: Mapping[str, Any], places: Iterable[Any]) -> None:
        """Have ``now`` wherever a script may have put what was in it: in dicts, also in others."""
        for place in places:
            if isinstance(place, dict):
                self._put(now, place)
            if isinstance(place, dict | list | tuple):
                self.put(now, [*(place.values() if isinstance(place, dict) else place)])

    def _put(self, now: Mapping[str, Any], place: dict[Any, Any]) -> None:
        items, is_own = self.items, place is self.state
        here = [key for key in items if is_own or _is_same(place.get(key), items[key])]
        for key in here:
            place.pop(key, None)
        # A worker that has taken something over has more of it; who wanted a part wants that.
        is_whole = here and all(key in here or isinstance(items[key], _SHARED) for key in items)
        place.update((key, now[key]) for key in now if is_whole or key in here)


def _is_same(value: Any, other: Any) -> bool:
    return value is other and not isinstance(value, _SHARED)


class StatesToSave:
    """The results of ``sharded_state_dict`` since the last step, built again after a loss."""

    def __init__(self) -> None:
        self._known: list[_Built] = []
        self._epoch = 0
        self._is_building = False

    def build(self, build: "partial[State]", epoch: int) -> State:
        """Build one more in this view; within another one it is a part of that."""
        if self._is_building:
            return build()
        self.renew(epoch)
        state = self._built(build)
        self._known.append(_Built(state, {**state}, build))
        return state

    def renew(self, epoch: int, saved: Any = None) -> None:
        """Have in each of them, where the script has put it, what there is in this view.

        ``saved``: what the script saves, with them or copies of them in it. What the script has
        added stays.
        """
        before, self._known = self._known, [] if epoch != self._epoch else self._known
        for one in before if epoch != self._epoch else ():
            now = self._built(one.build)
            # Those that are built behind it are given it.
            given = [(*later.build.args, *later.build.keywords.values()) for later in before]
            one.put(now, [one.state, saved, *given])
            self._known.append(_Built(one.state, {**now}, one.build))
        self._epoch = epoch

    def _built(self, build: Callable[[], State]) -> State:
        self._is_building = True
        try:
            return build()
        finally:
            self._is_building = False

    def forget(self) -> None:
        """A step was made, after which they are others."""
        self._known.clear()
