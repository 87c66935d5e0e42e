"""The interval of seals: as short as keeps the waiting for them a small part of a step."""

import pytest

from elaswave_plugin.recovery.seal_interval import (
    LEAST_WAIT_S,
    MOST_STEPS,
    STEPS_TO_JUDGE,
    WAIT_SHARE,
    SealInterval,
)


def interval(wait_s: float, step_s: float, *, seals: int = STEPS_TO_JUDGE) -> int:
    """The interval after steps of which each has waited for a seal."""
    fit = SealInterval()
    for _ in range(seals):
        fit.note_wait(wait_s)
        fit.note_step(step_s + wait_s)
    return fit.wanted


def test_a_seal_that_fits_beside_the_steps_is_made_after_each() -> None:
    assert interval(0.0, 1.0) == interval(WAIT_SHARE * 0.99, 1.0) == 1
    assert interval(1.0, 1.0, seals=STEPS_TO_JUDGE - 1) == 1


@pytest.mark.parametrize("wait_s", [0.11, 0.2, 0.7])
def test_waiting_becomes_a_twentieth_of_all_steps_at_most(wait_s: float) -> None:
    steps = interval(wait_s, 1.0)
    assert wait_s / steps <= WAIT_SHARE < wait_s / (steps - 1)


def test_a_moment_is_no_reason_and_no_wait_leaves_a_job_without_seals() -> None:
    assert interval(LEAST_WAIT_S * 0.99, 0.01) == 1
    assert interval(100.0, 1.0) == MOST_STEPS


def test_waits_in_steps_that_were_all_interrupted_say_nothing() -> None:
    fit = SealInterval()
    for _ in range(STEPS_TO_JUDGE):
        fit.note_wait(0.2)
        fit.interrupt()
    assert fit.wanted == 1


def test_a_step_without_a_seal_counts_as_it_is_and_an_interrupted_one_not_at_all() -> None:
    fit = SealInterval()
    for _ in range(STEPS_TO_JUDGE):
        fit.note_wait(0.2)
        fit.note_step(1.2)
        fit.note_step(1.0)
        fit.note_wait(0.2)
        fit.interrupt()
    assert fit.wanted == 4
