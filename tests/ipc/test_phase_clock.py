"""The limits of phases on a progress page, from the steps and passes so far."""

import time
from collections.abc import Iterator

import pytest

from elaswave_plugin.core.agreement.hang import Sample
from elaswave_plugin.core.agreement.limits import (
    ANNOUNCED_LIMIT_S,
    EVALUATION,
    SAVE,
    SAVE_LIMIT_S,
    START_LIMIT_S,
    STEPS_FOR_A_MEDIAN,
    UNKNOWN_LIMIT_S,
)
from elaswave_plugin.ipc.progress_page import BETWEEN_STEPS, PhaseClock, ProgressPage
from tests.idle import Clock

FLOOR_S, RECOVERY_S = 1.5, 90.0


@pytest.fixture
def page() -> Iterator[ProgressPage]:
    """Memory of this process alone."""
    page = ProgressPage()
    yield page
    page.close()


@pytest.fixture
def clock(page: ProgressPage) -> PhaseClock:
    return PhaseClock(page, floor_s=FLOOR_S, recovery_s=RECOVERY_S)


def read(page: ProgressPage, *, worked_s: float = 0.0) -> Sample:
    sample = page.sample(slot=3, worked_s=worked_s)
    assert sample is not None
    return sample


def place(page: ProgressPage) -> tuple[str, float]:
    """The phase and its limit."""
    return read(page).phase, read(page).limit_s


def test_a_phase_gets_its_limit_after_three_steps(page: ProgressPage, clock: PhaseClock) -> None:
    for _ in range(STEPS_FOR_A_MEDIAN):
        clock.enter("forward")
        assert place(page) == ("forward", START_LIMIT_S)
        clock.step_over()
        assert place(page) == (BETWEEN_STEPS, UNKNOWN_LIMIT_S)
    clock.enter("forward")
    assert place(page) == ("forward", FLOOR_S)
    clock.recover("agree")
    assert place(page) == ("agree", RECOVERY_S)


def test_the_limit_of_the_first_steps_is_the_users(page: ProgressPage) -> None:
    PhaseClock(page, floor_s=FLOOR_S, recovery_s=RECOVERY_S, start_s=7.0).enter("forward")
    assert place(page) == ("forward", 7.0)
    PhaseClock(page, floor_s=9.0, recovery_s=RECOVERY_S, start_s=7.0).enter("forward")
    assert place(page) == ("forward", 9.0)


def test_what_happens_in_an_evaluation_is_no_measure_of_a_step(
    page: ProgressPage, clock: PhaseClock
) -> None:
    for _ in range(STEPS_FOR_A_MEDIAN):
        clock.enter("forward")
        clock.step_over()
    page.announce(EVALUATION)
    clock.outside(EVALUATION)
    clock.enter("forward")
    assert place(page) == (EVALUATION, START_LIMIT_S)
    page.end_announced()
    clock.outside(BETWEEN_STEPS)
    assert place(page) == (BETWEEN_STEPS, UNKNOWN_LIMIT_S)


@pytest.mark.parametrize("is_announced", [True, False], ids=["announced", "of the script's own"])
def test_the_passes_of_an_evaluation_have_a_limit_of_their_own(
    page: ProgressPage, clock: PhaseClock, is_announced: bool
) -> None:
    """The work beside the passes may be anything, if nobody announced an evaluation."""
    around_s = START_LIMIT_S if is_announced else UNKNOWN_LIMIT_S
    if is_announced:
        page.announce(EVALUATION)
        clock.outside(EVALUATION)
    else:
        clock.outside(BETWEEN_STEPS)
    for _ in range(STEPS_FOR_A_MEDIAN):
        assert read(page).limit_s == around_s
        clock.begin_pass()
        assert read(page).limit_s == START_LIMIT_S
        clock.end_pass()
    clock.begin_pass()
    assert place(page) == (EVALUATION if is_announced else "forward", FLOOR_S)
    clock.end_pass()
    assert read(page).limit_s == around_s


def test_a_pass_in_a_step_is_a_phase_of_the_step(page: ProgressPage, clock: PhaseClock) -> None:
    clock.enter("data")
    clock.begin_pass()
    clock.end_pass()
    assert read(page).phase == "data"


def test_a_save_may_go_on_for_as_long_as_it_works(
    page: ProgressPage, clock: PhaseClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`worked_s`: the seconds since its last word in which it was seen at work."""
    page.announce(SAVE)
    clock.outside(SAVE)
    hours_s = 2 * ANNOUNCED_LIMIT_S
    # The clock begins at 0 with the machine, which may have started a minute ago.
    now, now_ns = time.monotonic, time.monotonic_ns
    monkeypatch.setattr(time, "monotonic", lambda: now() + hours_s)
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns() + int(hours_s * 1e9))
    assert read(page).limit_s == SAVE_LIMIT_S
    assert read(page).stalled_s == pytest.approx(hours_s, abs=1.0)
    # It is the largest limit of all announced work that ends it.
    assert read(page, worked_s=hours_s).stalled_s == pytest.approx(
        hours_s - (ANNOUNCED_LIMIT_S - SAVE_LIMIT_S), abs=1.0
    )
    measured = Clock()
    page.touch()
    measured.check(read(page, worked_s=0.0).stalled_s, 1.0)


def test_a_compilation_may_take_long_in_any_phase(page: ProgressPage, clock: PhaseClock) -> None:
    clock.enter("forward")
    page.set_compiles(True)
    assert place(page) == ("compilation", ANNOUNCED_LIMIT_S)
    page.set_compiles(False)
    assert place(page) == ("forward", START_LIMIT_S)


def test_a_phase_costs_microseconds(page: ProgressPage, clock: PhaseClock) -> None:
    """The best of several rounds: the machine is shared, and the work is always the same."""
    best_s, measured = float("inf"), Clock()
    for _ in range(20):
        started_s = time.perf_counter()
        for _ in range(500):
            clock.enter("forward")
            clock.enter("backward")
        best_s = min(best_s, (time.perf_counter() - started_s) / 1000)
    measured.check(best_s, 20e-6)
