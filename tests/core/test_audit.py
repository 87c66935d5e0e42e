"""Samples lost or repeated, counted from made-up lines of steps and a ledger."""

from typing import Any

from elaswave_plugin.core.step.audit import batch_sizes, counting_views, lost_and_repeated

BATCH = 4


def job(first: int, last: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Two workers, two samples each in every step, in view 1."""
    steps = [{"step": step, "epoch": 1} for step in range(first, last + 1) for _ in range(2)]
    ledger = [
        {"step": step, "epoch": 1, "samples": [BATCH * step + 2 * k, BATCH * step + 2 * k + 1]}
        for step in range(first, last + 1)
        for k in range(2)
    ]
    return steps, ledger


def counted(steps: list[dict[str, Any]], ledger: list[dict[str, Any]]) -> tuple[int, int]:
    """Count what is lost and repeated, with the sizes that the ledger shows."""
    views = counting_views(steps)
    sizes = batch_sizes(views, ledger, 1 + max(views))
    return lost_and_repeated(views, ledger, batches=sizes)


def test_nothing_is_lost_where_each_sample_comes_once() -> None:
    assert counted(*job(0, 5)) == (0, 0)


def test_a_job_that_begins_with_a_checkpoint_has_not_lost_what_came_before() -> None:
    steps, ledger = job(100, 103)
    assert counted(steps, ledger) == (0, 0)
    del ledger[2]  # of step 101
    assert counted(steps, ledger) == (2, 0)


def test_an_attempt_that_was_interrupted_does_not_count() -> None:
    steps, ledger = job(0, 3)
    again = [{**line, "epoch": 2} for line in ledger if line["step"] == 3]
    assert counted([*steps[:-2], {"step": 3, "epoch": 2}], [*ledger, *again]) == (0, 0)


def test_steps_that_skip_samples_or_repeat_them_are_found() -> None:
    steps, ledger = job(0, 3)
    skipped = [{**line, "samples": [one + 3 * BATCH for one in line["samples"]]} for line in ledger]
    assert counted(steps, [*ledger[:2], *skipped[2:]]) == (3 * BATCH, 0)
    repeated = [{**line, "samples": ledger[0]["samples"]} for line in ledger[:2]]
    assert counted(steps, [*repeated, *ledger[2:]]) == (2, 2)
    assert counted(steps, ledger[2:]) == (BATCH, 0), "of step 0"


def test_samples_of_the_steps_before_a_checkpoint_that_come_again_are_repeated() -> None:
    """The steps of a job that is resumed may be counted from 0, and its samples not from there."""
    steps, ledger = job(0, 3)

    def told(trained: int, first: int) -> list[dict[str, Any]]:
        lines = [{**line, "samples": [first + one for one in line["samples"]]} for line in ledger]
        return [{**line, "trained": trained} for line in lines[:2]] + lines[2:]

    assert counted(steps, told(20, 20)) == (0, 0)
    assert counted(steps, told(20, 12)) == (0, 8)
    assert counted(steps, told(100, 0)) == (0, 4 * BATCH)
    assert counted(steps, told(20, 24)) == (4, 0)
