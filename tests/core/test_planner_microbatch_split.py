"""Every sample once at every stage, level loads, whole pipelines where widths agree."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_plugin.core.planner.microbatch_split import (
    MicrobatchSplit,
    redeal,
    reroute,
    resize,
)
from elaswave_plugin.core.step.schedule import Piece
from elaswave_plugin.errors import ConfigurationError

QUICK = settings(derandomize=True, max_examples=200, deadline=None)


@st.composite
def losses(draw: st.DrawFn) -> tuple[list[list[int]], int, int, int]:
    """Live replicas by stage, launch width, micro-batches, samples of a micro-batch."""
    dp = draw(st.integers(1, 7))
    live = st.lists(st.integers(0, dp - 1), min_size=1, unique=True).map(sorted)
    replicas = draw(st.lists(live, min_size=1, max_size=5))
    return replicas, dp, draw(st.integers(1, 40)), draw(st.integers(1, 5))


def splits_of(case: tuple[list[list[int]], int, int, int], width: int) -> list[MicrobatchSplit]:
    replicas, dp, count, size = case
    widths = [len(live) for live in replicas]
    return [
        redeal(widths=widths, num_microbatches=count, microbatch_size=size, slot_width=width),
        reroute(replicas=replicas, launch_width=dp, num_microbatches=count, microbatch_size=size),
        resize(widths=widths, launch_width=dp, num_microbatches=count, microbatch_size=size),
    ]


@QUICK
@given(losses(), st.integers(1, 9))
def test_every_sample_is_computed_once_at_every_stage(
    case: tuple[list[list[int]], int, int, int], width: int
) -> None:
    """So the global batch is unchanged, and with sums of gradients so is their scale."""
    _, _, count, size = case
    for split in splits_of(case, width):
        for workers in split.assignment():
            pieces = sorted(piece for own in workers for piece in own)
            covered = [sample for _, start, stop in pieces for sample in range(start, stop)]
            assert covered == list(range(count * size))
            assert [slot for slot, _, _ in pieces] == sorted(slot for slot, _, _ in pieces)
            if split.policy != "resize":
                assert all(
                    (start, stop - start) == (start // size * size, size)
                    for _, start, stop in pieces
                )


@QUICK
@given(losses(), st.integers(1, 9))
def test_slots_hold_the_same_samples_at_every_stage(
    case: tuple[list[list[int]], int, int, int], width: int
) -> None:
    for split in splits_of(case, width):
        first = split.stages[0]
        for stage in split.stages:
            assert np.array_equal(stage.cuts[stage.first], first.cuts[first.first])


@QUICK
@given(losses(), st.integers(1, 9))
def test_loads_are_level(case: tuple[list[list[int]], int, int, int], width: int) -> None:
    replicas, dp, _, size = case
    dealt, rerouted, resized = splits_of(case, width)
    for stage in range(len(replicas)):
        load = dealt.stages[stage].samples().sum(0)
        assert load.max() - load.min() <= size
        load = resized.stages[stage].samples().sum(0)
        assert load.max() - load.min() <= 1
        in_slot = dealt.stages[stage].samples()
        assert (in_slot.max(1) - in_slot.min(1) <= size).all()
        # Rerouting: what a live replica had plus an equal share of what the lost ones had.
        own = [len(range(replica, case[2], dp)) for replica in replicas[stage]]
        extra = rerouted.stages[stage].samples().sum(0) // size - own
        assert extra.max() - extra.min() <= 1 and extra.min() >= 0


@QUICK
@given(losses())
def test_rerouting_leaves_live_replicas_their_own(
    case: tuple[list[list[int]], int, int, int],
) -> None:
    replicas, dp, count, size = case
    rerouted = splits_of(case, 1)[1].assignment()
    for live, workers in zip(replicas, rerouted, strict=True):
        for replica, pieces in zip(live, workers, strict=True):
            own = {k for _, start, _ in pieces for k in [start // size]}
            assert set(range(replica, count, dp)) <= own


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("dp", [3, 4, 12])
def test_losses_in_different_replicas_re_form_whole_pipelines(stages: int, dp: int) -> None:
    """One lost worker a stage, whoever it was: each micro-batch stays on one column."""
    split = redeal(
        widths=[dp - 1] * stages,
        num_microbatches=16 * dp,
        microbatch_size=1,
        slot_width=dp - 1,
    )
    first = split.stages[0].worker
    assert all(np.array_equal(stage.worker, first) for stage in split.stages)
    assert list(first[: dp - 1]) == list(range(dp - 1))


def partners(split: MicrobatchSplit, stage: int) -> int:
    """The most workers of the next stage that a worker sends to."""
    pairs = set(zip(split.stages[stage].worker, split.stages[stage + 1].worker, strict=True))
    return max(
        sum(source == worker for source, _ in pairs) for worker in {source for source, _ in pairs}
    )


def test_dealing_keeps_the_circle_of_partners_small() -> None:
    dealt = redeal(widths=(12, 11), num_microbatches=192, microbatch_size=1, slot_width=11)
    replicas = [range(12), range(1, 12)]
    routed = reroute(replicas=replicas, launch_width=12, num_microbatches=192, microbatch_size=1)
    assert partners(dealt, 0) <= 3
    assert partners(routed, 0) == 11, "the lost column fans out to all peers"


def texts(split: MicrobatchSplit) -> tuple[str, ...]:
    """A stage each: the sample intervals of its workers."""
    return tuple(
        " | ".join(" ".join(f"{one.start}-{one.stop}" for one in pieces) for pieces in stage)
        for stage in split.assignment()
    )


def test_what_the_policies_make_of_one_loss() -> None:
    dealt = redeal(widths=(3, 2), num_microbatches=6, microbatch_size=2, slot_width=3)
    routed = reroute(
        replicas=[[0, 1, 2], [0, 2]], launch_width=3, num_microbatches=6, microbatch_size=2
    )
    for whole in (dealt, routed):
        assert texts(whole) == ("0-2 6-8 | 2-4 8-10 | 4-6 10-12", "0-2 2-4 6-8 | 4-6 8-10 10-12")
    cut = resize(widths=(3, 2), launch_width=3, num_microbatches=6, microbatch_size=3)
    assert texts(cut) == ("0-3 9-12 | 3-6 12-15 | 6-9 15-18", "0-5 9-13 | 5-9 13-18")
    assert [str(split) for split in (dealt, routed, cut)] == [
        "redeal, 3 micro-batches a slot",
        "reroute",
        "resize",
    ]


def test_the_pieces_of_one_worker_are_those_of_the_assignment() -> None:
    split = redeal(widths=(3, 2), num_microbatches=11, microbatch_size=2, slot_width=3)
    for stage, workers in enumerate(split.assignment()):
        for worker, pieces in enumerate(workers):
            assert split.pieces(stage, worker) == pieces
    assert split.pieces(1, 0)[0] == Piece(0, 0, 2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: redeal(widths=(1, 0), num_microbatches=1, microbatch_size=1, slot_width=1),
            "stage widths are 1 0, wanted at least one worker in each",
        ),
        (
            lambda: redeal(widths=(1,), num_microbatches=0, microbatch_size=1, slot_width=1),
            "0 micro-batches of 1 samples",
        ),
        (
            lambda: redeal(widths=(1,), num_microbatches=1, microbatch_size=1, slot_width=0),
            "slot width is 0, wanted 1 or more",
        ),
    ],
)
def test_bad_input_is_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        call()
