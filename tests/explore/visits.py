"""Visits each state of a small world once, deepest first, along all orders of its moves."""

import time
from collections.abc import Callable, Iterable
from typing import Protocol, Self

from tests.explore.search import Broken, Found


class World(Protocol):
    """Processes, and what lies between them; a rule that is broken is an AssertionError."""

    def fork(self) -> Self:
        """Copy it."""

    def mark(self) -> object:
        """All that may matter for what happens next."""

    @property
    def is_far(self) -> bool:
        """True if a path ends here."""

    def usual(self) -> Iterable[str]:
        """List what may happen next without any fault."""

    def faults(self) -> Iterable[str]:
        """List what may go wrong next, or be mended."""

    def make(self, move: str) -> None:
        """Make a move in place."""

    def come_to_rest(self) -> None:
        """Have all that is broken mended, and check where that leads."""


def visit(
    world: World,
    *,
    faults: int,
    most_states: int = 10**9,
    most_s: float = float("inf"),
    share: int = 20,
) -> Found:
    """Visit what ``faults`` of a path at most lead to; raises Broken.

    One state in ``share`` is brought to rest.
    """
    found, seen = Found(), set[int]()
    end_s = time.monotonic() + most_s
    waiting: list[tuple[World, tuple[str, ...], int]] = [(world, (), faults)]
    while waiting:
        if found.states >= most_states or time.monotonic() > end_s:
            found.is_complete = False
            break
        here, path, left = waiting.pop()
        mark = hash((here.mark(), left))
        if mark in seen:
            continue
        seen.add(mark)
        found.states += 1
        found.depth = max(found.depth, len(path))
        if found.states % share == 0:
            found.at_rest += 1
            come_to_rest(here.fork(), path)
        usual = [] if here.is_far else list(here.usual())
        for move in [*usual, *(here.faults() if left and usual else ())]:
            kind = move.split()[0]
            is_fault = move not in usual
            if is_fault:
                found.faults[kind] = found.faults.get(kind, 0) + 1
            after = here.fork()
            act(after.make, move, path)
            waiting.append((after, (*path, move), left - is_fault))
    return found


def act(make: Callable[[str], None], move: str, path: tuple[str, ...]) -> None:
    """Make a move; raises Broken, with the path to it, where it breaks a rule."""
    try:
        make(move)
    except AssertionError as error:
        raise Broken((*path, move), str(error)) from error


def come_to_rest(world: World, path: tuple[str, ...]) -> None:
    """Bring a world to rest; raises Broken."""
    act(lambda move: world.come_to_rest(), "rest", path)
