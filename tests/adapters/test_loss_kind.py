"""The mean over fewer workers is that over all, whatever a Trainer's loss divides by."""

from itertools import product

import pytest

pytest.importorskip("accelerate")

from elaswave_plugin.adapters.deepspeed.hf_trainer.loss_kind import LossKind

LOSSES = (0.5, 2.0, 3.0, 1.0, 4.0, 0.25, 6.0, 1.5)
LAUNCHED = 4


def mean(kind: LossKind, shares: tuple[int, ...]) -> float:
    """The mean over workers of what each would hand to backward, of ``shares`` of the samples."""
    live, total, first = len(shares), 0.0, 0
    for number in shares:
        own = sum(LOSSES[first : first + number])
        loss = own / len(LOSSES) if kind.sums_items else own / number
        loss *= live if kind.times_processes else 1
        total += loss * kind.weight(number * live / len(LOSSES), launched=LAUNCHED, live=live)
        first += number
    return total / live


@pytest.mark.parametrize("kind", [LossKind(*both) for both in product((False, True), repeat=2)])
def test_unequal_shares_weigh_as_the_equal_ones_of_the_launch(kind: LossKind) -> None:
    launched = mean(kind, (2, 2, 2, 2))
    assert mean(kind, (3, 3, 2)) == pytest.approx(launched)
    assert mean(kind, (8,)) == pytest.approx(launched)
    assert launched > 0
