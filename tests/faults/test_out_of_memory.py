"""A survivor that runs out of memory holds less then; where it cannot, the job ends once."""

from collections import Counter
from dataclasses import replace

import pytest

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, Outcome, check_equal
from tests.faults.hybrid_matrix import PP2_DP2, TP2_PP2_DP2
from tests.proofs import Kind, Promise, proves

SHORT = 1
# Torch's allocator finds no memory after a loss: in the step, or while state is taken over.
IN_STEP = """
import os, torch
import torch.distributed as dist
from megatron.core.transformer.transformer_layer import TransformerLayer as Layer
forward = Layer.forward
def within(self, *args, **kwargs):
    if os.environ["ELASWAVE_SLOT"] == "1" and dist.get_world_size() < 3:
        torch.empty(1 << 50, dtype=torch.uint8)
    return forward(self, *args, **kwargs)
Layer.forward = within
"""
IN_RECOVERY = """
import os, torch
import torch.distributed as dist
from elaswave_plugin.adapters.megatron.state.optimizer_state import FlatShard
recut = FlatShard.recut
def within(self, *args, **kwargs):
    if os.environ["ELASWAVE_SLOT"] == "1" and dist.get_world_size() < 3:
        torch.empty(1 << 50, dtype=torch.uint8)
    return recut(self, *args, **kwargs)
FlatShard.recut = within
"""
DP3 = JobSpec(nproc=3, global_batch=6, kills=("2@3:backward",))


def full(slots: tuple[int, ...], *, room: int) -> str:
    """Torch's allocator finds no memory for one more micro-batch in flight."""
    return f"""
import os, torch
from elaswave_plugin.adapters.megatron.step.ragged_pipeline import RaggedPipeline
forward = RaggedPipeline._forward
def within(self, *args):
    if int(os.environ["ELASWAVE_SLOT"]) in {slots} and len(self._held) >= {room}:
        torch.empty(1 << 50, dtype=torch.uint8)
    return forward(self, *args)
RaggedPipeline._forward = within
"""


def check_told(run: Outcome, *, times: dict[int, int]) -> None:
    """So often did these workers run out in step 3, each view is for that, and nobody was lost."""
    told = run.events("out_of_memory")
    assert Counter(one["slot"] for one in told) == times
    assert {one["step"] for one in told} == {3}
    _, lost, *again = run.events("view_committed")
    assert "worker 0 (node 0) exited: killed" in lost["reason"]
    assert {one["epoch"] for one in told} == {view["epoch"] for view in (lost, *again[:-1])}
    assert {view["reason"] for view in again} <= {one["evidence"] for one in told}
    assert all(view["ranks"] == lost["ranks"] for view in again)


def check_ended(run: Outcome) -> None:
    """One sentence, once; only who was killed was lost."""
    assert run.returncode == 1 and not run.orphans, run.output[-3000:]
    says = f"worker 1: out of memory in step 3, in a job of 2 workers ({1 << 50} bytes wanted, "
    assert run.output.count(says) == 1 and "Traceback" not in run.output
    assert "restart from the last checkpoint with 3 workers" in run.output
    assert [view["ranks"] for view in run.events("view_committed")] == [[0, 1, 2], [0, 1]]
    assert not run.events("out_of_memory") and not run.events("hang_found")


@proves(Kind.OUT_OF_MEMORY, Promise.EQUAL, victim="0", moment="3:backward")
@pytest.mark.parametrize(("room", "times"), [(3, 1), (2, 2)])
def test_the_survivor_of_a_stage_holds_fewer_samples(
    run: Launch, reference: Reference, room: int, times: int
) -> None:
    spec = replace(PP2_DP2, kills=("0@3:backward",))
    relieved = run(replace(spec, sabotage=full((SHORT,), room=room)))
    check_equal(relieved, reference(spec))
    check_told(relieved, times={SHORT: times})


@proves(Kind.OUT_OF_MEMORY, Promise.EQUAL, victim="0", moment="3:backward")
@pytest.mark.slow
def test_both_of_a_tp_group_run_out(run: Launch, reference: Reference) -> None:
    spec = replace(TP2_PP2_DP2, kills=("0@3:backward",))
    relieved = run(replace(spec, sabotage=full((2, 3), room=3)))
    check_equal(relieved, reference(spec))
    check_told(relieved, times={2: 1, 3: 1})


@proves(Kind.OUT_OF_MEMORY, Promise.STOPS, victim="2", moment="3:backward")
@pytest.mark.parametrize("sabotage", [IN_STEP, IN_RECOVERY], ids=["in the step", "in the recovery"])
def test_where_less_work_does_not_help_the_job_ends_once(run: Launch, sabotage: str) -> None:
    check_ended(run(replace(DP3, sabotage=sabotage)))
