"""After a loss ZeRO-3 fetches in the redone step as in the others, if all know the order."""

import json
from dataclasses import replace
from pathlib import Path

from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import FP32_BOUND, SCRIPTS, EngineSpec, check_recovered
from tests.faults.harness import ROOT, check_survived, max_relative_difference
from tests.proofs import Kind, Promise, proves

COUNTING = """
import sys; sys.path.append({root!r})
from tests.deepspeed.count_fetches import count; count({folder!r})
"""
# One worker is lost when it has completed the order, and another is interrupted just before that.
ONE_IS_LATE = """
import time
from deepspeed.runtime.zero import partitioned_param_coordinator as coordinators
from elaswave_plugin.adapters.deepspeed.engine.job import EngineJob
attached, compare, compared, jobs = (
    EngineJob._attached, coordinators.assert_ints_same_as_other_ranks, [], []
)
def keep(self):
    jobs.append(self)
    attached(self)
def late(ints):
    compare(ints)
    compared.append(ints)
    # Of an empty record before the first pass; of modules, parameters and places after it.
    if len(compared) != 4:
        return
    worker = jobs[0]._worker
    worker.phases.fire("forward")
    if worker.slot == 2:
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            worker.member.check()
            time.sleep(0.001)
        raise TimeoutError("nobody was lost within 60 s")
EngineJob._attached, coordinators.assert_ints_same_as_other_ranks = keep, late
# The passes that ask for the kind of the loss compare their orders, too.
from elaswave_plugin.adapters.deepspeed.engine.own_loss import OwnLoss
OwnLoss._learn = lambda *_: None
"""
# In the first pass with a complete order a worker is lost between two modules, when one survivor
# has found out what the first of them releases and the other one has not. The bucket ends where it
# depends on the small parameters how far ahead a pass fetches.
ONE_HAS_DECIDED = """
import time
from pathlib import Path
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from elaswave_plugin.adapters.deepspeed.engine.job import EngineJob
name = "_PartitionedParameterCoordinator__params_to_release"
attached, decide, jobs, reached = (
    EngineJob._attached, getattr(PartitionedParameterCoordinator, name), [], []
)
def keep(self):
    jobs.append(self)
    attached(self)
def decided(self, module, step_id):
    if (step_id, module.ds_id) != (5, 5) or reached:
        return decide(self, module, step_id)
    reached.append(module)
    worker = jobs[0]._worker
    marker = Path(worker.config.dir, "decided")
    deadline_s = time.monotonic() + 60
    while worker.slot and (worker.slot == 2 or not marker.exists()):
        worker.member.check()
        time.sleep(0.001)
        if time.monotonic() > deadline_s:
            raise TimeoutError("nobody decided, or nobody was lost, within 60 s")
    worker.phases.fire("evaluation")
    result = decide(self, module, step_id)
    marker.touch()
    return result
EngineJob._attached = keep
setattr(PartitionedParameterCoordinator, name, decided)
"""
FETCHES_LITTLE_AHEAD = {
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 200,
        "stage3_prefetch_bucket_size": 8200,
        "stage3_max_reuse_distance": 0,
    }
}


def counted(
    run: Launch, twin: Twin, reference: Launch, spec: EngineSpec, folder: Path, sabotage: str = ""
) -> list[dict[int, dict[str, int]]]:
    """Count what each survivor gathered and recorded in each step of a run that recovered."""
    counting = COUNTING.format(root=str(ROOT), folder=str(folder))
    killed = run(replace(spec, sabotage=counting + sabotage))
    check_recovered(killed, twin=twin(replace(killed, spec=spec)), reference=reference(spec))
    files = [folder / f"fetches-{slot}.json" for slot in range(spec.nproc)]
    survivors = [file for slot, file in enumerate(files) if slot != 1]
    return [
        {int(step): counts for step, counts in json.loads(file.read_text()).items()}
        for file in survivors
    ]


@proves(Kind.KILL, Promise.PLANNED, victim="1", moment="2:backward")
def test_a_redone_step_fetches_as_any_other(
    run: Launch, twin: Twin, reference: Launch, tmp_path: Path
) -> None:
    spec = EngineSpec(stage=3, steps=5, kills=("1@2:backward",))
    for steps in counted(run, twin, reference, spec, tmp_path):
        assert steps[0]["records"] and steps[0]["gathers"] > steps[1]["gathers"]
        assert not any(steps[step]["records"] for step in range(1, 5))
        assert len({steps[step]["gathers"] for step in range(2, 5)}) == 1


@proves(Kind.KILL, Promise.PLANNED, victim="1", moment="1:forward")
def test_an_order_that_some_do_not_know_is_recorded_anew(
    run: Launch, twin: Twin, reference: Launch, tmp_path: Path
) -> None:
    spec = EngineSpec(stage=3, steps=4, accumulation=1, kills=("1@1:forward",))
    for steps in counted(run, twin, reference, spec, tmp_path, ONE_IS_LATE):
        assert steps[0]["records"] and steps[1]["records"]
        assert not steps[2]["records"] and not steps[3]["records"]


@proves(Kind.KILL, Promise.PLANNED, victim="1", moment="0:evaluation")
def test_what_one_worker_has_derived_from_the_order_is_found_out_anew(
    run: Launch, reference: Launch
) -> None:
    spec = EngineSpec(
        stage=3,
        steps=3,
        nproc=3,
        global_batch=12,
        script=str(SCRIPTS / "residual.py"),
        settings=json.dumps(FETCHES_LITTLE_AHEAD),
        kills=("1@0:evaluation",),
    )
    killed = run(replace(spec, sabotage=ONE_HAS_DECIDED))
    check_survived(killed)
    assert max_relative_difference(killed, reference(spec)) <= FP32_BOUND
