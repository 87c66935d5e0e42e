"""Walks through all states of a small job that a few faults can lead to, and judges each one."""

import random
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from elaswave_plugin.testing import Cluster
from tests.core.test_agreement_cuts import check, come_to_rest, sealed_job
from tests.core.test_agreement_random import exit_who_is_over, works
from tests.explore.states import Digests, fork

KINDS = ("kill", "restart", "exit", "sunder", "relink", "respawn", "join")


class Broken(AssertionError):
    """A rule does not hold in a state; `path`: what led there."""

    def __init__(self, path: tuple[str, ...], why: str) -> None:
        super().__init__(f"{why}\nafter: {' | '.join(path)}")
        self.path = path


@dataclass(slots=True, kw_only=True)
class Found:
    """Distinct states, those of them at rest, the longest path, whether all were reached."""

    states: int = 0
    at_rest: int = 0
    depth: int = 0
    is_complete: bool = True
    faults: dict[str, int] = field(default_factory=dict)


def explore(
    nodes: tuple[int, ...],
    *,
    faults: int,
    most_states: int,
    most_s: float = float("inf"),
    kinds: Container[str] = KINDS,
) -> Found:
    """Visit each state once, deepest first; raises Broken.

    ``faults``: of a path at most, of these ``kinds``: the death of a node or of its agent, the end
    of a trainer or its return, a link cut or opened again, a newcomer. What is under way may be
    delivered in any order, and stopped trainers may answer at any time.
    """
    found, seen, digests = Found(), set[bytes](), Digests()
    end_s = time.monotonic() + most_s
    waiting: list[tuple[Cluster, tuple[str, ...], int]] = [(sealed_job(nodes), (), faults)]
    while waiting:
        if found.states >= most_states or time.monotonic() > end_s:
            found.is_complete = False
            break
        cluster, path, left = waiting.pop()
        mark = digests.of(cluster) + bytes([left])
        if mark in seen:
            continue
        seen.add(mark)
        found.states += 1
        found.depth = max(found.depth, len(path))
        usual = list(usual_moves(cluster))
        if not usual:
            found.at_rest += 1
            _judge_at_rest(cluster, path)
        faulty = [move for move in fault_moves(cluster) if left and move.split()[0] in kinds]
        for move in [*usual, *faulty]:
            is_fault = move not in usual
            if is_fault:
                kind = move.split()[0]
                found.faults[kind] = found.faults.get(kind, 0) + 1
            after = _made(cluster, move, path)
            waiting.append((after, (*path, move), left - is_fault))
    return found


def usual_moves(cluster: Cluster) -> Iterator[str]:
    """List what may happen next without any fault."""
    for sender, to in sorted(set(cluster.order)):
        yield f"deliver {sender} {to}"
    for slot in sorted(set(cluster.open) & set(cluster.seated)):
        yield f"quiesce {slot}"
    for slot in sorted(cluster.new & set(cluster.seated)):
        yield f"ready {slot}"
    if set(cluster.ends) & set(cluster.alive):
        yield "leave"


def fault_moves(cluster: Cluster) -> Iterator[str]:
    """List what may go wrong, or change, next."""
    alive = sorted(set(cluster.alive) - set(cluster.ends))
    for node in alive if len(alive) > 1 else ():
        yield f"kill {node}"
    for node in alive:
        yield f"restart {node}"
    working = {slot for slot in cluster.seated if works(cluster, slot)}
    for slot in sorted(working & cluster.trainers - cluster.outside):
        yield f"exit {slot} SIGKILL"
    for one in alive:
        for other in alive:
            if one < other and (one, other) not in cluster.cut:
                yield f"sunder {one} {other}"
                yield f"relink {one} {other}"
    for slot in sorted(working - cluster.trainers - cluster.new - cluster.left):
        yield f"respawn {slot}"
    empty = set(range(cluster.width)) - set(cluster.seated)
    for slot in sorted(empty if not cluster.asking else ()):
        yield f"join {cluster.width + cluster.lives} {slot}"


def make(cluster: Cluster, move: str) -> None:
    """Make a move in place."""
    name, *words = move.split()
    if name == "deliver":
        link = (int(words[0]), int(words[1]))
        cluster.order.remove(link)
        cluster.order.appendleft(link)
        cluster.run(most=1)
    elif name == "leave":
        exit_who_is_over(cluster)
    else:
        cluster.act(move)


def _made(cluster: Cluster, move: str, path: tuple[str, ...]) -> Cluster:
    after = fork(cluster)
    try:
        make(after, move)
    except AssertionError as error:
        raise Broken((*path, move), f"two parts disagree: {error}") from error
    return after


def _judge_at_rest(cluster: Cluster, path: tuple[str, ...]) -> None:
    """Nothing is under way: in the end one part at most works, on one view, and none waits."""
    rested = fork(cluster)
    try:
        come_to_rest(rested, random.Random(0))
        check(rested)
    except AssertionError as error:
        raise Broken(path, f"not one part that works: {error}") from error
