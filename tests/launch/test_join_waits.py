"""A worker that joins waits for a slot that is about to be free, and for no job that is gone."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elaswave_plugin.agent.common import AgentSpec
from elaswave_plugin.agent.peers.rendezvous import RendezvousSpec
from elaswave_plugin.agent.way_in import (
    Roster,
    SlotRefusedError,
    seek_admission,
)
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.environment import Program
from elaswave_plugin.ipc.secret import Secret
from elaswave_plugin.launch import join
from tests.ports import free_port

ADDRESSES = {str(node): f"h:{node}" for node in range(3)}


def roster(*, told: Sequence[int], free: Sequence[int], ending: bool = False) -> Roster:
    return Roster(
        record={"addresses": ADDRESSES, "told_to_leave": told, "free": free, "ending": ending}
    )


class Clock:
    """A clock on which time passes by sleeping only."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(join, "time", clock)
    return clock


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Roster]:
    """The later answers of the job, the last one for good."""
    answers: list[Roster] = []

    def answer(contacts: Sequence[str], secret: Secret) -> Roster:
        # Whoever leaves is gone soon, and may be the one that the user has named.
        assert {"h:0", "h:1"} <= {*contacts}
        return answers.pop(0) if len(answers) > 1 else answers[0]

    monkeypatch.setattr(join, "ask_roster", answer)
    return answers


def found(first: Roster, wanted: int = 1) -> Roster:
    return join._with_room(first, Secret.new(), wanted)


FULL = roster(told=[], free=[])
LEAVING = roster(told=[2], free=[])
FREE = roster(told=[], free=[2])


def test_the_slot_of_a_worker_that_leaves_is_waited_for(
    asked: list[Roster], clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    asked += [LEAVING, FREE]
    assert found(LEAVING) is FREE
    assert clock.now_s > 0
    assert capsys.readouterr().err.count("waits for the slot of worker 2, told to leave") == 1


def test_a_worker_that_stays_is_not_waited_for_for_good(asked: list[Roster], clock: Clock) -> None:
    asked += [LEAVING]
    assert found(LEAVING) is LEAVING
    assert join._LEAVING_S < clock.now_s < join._LEAVING_S + 1.0


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (FULL, 1),
        (LEAVING, 2),
        (roster(told=[2], free=[], ending=True), 1),
        (FREE, 1),
    ],
)
def test_nothing_else_is_waited_for(
    asked: list[Roster], clock: Clock, answer: Roster, wanted: int
) -> None:
    assert found(answer, wanted) is answer
    assert clock.now_s == 0.0


@pytest.mark.timeout(20)
def test_nobody_asks_a_job_that_is_gone() -> None:
    spec = AgentSpec(
        rendezvous=RendezvousSpec(
            node=3,
            slots=(2,),
            world_size=3,
            host="",
            ports=(),
            job="",
            timeout_s=60,
            secret=Secret.new(),
        ),
        host="127.0.0.1",
        program=Program(script="train.py", args=(), module=False),
        envs=({},),
        joins=tuple(f"127.0.0.1:{free_port()}" for _ in range(2)),
        wanted=(2,),
    )
    with pytest.raises(SlotRefusedError, match="no agent of the job is there any more"):
        seek_admission(spec, "127.0.0.1:1", life=0)


def test_another_version_is_refused_before_its_answer_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its roster need not have what this version looks for."""
    theirs = Roster(record={"addresses": {}, "program": {"version": "0.0.0"}})
    monkeypatch.setattr(join, "ask_roster", lambda *_: theirs)
    monkeypatch.setattr(join, "secret_at", lambda *_: Secret.new())
    spec = SimpleNamespace(
        join="h:1",
        run_dir=None,
        nproc_per_node=1,
        script="train.py",
        args=(),
        module=False,
        reserve=0,
    )
    with pytest.raises(ConfigurationError, match=r"the job runs version 0\.0\.0"):
        join.find_vacancy(cast("Any", spec))
