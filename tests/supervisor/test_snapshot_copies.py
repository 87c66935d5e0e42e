"""Copiers of a worker's snapshots: one for each holder of the last seal, and none for others."""

from typing import Any, cast

import pytest

from elaswave_plugin.core.layout.sealed_shard import SealedShard
from elaswave_plugin.ipc.peer import Peer
from elaswave_plugin.supervisor import snapshot_copies
from elaswave_plugin.supervisor.snapshot_copies import Copies


class Copier:
    """Notes what a copier is told."""

    def __init__(self, store: object, address: str, **others: object) -> None:
        self.address = address
        self.sent: list[object] = []
        self.closed = False

    def send(self, record: object) -> None:
        assert not self.closed
        self.sent.append(record)

    def close(self) -> None:
        self.closed = True


class Rendezvous:
    secret = None
    node = 0


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Copier]:
    found: list[Copier] = []

    def make(*args: Any, **others: Any) -> Copier:
        found.append(Copier(*args, **others))
        return found[-1]

    monkeypatch.setattr(snapshot_copies, "SnapshotCopier", make)
    return found


@pytest.fixture
def copies() -> Copies:
    peers = [
        Peer(slot=slot, node=slot, pid=slot, control="", data=f"h:{slot}", machine="m")
        for slot in range(4)
    ]
    nothing = cast("Any", None)
    return Copies(
        nothing, peers, rendezvous=cast("Any", Rendezvous()), tell=nothing, events=nothing
    )


def record(step: int) -> SealedShard:
    return cast("SealedShard", step)


def test_who_holds_no_copy_any_more_has_no_copier(copies: Copies, made: list[Copier]) -> None:
    for step, targets in enumerate([(1,), (1, 2), (2,), (3,), (1,)]):
        copies.send(record(step), targets)
        open_now = {one.address for one in made if not one.closed}
        assert open_now == {f"h:{target}" for target in targets}
    assert [(one.address, one.sent) for one in made] == [
        ("h:1", [0, 1]),
        ("h:2", [1, 2]),
        ("h:3", [3]),
        ("h:1", [4]),
    ]


def test_a_supervisor_in_the_place_of_another_gets_a_copier_of_its_own(
    copies: Copies, made: list[Copier]
) -> None:
    copies.send(record(0), (1,))
    copies.peer_replaced(1)
    copies.peer_replaced(2)
    copies.send(record(1), (1,))
    assert [(one.closed, one.sent) for one in made] == [(True, [0]), (False, [1])]
