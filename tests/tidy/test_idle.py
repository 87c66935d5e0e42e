"""A bound on time fails on an idle machine, and is a warning on a busy one."""

import subprocess
import sys
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


@pytest.mark.parametrize(
    ("busy", "left_s"),
    [(0.0, [10, 6, 2, 0]), (0.5, [10, 8, 6, 4, 2, 0]), (1.0, [10] * 11 + [6, 2, 0])],
)
def test_time_in_which_something_waited_for_a_processor_does_not_count(
    busy: float, left_s: list[int]
) -> None:
    now = [0.0]
    deadline = idle.Deadline(10.0, lambda: 100 + now[0], lambda: 7 + busy * now[0])
    found = []
    while len(found) < len(left_s):
        found.append(deadline.left_s())
        now[0] += 4.0
    assert found == left_s


def test_what_hangs_on_this_machine_is_ended() -> None:
    """The machine may be busy: then after five times as long."""
    clock, deadline = idle.Clock(), idle.Deadline(0.2)
    while deadline.left_s():
        assert time.monotonic() - clock.began_s < idle.MOST
    assert time.monotonic() - clock.began_s >= 0.2


def test_a_command_that_hangs_is_ended() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        idle.completed([sys.executable, "-c", "import time; time.sleep(60)"], 0.5)
    done = idle.completed([sys.executable, "-c", "print(1); import sys; sys.exit(3)"], 20)
    assert (done.returncode, done.stdout, done.stderr) == (3, "1\n", "")
