"""A bound on time fails on an idle machine, and is a warning on a busy one."""

import time

import pytest

from tests import idle


@pytest.mark.parametrize("busy", [0.0, 0.9])
def test_what_is_late_fails_unless_the_machine_is_busy(
    monkeypatch: pytest.MonkeyPatch, busy: float
) -> None:
    monkeypatch.setattr(idle, "waited_s", lambda: busy * time.monotonic())
    with idle.within(10.0):
        pass
    late = pytest.warns(UserWarning, match="took") if busy else pytest.raises(AssertionError)
    with late as told, idle.within(0.01):
        time.sleep(0.02)
    text = str(told[0].message if busy else told.value)
    assert text.startswith("took 0.0") and f"{busy:.0%} of the time" in text


def test_the_machine_says_how_long_something_has_waited() -> None:
    before = idle.waited_s()
    assert 0 <= idle.waited_s() - before < 10
