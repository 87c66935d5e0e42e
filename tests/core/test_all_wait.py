"""The worker that all wait for is found once no other works, and named at growing intervals."""

from typing import Any

import pytest

from elaswave_plugin.core.agreement.hang import (
    COMMIT,
    NOBODY,
    STEADY_S,
    AllWait,
    Said,
    Sample,
    all_wait,
)


def page(slot: int, stalled_s: float, waits_for: int = NOBODY, **more: Any) -> Sample:
    fields = {"epoch": 1, "step": 0, "phase": "between steps", "operations": 1, "limit_s": 600.0}
    return Sample(
        slot=slot, incarnation=0, stalled_s=stalled_s, waits_for=waits_for, **{**fields, **more}
    )


def found(*pages: Sample, workers: int = 4) -> AllWait | None:
    return all_wait(range(workers), {one.slot: one for one in pages})


@pytest.mark.parametrize(
    ("waits", "late"),
    [
        # In a collective for one that stands still, or is at work; along a pipeline; for the first
        # view, where two have not attached.
        ((page(0, 20.0), page(1, 11.0, 0), page(2, 12.0, 0), page(3, 13.0, 0)), (0,)),
        ((page(1, 11.0, 0), page(2, 12.0, 0), page(3, 13.0, 0)), (0,)),
        ((page(1, 11.0, 0), page(2, 12.0, 1), page(3, 13.0, 2)), (0,)),
        ((page(0, 11.0, COMMIT), page(2, 12.0, COMMIT)), (1, 3)),
    ],
)
def test_all_wait_for_whoever_keeps_them_waiting(
    waits: tuple[Sample, ...], late: tuple[int, ...]
) -> None:
    assert found(*waits) == AllWait(late=late, waited_s=11.0)


def test_nobody_is_named_while_somebody_else_works_or_it_is_early() -> None:
    assert found(page(1, 11.0, 0), page(2, 12.0, 0)) is None
    early = found(page(1, 9.9, 0), page(2, 12.0, 0), page(3, 13.0, 0))
    assert not is_due(early) and is_due(AllWait(late=(0,), waited_s=10.0))
    assert found(page(0, 60.0), page(1, 60.0), page(2, 60.0), page(3, 60.0)) is None
    assert found(page(0, 60.0), workers=1) is None


def test_a_phase_may_take_what_it_usually_does() -> None:
    """A third of its limit, which is three times its median."""
    waits = page(1, 25.0, 0), page(2, 26.0, 0), page(3, 27.0, 0)
    assert not is_due(found(page(0, 28.0, limit_s=90.0), *waits))
    assert is_due(found(page(0, 28.0, limit_s=60.0), *waits))


def is_due(found: AllWait | None) -> bool:
    """Return whether it is said once it has been so for a while."""
    said = Said()
    return not said.is_due(found, 0.0) and said.is_due(found, STEADY_S)


def test_it_is_said_again_after_three_times_as_long_or_of_another_one() -> None:
    said = Said()
    times = [
        waited_s
        for waited_s in range(400)
        if said.is_due(AllWait(late=(1,), waited_s=float(waited_s)), float(waited_s))
    ]
    assert times == [10, 30, 90, 270]
    assert not said.is_due(AllWait(late=(2,), waited_s=11.0), 400.0)
    assert said.is_due(AllWait(late=(2,), waited_s=13.0), 402.0)
    assert not said.is_due(None, 403.0)


def test_who_is_late_for_a_moment_only_is_not_named() -> None:
    """All go on: one has not been given a processor yet, and seems to wait for the others."""
    said = Said()
    for now_s in range(20):
        said.is_due(AllWait(late=(1, 2), waited_s=float(now_s)), float(now_s))
    # Fewer are late: of them it is known.
    assert said.is_due(AllWait(late=(1,), waited_s=20.0), 20.0)
    assert not said.is_due(AllWait(late=(0, 1), waited_s=21.0), 21.0)
    assert not said.is_due(None, 22.0)
