"""A trainer waits until it may act, and not for good where its agent stays silent."""

from typing import Any, cast

import pytest

from elaswave_plugin.errors import JobStopped
from elaswave_plugin.trainer import lease


class Page:
    """A progress page whose owner may act from some look on."""

    def __init__(self, refusals: float) -> None:
        self.refusals = refusals
        self.looks = 0

    @property
    def may_act(self) -> bool:
        self.looks += 1
        return self.looks > self.refusals


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits, which take no time."""
    found: list[float] = []
    monkeypatch.setattr(lease.time, "sleep", found.append)
    return found


def wait_for(page: Page) -> None:
    lease.await_lease(cast("Any", page))


def test_it_goes_on_once_it_may(slept: list[float]) -> None:
    wait_for(Page(3))
    assert len(slept) == 3


def test_a_silent_agent_is_not_waited_for_for_good(slept: list[float]) -> None:
    with pytest.raises(JobStopped, match="has been silent for 600 s"):
        wait_for(Page(float("inf")))
    assert sum(slept) == pytest.approx(lease._SILENT_LIMIT_S, abs=0.1)


def test_what_the_check_says_comes_first(slept: list[float]) -> None:
    def check() -> None:
        raise JobStopped("the job is over")

    with pytest.raises(JobStopped, match="the job is over"):
        lease.await_lease(cast("Any", Page(1)), check)
    assert not slept
