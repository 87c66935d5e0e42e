"""Copiers of a worker's snapshots: one for each holder on another node, and none for others."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elaswave_plugin.agent import snapshot_server
from elaswave_plugin.agent.snapshot_server import Copies
from elaswave_plugin.core.agreement.leader import Agreement
from elaswave_plugin.core.agreement.timeouts import Timeouts
from elaswave_plugin.core.layout.worker_facts import SealedShard
from elaswave_plugin.ipc.frames import Copied
from tests.core.sealed import sealed
from tests.job_secret import SECRET


@dataclass
class Copier:
    """Notes what a copier is told."""

    address: str
    holder: int
    relays: list[str]

    def __post_init__(self) -> None:
        self.sent: list[int] = []
        self.closed = False

    def send(self, record: SealedShard) -> None:
        assert not self.closed
        self.sent.append(record.step)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Copier]:
    found: list[Copier] = []

    def make(store: object, address: str, holder: int, **others: Any) -> Copier:
        found.append(Copier(address, holder, others["relays"]))
        return found[-1]

    monkeypatch.setattr(snapshot_server, "SnapshotCopier", make)
    return found


class Case:
    """The copies of worker 0, of a job with two workers on node 0 and one on each other node."""

    def __init__(self) -> None:
        self.agreement = Agreement(node=0, nodes=(0, 0, 1, 2), timeouts=Timeouts())
        self.agreement.addresses = {node: f"h:{node}" for node in range(3)}
        self.told: list[object] = []
        spec = SimpleNamespace(rendezvous=SimpleNamespace(secret=SECRET))
        common = SimpleNamespace(agreement=self.agreement, node=0, spec=spec, store=None)
        self.copies = Copies(cast("Any", common), 0, tell=self.told.append)

    def send(self, step: int, targets: tuple[int, ...]) -> None:
        self.copies.send(sealed(0, step), targets)


@pytest.fixture
def case() -> Case:
    return Case()


def test_who_holds_no_copy_any_more_has_no_copier(case: Case, made: list[Copier]) -> None:
    for step, targets in enumerate([(2,), (2, 3), (3,), (2,)]):
        case.send(step, targets)
        assert {one.holder for one in made if not one.closed} == {*targets}
    assert [(one.address, one.holder, one.sent) for one in made] == [
        ("h:1", 2, [0, 1]),
        ("h:2", 3, [1, 2]),
        ("h:1", 2, [3]),
    ]
    assert [one.relays for one in made] == [["h:2"], ["h:1"], ["h:2"]]
    case.copies.close()
    assert all(one.closed for one in made)


def test_a_slot_of_the_same_node_holds_it_at_once(case: Case, made: list[Copier]) -> None:
    """It is in the memory of the node's guardian: no byte is copied."""
    case.send(4, (1, 2))
    assert case.told == [Copied(step=4, epoch=1, slot=1)]
    assert [one.holder for one in made] == [2]


def test_a_slot_that_another_node_has_now_gets_a_copier_of_its_own(
    case: Case, made: list[Copier]
) -> None:
    case.send(0, (2,))
    case.agreement.nodes.of_slots = (0, 0, 4, 2)
    case.agreement.addresses[4] = "h:4"
    case.send(1, (2,))
    assert [(one.address, one.closed, one.sent) for one in made] == [
        ("h:1", True, [0]),
        ("h:4", False, [1]),
    ]
