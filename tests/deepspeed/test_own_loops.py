"""The warnings, once each, of a loop that the script owns; no test of a whole job shows them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from elaswave_plugin.adapters.deepspeed.engine.own_loops import OwnLoops
from tests.proofs import Kind, Promise, proves


@proves(Kind.WIDTH, Promise.NAMED)
@pytest.mark.parametrize(("batch", "says"), [(12, False), (8, True)])
def test_a_checkpoint_of_another_global_batch_is_told(
    capfd: pytest.CaptureFixture[str], batch: int, says: bool
) -> None:
    worker: Any = SimpleNamespace(owns_rank_0=True)
    OwnLoops(worker, torch.nn.Identity(), width=2).loaded(steps=5, samples=60, batch=batch)
    said = capfd.readouterr()
    text = "the checkpoint has 5 steps of 12 samples, and a step has 8 from now on: "
    assert (text in said.out + said.err) is says
    assert ("set in the configuration" in said.out + said.err) is says
