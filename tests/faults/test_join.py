"""A lost worker comes back: it builds beside the training and enters between two steps."""

from dataclasses import replace

import pytest

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, Outcome, check_equal

# Long enough that who is started again is back well before the end.
LONG = JobSpec(steps=80, dump="last", respawn=10)


def entered(run: Outcome) -> list[tuple[int, int]]:
    """Who came back, as (slot, incarnation), in order."""
    return [(event["slot"], event["incarnation"]) for event in run.events("entered")]


def last_ranks(run: Outcome) -> list[int]:
    """The slots of the last view."""
    ranks: list[int] = run.events("view_committed")[-1]["ranks"]
    return ranks


@pytest.mark.parametrize("slot", range(4))
def test_a_lost_worker_comes_back(run: Launch, reference: Reference, slot: int) -> None:
    spec = replace(LONG, kills=(f"{slot}@3:backward",))
    survived = run(spec)
    check_equal(survived, reference(spec))
    assert entered(survived) == [(slot, 1)]
    assert last_ranks(survived) == [0, 1, 2, 3]
