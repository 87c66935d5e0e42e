"""A worker that was started again and is late is told with the line in which it waits."""

import os
from collections.abc import Callable
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from elaswave_plugin.agent import late_return
from elaswave_plugin.agent.trainer_session import StatusBoard
from elaswave_plugin.core.agreement.life import Life, Stage

LINE = "rendezvous.py:120 in _create_c10d_store"


class Later:
    """A reactor whose time is the test's."""

    def __init__(self) -> None:
        self.due: list[tuple[float, Callable[[], None]]] = []
        self.posted = Event()

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.due.append((delay_s, action))

    def post(self, action: Callable[[], None]) -> None:
        action()
        self.posted.set()


def trainer_of(*, took_s: float, stage: Stage = Stage.BUILDING) -> tuple[Any, Any]:
    """Worker 3 at this stage, where others have taken `took_s` to enter."""
    events = SimpleNamespace(emit=lambda kind, **fields: None)
    common = SimpleNamespace(reactor=Later(), took_s=took_s, exit_code=None, events=events)
    page, life = SimpleNamespace(stack_fd=0), Life(incarnation=1, stage=stage)
    told = {"layout": None, "slow": (), "late_in": None}
    return common, SimpleNamespace(slot=3, pid=os.getpid(), page=page, life=life, **told)


def shown(trainer: Any) -> object:
    return StatusBoard().report(trainer, None, now_s=0.0)["late_in"]


def test_it_is_told_on_the_console_and_in_the_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(late_return, "where_is", lambda pid, stack_fd: LINE)
    common, trainer = trainer_of(took_s=40.0)
    late_return.watch(common, trainer)
    ((after_s, look),) = common.reactor.due
    assert after_s == 80.0
    look()
    assert common.reactor.posted.wait(10)
    told = "worker 3 was started again 80 s ago and has not come so far as to enter; others took 40"
    assert f"elaswave: {told} s: it is in {LINE}; the job goes on" in capsys.readouterr().err
    assert shown(trainer) == LINE
    trainer.life.reach(Stage.WAITING_TO_ENTER)
    assert shown(trainer) is None


@pytest.mark.parametrize("stage", [Stage.WAITING_TO_ENTER, Stage.LEAVING])
def test_one_that_has_come_or_gone_is_not_late(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stage: Stage
) -> None:
    monkeypatch.setattr(late_return, "where_is", lambda pid, stack_fd: pytest.fail("it was asked"))
    common, trainer = trainer_of(took_s=1.0, stage=stage)
    late_return.watch(common, trainer)
    ((after_s, look),) = common.reactor.due
    assert after_s == late_return.LEAST_S
    look()
    assert capsys.readouterr().err == "" and shown(trainer) is None
