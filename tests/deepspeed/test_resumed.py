"""The place at which a loop that the script owns begins in the data, in a job that is resumed."""

from typing import Any

import pytest

pytest.importorskip("deepspeed")

from elaswave_plugin.adapters.deepspeed.engine.loader import ElasticLoader, GlobalOrder
from elaswave_plugin.adapters.deepspeed.engine.resumed import Resumed
from elaswave_plugin.errors import ConfigurationError

# Six iterations of a pass, of three samples each; the checkpoint is in the second pass.
PASS, EACH, TRAINED = 18, 3, 30


class Script:
    """The first step of a script, and what it has in the ledger."""

    def __init__(self, *, reshuffles: bool = False) -> None:
        sizes: dict[str, Any] = {"num_replicas": EACH, "micro_batch_size": 1, "drop_last": False}
        order = GlobalOrder(PASS, shuffle=True, seed=1, reshuffles=reshuffles, **sizes)
        self.loader = ElasticLoader(None, [*range(PASS)], order, collate=list)  # type: ignore[arg-type]
        self.resumed = Resumed(TRAINED, speaks=True)
        self.ledger: list[tuple[list[int], int]] = []

    def consume(self, *, samples: list[int], trained: int) -> None:
        self.ledger.append((samples, trained))

    def read(self, count: int = 1, *, begins: bool = True) -> None:
        for _ in range(count):
            items = self.loader.items()
            share, _ = self.loader.read(items, (0, len(items)))
            self.resumed.passes_over()
            self.resumed.serve(self.loader, items, share.ids, self.consume, begins=begins)

    def use(self) -> list[int]:
        self.resumed.use()
        samples, trained = self.ledger[-1]
        assert trained == TRAINED
        return samples


def test_one_that_passes_over_what_was_trained_on_goes_on_without_a_word(
    capfd: pytest.CaptureFixture[str],
) -> None:
    script = Script()
    iter(script.loader)
    script.read(TRAINED % PASS // EACH + 1)
    assert not script.ledger
    assert script.use() == [30, 31, 32]
    script.read(begins=False)
    assert script.use() == [33, 34, 35]
    said = capfd.readouterr()
    assert not said.out + said.err
    with pytest.raises(ConfigurationError, match="passed over 4 batches"):
        script.resumed.check_redo(0)
    script.resumed.check_redo(1)


@pytest.mark.parametrize(("reshuffles", "passed"), [(False, 0), (True, 4)])
def test_one_that_begins_elsewhere_is_told_and_its_samples_are_repeated(
    capfd: pytest.CaptureFixture[str], reshuffles: bool, passed: int
) -> None:
    script = Script(reshuffles=reshuffles)
    iter(script.loader)
    script.read(passed + 1)
    first = passed * EACH
    assert script.use() == [first, first + 1, first + 2]
    said = capfd.readouterr()
    text = f"begins at batch {passed} of pass 0 of the training data"
    assert (said.out + said.err).count(text) == 1
    assert "wanted batch 4 of pass 1" in said.out + said.err
