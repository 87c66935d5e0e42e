"""The messages between two stages: every row once, from its producer to its consumer."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_plugin.core.step.dataflow import Rows, Samples, crossings

Stage = list[list[tuple[int, int]]]


@st.composite
def stages(draw: st.DrawFn, num_samples: int) -> Stage:
    """The samples [0, n) cut anywhere, and each interval given to any worker."""
    inner = draw(st.sets(st.integers(1, num_samples - 1))) if num_samples > 1 else set()
    cuts = sorted({0, num_samples, *inner})
    width = draw(st.integers(1, 4))
    stage: Stage = [[] for _ in range(width)]
    for start, stop in pairwise(cuts):
        stage[draw(st.integers(0, width - 1))].append((start, stop))
    return stage


def runner(stage: Stage, sample: int) -> int:
    (worker,) = [
        order for order, mine in enumerate(stage) for low, high in mine if low <= sample < high
    ]
    return worker


@given(st.data(), st.integers(1, 24))
def test_every_row_goes_once_from_who_has_it_to_who_needs_it(
    data: st.DataObject, num_samples: int
) -> None:
    upstream, downstream = data.draw(stages(num_samples)), data.draw(stages(num_samples))
    passing = crossings(upstream, downstream)
    rows = [(k, one.sender, one.receiver) for one in passing for k in range(one.start, one.stop)]
    assert rows == [(k, runner(upstream, k), runner(downstream, k)) for k in range(num_samples)]
    # No message crosses a cut of either side, and none could be joined with the next one.
    cuts = {
        bound for stage in (upstream, downstream) for mine in stage for one in mine for bound in one
    }
    assert [one.start for one in passing] == sorted(cuts)[:-1]


@given(st.data(), st.integers(1, 24))
def test_gradients_go_the_same_way_back(data: st.DataObject, num_samples: int) -> None:
    upstream, downstream = data.draw(stages(num_samples)), data.draw(stages(num_samples))
    there = crossings(upstream, downstream)
    back = [(one.start, one.stop, one.receiver, one.sender) for one in there]
    assert [tuple(one) for one in crossings(downstream, upstream)] == back


def test_samples_that_both_stages_leave_out_pass_nowhere() -> None:
    passing = crossings([[(0, 1), (4, 5)], [(1, 2)]], [[(0, 1)], [(1, 2), (4, 5)]])
    assert [tuple(one) for one in passing] == [(0, 1, 0, 0), (1, 2, 1, 1), (4, 5, 0, 1)]


@pytest.mark.parametrize(
    ("upstream", "downstream"),
    [
        ([[(0, 2)]], [[(0, 3)]]),
        ([[(0, 3)]], [[(0, 2)]]),
        ([[(0, 2)], [(1, 3)]], [[(0, 3)]]),
        ([[(0, 1)], [(2, 3)]], [[(0, 3)]]),
        ([[(1, 3)]], [[(0, 2)]]),
        ([[(1, 3)]], [[(0, 3)]]),
        ([[(0, 3)]], [[]]),
    ],
    ids=["more below", "more above", "twice", "a gap", "shifted", "begun later", "nothing"],
)
def test_stages_that_run_different_samples_are_refused(upstream: Stage, downstream: Stage) -> None:
    with pytest.raises(ValueError, match="sample"):
        crossings(upstream, downstream)


@given(st.integers(0, 40), st.integers(1, 12), st.integers(1, 5))
def test_rows_are_where_samples_lie_in_their_micro_batches(
    start: int, length: int, size: int
) -> None:
    rows = Samples(start, start + length).rows(size=size)
    found = [row.microbatch * size + at for row in rows for at in range(row.start, row.stop)]
    assert found == list(range(start, start + length))
    assert all(0 <= row.start < row.stop <= size for row in rows)
    assert Samples.of(3, size=size).rows(size=size) == (Rows(3, 0, size),)
