"""Cuts cover every element once, for every width, and pieces rebuild one cut from another."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from elaswave_plugin.core.layout.shards import ShardCut, padded_size, pieces_for, reserved_size

BUCKETS = st.lists(st.integers(1, 5000), min_size=1, max_size=5).map(tuple)
WIDTHS = st.integers(1, 9)


@given(BUCKETS, WIDTHS)
def test_spans_cover_each_element_once(buckets: tuple[int, ...], width: int) -> None:
    cut = ShardCut(buckets=buckets, width=width)
    for bucket, length in enumerate(buckets):
        owned = sorted(
            (start, stop)
            for shard in range(width)
            for b, start, stop, _ in cut.spans(shard)
            if b == bucket
        )
        assert owned[0][0] == 0
        assert owned[-1][1] == length
        assert all(left[1] == right[0] for left, right in pairwise(owned))


@given(BUCKETS, WIDTHS, WIDTHS)
def test_pieces_carry_a_marked_state_to_the_new_cut(
    buckets: tuple[int, ...], width_before: int, width_after: int
) -> None:
    before = ShardCut(buckets=buckets, width=width_before)
    after = ShardCut(buckets=buckets, width=width_after)

    def marked(cut: ShardCut, shard: int) -> dict[int, tuple[int, int]]:
        return {
            offset + index: (bucket, start + index)
            for bucket, start, stop, offset in cut.spans(shard)
            for index in range(stop - start)
        }

    for target in range(width_after):
        built = {}
        for piece in pieces_for(target=target, before=before, after=after):
            source = marked(before, piece.source)
            for index in range(piece.stop - piece.start):
                built[piece.target_offset + index] = source[piece.source_offset + index]
        assert built == marked(after, target)


@given(st.integers(1, 10_000), WIDTHS)
def test_reserved_size_fits_every_smaller_width(length: int, max_width: int) -> None:
    room = reserved_size(length, max_width)
    assert room < length + max_width * 128
    for width in range(1, max_width + 1):
        assert length <= padded_size(length, width) <= room
        assert padded_size(length, width) % (width * 128) == 0
