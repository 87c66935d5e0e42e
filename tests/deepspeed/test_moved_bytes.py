"""Of a survivor's new state, only what it did not have is fetched."""

import runpy
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from elaswave_plugin.snapshot.snapshot_pool import CHUNK_BYTES
from tests.deepspeed.conftest import Launch
from tests.deepspeed.harness import EXAMPLE, EngineSpec
from tests.faults.harness import check_survived
from tests.proofs import Kind, Promise, proves

WORKERS, VICTIM, HIDDEN = 4, 1, 512
# Master and two moments in float32.
ELEMENT_BYTES = 12
OPTIONS = ("--hidden-size", str(HIDDEN), "--num-layers", "2", "--num-attention-heads", "4")


def elements_of_the_model() -> int:
    """The parameters of the example's model at that size."""
    names = runpy.run_path(str(EXAMPLE))
    options = SimpleNamespace(
        seq_length=32, hidden_size=HIDDEN, num_layers=2, num_attention_heads=4, dropout=0.0
    )
    return sum(one.numel() for one in names["GPT"](options).parameters())


def elements_to_fetch(total: int, survivors: Sequence[int]) -> dict[int, int]:
    """By survivor, in rank order: the elements of its third that were not in its quarter."""
    found = {}
    for rank, slot in enumerate(survivors):
        old = range(slot * total // WORKERS, (slot + 1) * total // WORKERS)
        new = range(rank * total // len(survivors), (rank + 1) * total // len(survivors))
        kept = max(0, min(old.stop, new.stop) - max(old.start, new.start))
        found[slot] = len(new) - kept
    return found


@proves(Kind.KILL, Promise.GOES_ON, victim="1", moment="2:backward")
# Any stage reads each byte once: proved in one process (adapters/test_verbs_deepspeed.py).
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_survivor_fetches_what_changed_its_owner(run: Launch, stage: int) -> None:
    spec = EngineSpec(stage=stage, steps=4, kills=(f"{VICTIM}@2:backward",), options=OPTIONS)
    killed = run(spec)
    check_survived(killed)
    fetched = {one["slot"]: one["fetched_bytes"] for one in killed.events("recovered")}
    total = elements_of_the_model()
    ranks = killed.events("view_committed")[-1]["ranks"]
    assert ranks == [slot for slot in range(WORKERS) if slot != VICTIM]
    for slot, elements in elements_to_fetch(total, ranks).items():
        wanted = ELEMENT_BYTES * elements
        # Whole chunks are read, of three parts of two neighbours at most.
        assert wanted <= fetched[slot] <= wanted + 12 * CHUNK_BYTES, (slot, wanted, fetched)
    # A third of it; in another order of the ranks it would be two thirds.
    assert sum(fetched.values()) < 0.5 * ELEMENT_BYTES * total
