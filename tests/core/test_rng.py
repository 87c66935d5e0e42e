"""Draw keys separate every coordinate."""

from hypothesis import given
from hypothesis import strategies as st

from elaswave_plugin.core.step.rng import draw_key

COORDINATES = st.lists(st.integers(0, 1000), min_size=1, max_size=6)


@given(COORDINATES, COORDINATES)
def test_draw_key_differs_between_coordinates(left: list[int], right: list[int]) -> None:
    assert (draw_key(*left) == draw_key(*right)) == (left == right)


def test_draw_key_does_not_change_between_versions() -> None:
    """A changed key would change the draws of a job that is resumed from a checkpoint."""
    assert draw_key(1234, 10, 3, 2, 1, 0) == 1084935121285790862
    assert 0 <= draw_key(0) < 2**63
