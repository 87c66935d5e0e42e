"""A trainer waits until it may act, and not for good where its agent stays silent."""

from typing import Any, cast

import pytest

from elaswave_plugin.errors import JobStopped
from elaswave_plugin.trainer import signals


class Page:
    """A progress page whose owner may act from some look on; its agent is silent, or speaks."""

    def __init__(self, refusals: float, *, speaks: bool = False) -> None:
        self.refusals = refusals
        self.speaks = speaks
        self.looks = 0

    @property
    def may_act(self) -> bool:
        self.looks += 1
        return self.looks > self.refusals

    @property
    def agent_ns(self) -> int:
        return self.looks if self.speaks else 0


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits, which take no time."""
    found: list[float] = []
    monkeypatch.setattr(signals.time, "sleep", found.append)
    return found


def wait_for(page: Page) -> None:
    signals.await_lease(cast("Any", page))


def test_it_goes_on_once_it_may(slept: list[float]) -> None:
    wait_for(Page(3))
    assert len(slept) == 3


def test_a_silent_agent_is_not_waited_for_for_good(slept: list[float]) -> None:
    with pytest.raises(JobStopped, match="has been silent for 600 s"):
        wait_for(Page(float("inf")))
    assert sum(slept) == pytest.approx(signals._SILENT_LIMIT_S, abs=0.1)


def test_an_agent_that_lives_and_has_nothing_to_lend_is_waited_for(slept: list[float]) -> None:
    """The job's own lease cannot be renewed, say."""
    looks = int(2 * signals._SILENT_LIMIT_S / signals._LOOK_EVERY_S)
    wait_for(Page(looks, speaks=True))
    assert sum(slept) > signals._SILENT_LIMIT_S


def test_what_the_check_says_comes_first(slept: list[float]) -> None:
    def check() -> None:
        raise JobStopped("the job is over")

    with pytest.raises(JobStopped, match="the job is over"):
        signals.await_lease(cast("Any", Page(1)), check)
    assert not slept
