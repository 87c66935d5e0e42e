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


@proves(Kind.WIDTH, Promise.NAMED)
@pytest.mark.parametrize(("absorbs", "owns_rank_0"), [(False, True), (False, False), (True, True)])
def test_a_collective_outside_of_the_engine_is_told_once(
    capfd: pytest.CaptureFixture[str], absorbs: bool, owns_rank_0: bool
) -> None:
    """The line is told at its first call, where it is not made again and rank 0 runs it."""
    links = SimpleNamespace(asked=None)
    worker: Any = SimpleNamespace(owns_rank_0=owns_rank_0, links=links)
    loops = OwnLoops(worker, torch.nn.Identity(), width=2, absorbs=lambda: absorbs)
    links.asked = loops.asks

    # As functions of torch.distributed and DeepSpeed, which call a group, are for a script.
    def native(body: str, module: str, **names: Any) -> Any:
        there: dict[str, Any] = {"__name__": module, **names}
        exec(body, there)
        return there

    torchs = native("def barrier(): asked()", "torch.distributed", asked=links.asked)
    engine = native("def step(hook): hook()", "deepspeed.runtime.engine")
    for _ in range(2):
        torchs["barrier"]()
    engine["step"](torchs["barrier"])
    engine["step"](lambda: torchs["barrier"]())
    said = capfd.readouterr().err
    told = said.count("test_own_loops.py:") == said.count("(barrier) calls the other workers") == 1
    assert told is (owns_rank_0 and not absorbs), said
